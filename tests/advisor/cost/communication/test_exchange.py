"""Buckets of replicas, collectives inside units and shards of a kind, counted by hand."""

from __future__ import annotations

from math import hypot

import pytest

from advisor.cost import CostModel
from advisor.cost.calibration import CALIBRATION
from advisor.cost.communication.aggregation import Price, price
from advisor.cost.communication.compression import Sent, sent
from advisor.cost.communication.exchange import (
    communication_error,
    exchange,
    in_units,
    replicas_s,
    waiting_bytes,
)
from advisor.cost.communication.groups import expert_copies, replica_group, shard_group
from advisor.cost.communication.sharded import Sharded
from advisor.cost.communication.small_collectives import experts_s
from advisor.cost.ledger import HOST_LINK_BYTES_PER_S, Ledger
from engines.plan import Aggregation, Plan
from profiles.machine.cluster import AxisFits, Collective, LinkFit
from profiles.model.profile import ParameterShape
from profiles.model.source import CaptureSource
from profiles.units import MIB
from profiles.workload.stack import TORCH, Selective, Stack
from tests.advisor.cost.collectives import collective_s
from tests.advisor.cost.communication.test_axes import ROW, mixture
from tests.factories import chain, cpus, facts, gpus, link


@pytest.mark.parametrize(
    ("words", "mib", "sizes"),
    [
        ("", 0.5, [(0.5, 1)]),
        ("", 1, [(1, 1)]),
        ("", 51, [(1, 1), (25, 2)]),
        ("", 52, [(1, 1), (17, 3)]),
        ("bucket_mib=10", 30, [(10, 1), (10, 2)]),
        ("bucket_mib=10", 8, [(8, 1)]),
    ],
)
def test_gradients_go_in_a_small_bucket_and_equal_ones_after_it(
    words: str, mib: float, sizes: list[tuple[float, int]]
) -> None:
    """torch's first bucket has 1 MiB, unless the size is given; the work of compression is extra,
    and two consecutive sums take their shares of each bucket."""
    plan, cluster, nbytes = Plan.parse(f"dp_replicate=2 {words}"), cpus(2), mib * MIB
    sent = Sent((0.75 * nbytes, 0.25 * nbytes), work_s=3.0)
    ledger = Ledger(cluster, {})
    whole, last = replicas_s(plan, nbytes, ledger, sent, reduced_share=0.5)
    times = [
        sum(
            collective_s(cluster, Collective.ALL_REDUCE, 0.5 * share * size * MIB, group_size=2)
            for share in (0.75, 0.25)
        )
        for size, _ in sizes
    ]
    assert last == pytest.approx(times[-1])
    spent = sum(count * each for each, (_, count) in zip(times, sizes, strict=True))
    assert whole == pytest.approx(3.0 + spent)
    assert sum(t.seconds for t in ledger.traffic()) == pytest.approx(spent)


@pytest.mark.parametrize(
    ("words", "stack", "repeats"),
    [
        ("", TORCH, False),
        ("recompute=full", TORCH, True),
        ("recompute=selective", TORCH, True),
        ("recompute=selective", Stack(selective=Selective.CORE), False),
        ("recompute=full", Stack(selective=Selective.CORE), True),
    ],
)
def test_collectives_of_a_unit_are_those_of_its_passes(
    words: str, stack: Stack, repeats: bool
) -> None:
    """Keys and values of half a sequence pass the ring in a forward, in a backward and in a
    repeated forward; their gradients in a backward."""
    plan = Plan.parse(f"cp=2 microbatch_size=2 microbatches=3 {words}")
    model = CostModel(facts(chain(), cpus(2), batch=6, precision="fp32", stack=stack))
    ledger = Ledger(cpus(2), {})
    inside = in_units(plan, model.loads(plan), ledger, stack=stack)
    rank = {"group_size": 2}
    keys_s = collective_s(cpus(2), Collective.ALL_GATHER, 2 * 2 * ROW, **rank)
    gradients_s = collective_s(cpus(2), Collective.REDUCE_SCATTER, 2 * 4 * ROW, **rank)
    assert inside.forward_s == pytest.approx([keys_s] * 4)
    assert inside.backward_s == pytest.approx([keys_s + gradients_s] * 4)
    assert inside.again_s == pytest.approx([keys_s * repeats] * 4)
    spent_s = sum(map(sum, (inside.forward_s, inside.backward_s, inside.again_s)))
    assert sum(each.seconds for each in ledger.traffic()) == pytest.approx(3 * spent_s)


@pytest.mark.parametrize(
    ("words", "gathers", "reductions", "sums"),
    [
        ("dp_replicate=2 zero=1", 1, 1, 0),
        ("dp_replicate=2 zero=2", 1, 3, 0),
        ("dp_shard=2", 6, 3, 0),
        ("dp_replicate=2 dp_shard=2", 6, 3, 1),
    ],
)
def test_shards_are_gathered_and_reduced_as_often_as_their_kind_says(
    words: str, gathers: int, reductions: int, sums: int
) -> None:
    """Four units of 4 MB, three microbatches; or one group of them all, where ranks may call other
    units, which stays gathered through a microbatch."""
    plan = Plan.parse(f"{words} microbatch_size=1 microbatches=3")
    cluster = cpus(plan.world_size)
    for is_known, nbytes, units in ((True, 4e6, 4), (False, 16e6, 1)):
        source = CaptureSource.FAKE if is_known else CaptureSource.PARAMETERS
        profile = chain().model_copy(update={"source": source})
        model = CostModel(facts(profile, cluster, batch=12, precision="fp32"))
        ledger = Ledger(cluster, {})
        loads = model.loads(plan)
        sharded = exchange(plan, loads, ledger, has_host=False, sent=Sent((16e6,)))
        counts = {each.purpose: (each.payload_bytes, each.count) for each in ledger.traffic()}
        passes = gathers if is_known else (gathers + 1) // 2
        assert counts["parameters"] == (nbytes, units * passes)
        assert counts["gradients"] == (nbytes, units * reductions)
        assert counts.get("gradient shards") == ((nbytes / 2, units) if sums else None)
        gather_s = collective_s(cluster, Collective.ALL_GATHER, nbytes, group_size=2)
        assert sharded.root_gather_s == pytest.approx(0 if is_known else gather_s)
        assert sharded.gather_s == pytest.approx([gather_s if is_known else 0] * 4)


def test_shards_on_the_host_cross_its_link_with_every_gather_and_reduction() -> None:
    """100 MB over 4 ranks, 40 of them experts over 2; computing in half the bytes, sums in a
    quarter; gradient shards between 3 replicas."""
    cluster = cpus(24)
    shards = {"shards": (4, 2), "experts": (2, 8), "replicas": (3, 8)}
    shares = {"compute_share": 0.5, "reduced_share": 0.25}
    host_s = {True: 25e6 / HOST_LINK_BYTES_PER_S, False: 0.0}
    for to_host in (True, False):
        ledger, sharded = Ledger(cluster, {}), Sharded(**shards, **shares, to_host=to_host)

        def seconds(kind: Collective, nbytes: float, size: int, stride: int) -> float:
            return collective_s(cluster, kind, nbytes, group_size=size, stride=stride)

        gather, reduce = Collective.ALL_GATHER, Collective.REDUCE_SCATTER
        assert sharded.gather_s(ledger, 100e6, 40e6, count=3) == pytest.approx(
            seconds(gather, 30e6, 4, 2) + seconds(gather, 20e6, 2, 8) + host_s[to_host]
        )
        assert ledger.host_s == pytest.approx(3 * host_s[to_host])
        assert sharded.reduce_s(ledger, 100e6, 40e6, count=2) == pytest.approx(
            seconds(reduce, 15e6, 4, 2) + seconds(reduce, 10e6, 2, 8) + host_s[to_host] / 4
        )
        assert ledger.host_bytes == (3 * 25e6 + 2 * 6.25e6) * to_host
        summed = seconds(Collective.ALL_REDUCE, 6.25e6, 3, 8)
        assert sharded.replicate_s(ledger, 100e6) == pytest.approx(summed)


@pytest.mark.parametrize(
    ("words", "shards", "replicas"),
    [
        ("dp_replicate=2 dp_shard=3 cp=5 tp=7", (15, 7), (2, 105)),
        ("dp_shard=3 cp=5 tp=7", (15, 7), (5, 7)),
        ("dp_replicate=2 cp=5 tp=7", (1, 7), (10, 7)),
        ("dp_replicate=2 cp=5 tp=7 zero=1", (10, 7), (10, 7)),
    ],
)
def test_groups_are_numbered_tp_within_cp_within_shards_within_replicas(
    words: str, shards: tuple[int, int], replicas: tuple[int, int]
) -> None:
    plan = Plan.parse(words)
    assert (shard_group(plan), replica_group(plan)) == (shards, replicas)


def test_copies_of_experts_step_over_the_ranks_of_a_layer_unless_folded_over_them() -> None:
    """Rank 3 d + t of tp=3 has the experts of d modulo ep: of ep=2, d = 0 and 2 are six ranks from
    each other. Folded, every second rank has the same, whole."""
    plan, folding = Plan.parse("dp_replicate=4 ep=2 tp=3"), Stack(folds_experts=True)
    assert expert_copies(plan) == (2, 6)
    assert expert_copies(plan, folding) == (6, 2)
    assert expert_copies(Plan.parse("dp_replicate=4 ep=2 tp=3 cp=5"), folding) == (30, 2)
    alone = Plan.parse("dp_replicate=4 ep=4 tp=3")
    assert (expert_copies(alone), expert_copies(alone, folding)) == ((1, 3), (3, 4))
    assert expert_copies(Plan.parse("dp_replicate=2 tp=2 ep=8"), folding) == (1, 8)


@pytest.mark.parametrize(
    ("words", "error"),
    [
        ("dp_replicate=2", 0.3),
        ("dp_replicate=2 aggregation=ring", 0.4),
        ("dp_shard=2", 0.2),
        ("dp_replicate=2 dp_shard=2", 0.6),  # that of the sums between replicas
        ("pp=2 dp_shard=2", 0.5),  # no fit: that of the link
        ("dp_replicate=1", 0.0),
    ],
)
def test_doubt_about_messages_is_the_worst_of_the_axes_and_kinds_that_send(
    words: str, error: float
) -> None:
    def fit(residual: float) -> LinkFit:
        return LinkFit(latency_s=1e-3, busbw_bytes_per_s=1e9, relative_residual=residual)

    own = {
        Collective.ALL_REDUCE: fit(0.3),
        Collective.ALL_GATHER: fit(0.1),
        Collective.REDUCE_SCATTER: fit(0.2),
    }
    distant = AxisFits(group_size=2, stride=2, fits={Collective.ALL_REDUCE: fit(0.6)})
    axes = (AxisFits(group_size=2, stride=1, fits=own), distant)
    slow = link("loopback", 1e9, error=0.5).model_copy(
        update={"fits": {Collective.SEND_RECV: fit(0.4)}}
    )
    cluster = cpus(4).model_copy(update={"axes": axes, "intra": slow})
    assert communication_error(Plan.parse(words), cluster) == pytest.approx(hypot(0.25, error))


def test_compressed_gradients_are_factors_of_the_matrices_that_shrink_enough() -> None:
    """Rank 2 of 16 x 8 (a convolution's) sends 48 numbers for 128, 3 times; 8 x 8 would send half
    of its own, and biases are no matrices: they go as they are."""
    sizes = {(16, 2, 4): 3, (8, 8): 1, (8,): 5, (4, 4): 1}
    shapes = tuple(
        ParameterShape(sizes=each, element_bytes=4, count=count) for each, count in sizes.items()
    )
    unit = chain().units[0].model_copy(update={"shapes": shapes})
    words, device = "dp_replicate=2 compression=powersgd compression_rank=2", cpus(2).device
    gradients = 4.0 * (3 * 128 + 64 + 5 * 8 + 16)
    small = sent(Plan.parse(words), [unit], gradient_bytes=gradients, device=device)
    assert small.sums_bytes == (4 * (64 + 40 + 16), 4 * 3 * 2 * 16, 4 * 3 * 2 * 8)
    assert small.residual_bytes == gradients
    # 11 moves of memory at 10 GB/s; three products at 40 GFLOP/s; 17 operations a matrix, a fifth
    # of a launch each.
    work_s = 11 * gradients / 10e9 + 3 * 3 * 2 * 2 * 128 / 40e9 + 3 * 17 * 1e-6
    assert small.work_s == pytest.approx(work_s)
    halved = sent(
        Plan.parse("dp_replicate=2 compression=bf16"), [unit], gradient_bytes=8e9, device=device
    )
    assert (halved.sums_bytes, halved.work_s, halved.residual_bytes) == ((4e9,), 3.2, 0.0)


@pytest.mark.parametrize(
    ("kind", "group", "error"),
    [
        (Aggregation.RING, 4, 0.25),
        (Aggregation.ALL_TO_ALL, 4, 0.4),
        (Aggregation.GATHER_PARTS, 3, 0.4),
        (Aggregation.ALL_TO_ALL, 2, 0.25),
    ],
)
def test_messages_that_cross_on_a_link_are_priced_with_more_doubt(
    kind: Aggregation, group: int, error: float
) -> None:
    assert price(kind, 1e6, gpus(1, 8), group_size=group).relative_error == error
    assert price(kind, 1e6, gpus(1, 8), group_size=1) == Price(0.0, 0.0, 0.0)
    assert price(Aggregation.BACKEND, 1e6, gpus(1, 8), group_size=group).buffer_bytes == 0


def test_rings_of_split_models_step_over_the_ranks_of_a_layer() -> None:
    """tp=4 on two nodes of four: the two replicas of a part are on different nodes."""
    distant = price(Aggregation.RING, 1e6, gpus(2, 4), group_size=2, stride=4)
    near = price(Aggregation.RING, 1e6, gpus(2, 4), group_size=2)
    plan, ledger = Plan.parse("dp_replicate=2 tp=4 aggregation=ring"), Ledger(gpus(2, 4), {})
    whole, last = replicas_s(plan, 1e6, ledger, Sent((1e6,)), reduced_share=1.0)
    assert whole == last == pytest.approx(distant.seconds)
    assert sum(each.seconds for each in ledger.traffic()) == pytest.approx(distant.seconds)
    for nbytes, buffer_bytes in ((1e6, 0.5e6), (1e9, 0.5 * 25 * MIB)):
        assert waiting_bytes(plan, gpus(2, 4), Sent((nbytes,))) == buffer_bytes
    rate = CALIBRATION.collectives * 400e9 / 4  # four pipelines share the node's cards
    assert distant.seconds == pytest.approx(2 * (10e-6 + 0.5e6 / rate))
    assert near.seconds == pytest.approx(2 * (5e-6 + 0.5e6 / (CALIBRATION.collectives * 360e9)))


def test_experts_are_summed_in_flat_messages_after_which_of_them_there_are_is_known() -> None:
    """Four units with a tensor of 800 k in experts each, half of them on a rank."""
    plan = Plan.parse("dp_replicate=2 dp_shard=2 ep=2 microbatch_size=2")
    model = CostModel(facts(mixture(), cpus(4), batch=8, precision="fp32"))
    ledger = Ledger(cpus(4), {})
    experts_s(plan, model.loads(plan).runs, ledger)
    assert {each.purpose: each.payload_bytes for each in ledger.traffic()} == {
        "gradients of experts: which there are": 4 * 4,
        "gradients of experts": 4 * 800_000 * 4 / 2,
    }
