"""Costs of aggregations against the formulas of the literature, and against their own messages."""

from __future__ import annotations

from collections import defaultdict
from math import ceil, log2

import pytest

from advisor.cost import estimate
from advisor.cost.calibration import CALIBRATION
from advisor.cost.communication.aggregation import buffer_share, price, steps
from engines.optional.aggregation.rounds import parts, rounds
from engines.plan import Aggregation, Plan
from profiles.machine.cluster import Collective
from profiles.model.profile import ParameterShape
from tests.advisor.cost.collectives import collective_s
from tests.factories import chain, cpus, facts, gpus

KINDS = [kind for kind in Aggregation if kind is not Aggregation.BACKEND]
S = 1e9  # bytes
A, RATE = 5e-6, CALIBRATION.collectives * 360e9  # of links in a node of `gpus`, inside a step


@pytest.mark.parametrize("n", [2, 4, 8])
def test_on_equal_links_the_textbooks_formulas_hold(n: int) -> None:
    """Thakur, Rabenseifner and Gropp 2005; Patarasuk and Yuan 2009."""
    node = gpus(1, 8)
    wanted = {
        Aggregation.GATHER: 2 * (A + (n - 1) * S / RATE),
        Aggregation.GATHER_PARTS: 2 * (A + (n - 1) / n * S / RATE),
        Aggregation.REDUCE_BROADCAST: 2 * ceil(log2(n)) * (A + S / RATE),
        Aggregation.ALL_TO_ALL: A + (n - 1) * S / RATE,
        Aggregation.RING: 2 * (n - 1) * (A + S / n / RATE),
    }
    for kind, seconds in wanted.items():
        assert price(kind, S, node, group_size=n).seconds == pytest.approx(seconds), kind


def test_a_parameter_device_is_a_bottleneck_and_a_ring_has_none() -> None:
    """The link of a parameter device carries 2(n-1) tensors, a link of a ring fewer than two."""
    node = gpus(1, 8)
    for n in (2, 4, 8):
        device = price(Aggregation.GATHER, S, node, group_size=n)
        ring = price(Aggregation.RING, S, node, group_size=n)
        assert device.link_bytes == pytest.approx(2 * (n - 1) * S)
        assert ring.link_bytes == pytest.approx(2 * (n - 1) / n * S)
        assert (device.buffer_bytes, ring.buffer_bytes) == pytest.approx(((n - 1) * S, S / n))
    four = price(Aggregation.GATHER, S, node, group_size=8, devices=4)
    assert four.link_bytes == pytest.approx(2 * 7 / 4 * S)
    assert four.buffer_bytes == pytest.approx(7 / 4 * S)


def test_a_ring_is_the_backends_all_reduce_where_that_is_a_ring() -> None:
    node = gpus(1, 8)
    ring = price(Aggregation.RING, S, node, group_size=8).seconds
    payload = S / CALIBRATION.collectives  # as long as on links that nothing shares
    assert ring == pytest.approx(collective_s(node, Collective.ALL_REDUCE, payload, group_size=8))
    own = price(Aggregation.BACKEND, S, node, group_size=8)
    assert own.seconds == pytest.approx(ring)
    assert own.link_bytes == pytest.approx(14 / 8 * S)


def test_between_two_slow_nodes_a_hierarchy_sends_what_trees_would() -> None:
    """By hand, 2 nodes of 8 at 10 GB/s: 7 + 7 rounds of S/8 inside, 2 of S/16 a rank between."""
    slow = gpus(2, 8, inter_bytes_per_s=10e9)
    hierarchical = price(Aggregation.HIERARCHICAL, S, slow, group_size=16).seconds
    rate = CALIBRATION.collectives * 10e9
    inside, between = 14 * (A + S / 8 / RATE), 2 * (10e-6 + S / 16 / (rate / 8))
    assert hierarchical == pytest.approx(inside + between)
    ring = price(Aggregation.RING, S, slow, group_size=16).seconds
    assert ring == pytest.approx(30 * (10e-6 + S / 16 / rate))
    assert ring > 1.7 * hierarchical


@pytest.mark.parametrize(("n", "k"), [(2, 2), (4, 4), (4, 2), (6, 3), (8, 4), (8, 2), (4, 1)])
@pytest.mark.parametrize("kind", KINDS)
def test_charged_loads_equal_the_bytes_of_the_messages(kind: Aggregation, n: int, k: int) -> None:
    """Bytes of the busiest link of each round, summed over all rounds, counted from the
    messages."""
    inside = between = 0.0
    for messages in rounds(kind, n, per_node=k):
        device: dict[tuple[int, str], float] = defaultdict(float)
        node: dict[tuple[int, str], float] = defaultdict(float)
        for m in messages:
            share = len(m.parts) / parts(kind, n)
            if m.source // k == m.target // k:
                device[m.source, "out"] += share
                device[m.target, "in"] += share
            else:
                node[m.source // k, "out"] += share
                node[m.target // k, "in"] += share
        inside += max(device.values(), default=0.0)
        between += max(node.values(), default=0.0)
    charged_inside = charged_between = 0.0
    for step in steps(kind, n, per_node=k):
        for load in step.loads:
            # A ring over all ranks puts its load on both tiers; parallel rings share the cards.
            crosses = load.size * load.stride > k
            stays = not crosses or (kind is Aggregation.RING and k > 1)
            charged_between += step.rounds * load.share * load.stride * crosses
            charged_inside += step.rounds * load.share * stays
    assert charged_inside == pytest.approx(inside)
    assert charged_between == pytest.approx(between)


@pytest.mark.parametrize("n", [2, 3, 4, 8])
@pytest.mark.parametrize("kind", KINDS)
def test_buffers_hold_the_messages_that_arrive_at_once(kind: Aggregation, n: int) -> None:
    most = 0.0
    for messages in rounds(kind, n, per_node=n):
        waiting: dict[int, float] = defaultdict(float)
        for m in messages:
            waiting[m.target] += m.adds * len(m.parts) / parts(kind, n)
        most = max(most, *waiting.values())
    assert buffer_share(kind, n, per_node=n) == pytest.approx(most)


def test_a_plan_is_charged_for_its_messages() -> None:
    """Gradients of 16 MB in buckets of 1 MiB and the rest, on two nodes of two."""
    known = facts(chain(), gpus(2, 2), batch=4, precision="fp32")
    text = "dp_replicate=4 microbatch_size=1 aggregation=hierarchical"
    cost = estimate(Plan.parse(text), known)
    sends = [t for t in cost.traffic if t.purpose == "gradients (hierarchical)"]
    sent = {(t.group_size, t.stride): 0.0 for t in sends}
    for t in sends:
        sent[t.group_size, t.stride] += t.payload_bytes * t.count
    assert sent == pytest.approx({(2, 1): 2 * 16e6 / 2, (2, 2): 2 * 16e6 / 4})
    assert not [t for t in cost.traffic if t.purpose == "gradients"]


def test_powersgd_is_charged_for_its_factors_its_work_and_its_memory() -> None:
    """Four matrices of 1000 x 1000 fp32: rank 2 sends 2 x 2000 numbers of each."""
    model = chain()
    matrix = ParameterShape(sizes=(1000, 1000), element_bytes=4)
    units = tuple(unit.model_copy(update={"shapes": (matrix,)}) for unit in model.units)
    model = model.model_copy(update={"units": units})
    known = facts(model, cpus(2), batch=2, precision="fp32")
    plain = estimate(Plan.parse("dp_replicate=2 microbatch_size=1"), known)
    words = "dp_replicate=2 microbatch_size=1 compression=powersgd compression_rank=2"
    small = estimate(Plan.parse(words), known)
    bytes_of = [
        sum(t.payload_bytes * t.count for t in e.traffic if t.purpose == "gradients")
        for e in (plain, small)
    ]
    assert bytes_of == pytest.approx([16e6, 4 * 2 * 2000 * 4])
    assert small.peak_bytes - plain.peak_bytes == pytest.approx(16e6)
    # Memory is moved 11 times at 10 GB/s, three products of 2 x 2 x 1e6 FLOP at 40 GFLOP/s, and
    # 3 + 7 x 2 operations a matrix, each a fifth of a launch with its module and autograd.
    work = 11 * 16e6 / 10e9 + 4 * 3 * 4e6 / 40e9 + 4 * 17 * 5e-6 / 5
    exchanged = sum(t.seconds for t in small.traffic if "gradients" in t.purpose)
    assert small.time.exposed_s == pytest.approx(exchanged + work)


def test_bf16_halves_the_bytes() -> None:
    known = facts(chain(), cpus(2), batch=2, precision="fp32")
    cost = estimate(Plan.parse("dp_replicate=2 microbatch_size=1 compression=bf16"), known)
    sent = sum(t.payload_bytes * t.count for t in cost.traffic if t.purpose == "gradients")
    assert sent == pytest.approx(8e6)
