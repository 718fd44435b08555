"""Costs of local and asynchronous updates and of parameter servers, by hand."""

from __future__ import annotations

import numpy as np
import pytest

from advisor.cost import CostModel, Estimate, estimate
from advisor.cost.estimates.stragglers import waiting_s
from advisor.cost.estimates.updates import Served
from advisor.cost.ledger import HOST_LINK_BYTES_PER_S, Ledger
from advisor.decide.candidates import searched
from advisor.inputs.facts import Facts
from advisor.inputs.policy import Policy
from advisor.search.cache import SearchCache
from engines.plan import PartialPlan, Plan
from profiles.machine.cluster import ClusterProfile
from tests.factories import chain, cpus, facts, gpus

# Four layers of a million parameters: 16 MB of gradients.
PAYLOAD = 4 * 4_000_000
RATE = 1e9  # bytes/s in one direction, of a link between CPU ranks of the factory
LATENCY = 50e-6
MEMORY_RATE = 10e9


def small(ranks: int = 4, *, batch: int = 12, imbalance: float = 0.0) -> Facts:
    inputs = facts(chain(), cpus(ranks), batch=batch, precision="fp32")
    workload = inputs.workload.model_copy(update={"imbalance": imbalance})
    return inputs.model_copy(update={"workload": workload})


def priced(text: str, known: Facts) -> Estimate:
    return estimate(Plan.parse(text), known)


def test_local_steps_send_a_ddp_all_reduce_once_every_sync_every_steps() -> None:
    known = small()
    ddp = priced("dp_replicate=4 microbatch_size=3", known)
    (gradients,) = [t for t in ddp.traffic if t.purpose == "gradients" and t.payload_bytes > 2**20]
    for every in (1, 4, 16):
        plan = f"dp_replicate=4 microbatch_size=3 updates=local sync_every={every}"
        cost = priced(plan, known)
        (sent,) = cost.traffic
        assert sent.bus_bytes * every == 2 * 3 / 4 * PAYLOAD  # of an all-reduce over four
        assert sent.kind is gradients.kind
        one = LATENCY * 2 * 3 + 2 * 3 / 4 * PAYLOAD / RATE
        assert cost.time.exposed_s == pytest.approx(one / every, rel=0.01)
        assert cost.time.compute_s == ddp.time.compute_s


def test_diloco_adds_memory_and_passes_over_it() -> None:
    """A copy of the parameters and the outer momentum; fourteen passes a synchronization."""
    known = small()
    local, diloco = (
        priced(f"dp_replicate=4 microbatch_size=3 updates={kind} sync_every=10", known)
        for kind in ("local", "diloco")
    )
    assert diloco.states_bytes - local.states_bytes == 2 * PAYLOAD
    more = diloco.time.exposed_s - local.time.exposed_s
    assert more == pytest.approx(14 * PAYLOAD / MEMORY_RATE / 10)


def test_a_step_waits_for_the_link_of_the_parameter_server() -> None:
    """Three workers give 16 MB each to one server, and take as much: 48 ms there and 48 ms back; it
    adds three gradients up in passes of 10 GB/s, two reads and a write each."""
    cost = priced("dp_replicate=3 servers=1 microbatch_size=4", small())
    adding = 3 * 3 * PAYLOAD / MEMORY_RATE
    by_hand = 2 * 3 * PAYLOAD / RATE + adding + 4 * LATENCY
    assert cost.time.exposed_s == pytest.approx(by_hand)
    assert {t.purpose: t.payload_bytes * t.count for t in cost.traffic} == {
        "gradients to servers": PAYLOAD,
        "parameters from servers": PAYLOAD,
    }


def test_messages_of_accelerators_cross_the_host_link_both_ways() -> None:
    """Three workers of one node at 360 GB/s; a server adds up at 3.35 TB/s."""
    machine, ledger = gpus(1, 4), Ledger(gpus(1, 4), {})
    served = Served.of(Plan.parse("dp_replicate=3 servers=1"), machine, payload_bytes=PAYLOAD)
    seconds = served.charge(ledger, update_s=1.0, computing_s=1.0)
    host_s = 2 * PAYLOAD / HOST_LINK_BYTES_PER_S
    adding = 3 * 3 * PAYLOAD / 3.35e12
    assert seconds == pytest.approx(2 * 3 * PAYLOAD / 360e9 + adding + 4 * 5e-6 + host_s)
    assert (ledger.host_bytes, ledger.host_s) == (2 * PAYLOAD, pytest.approx(host_s))


def test_servers_share_the_traffic_and_the_update() -> None:
    """Two of them, for two workers: each gets half of 2 x 16 MB, as much as a worker sends."""
    one = priced("dp_replicate=3 servers=1 microbatch_size=4", small())
    two = priced("dp_replicate=2 servers=2 microbatch_size=6", small())
    adding = 2 * 3 * PAYLOAD / 2 / MEMORY_RATE
    assert two.time.exposed_s == pytest.approx(2 * PAYLOAD / RATE + adding + 4 * LATENCY)
    assert two.time.optimizer_s == pytest.approx(one.time.optimizer_s / 2)
    served = Served.of(Plan.parse("dp_replicate=2 servers=2"), cpus(4), payload_bytes=PAYLOAD)
    assert (served.part_bytes, served.passed_bytes) == (PAYLOAD / 2, PAYLOAD)


def test_a_server_waits_for_the_needed_gradients_and_answers_all_workers() -> None:
    """Two of three are waited for and added up; parameters go to all three."""
    cost = priced("dp_replicate=2 servers=1 backup_workers=1 microbatch_size=6", small())
    adding = 2 * 3 * PAYLOAD / MEMORY_RATE
    by_hand = 2 * PAYLOAD / RATE + adding + 3 * PAYLOAD / RATE + 4 * LATENCY
    assert cost.time.exposed_s == pytest.approx(by_hand)


def test_servers_that_choose_the_workers_of_a_step_send_each_other_two_messages() -> None:
    """Each of two workers gives half of its 16 MB to either server; one of them is needed."""
    plan = "dp_replicate=1 servers=2 backup_workers=1 microbatch_size=12"
    adding = 3 * PAYLOAD / 2 / MEMORY_RATE
    by_hand = PAYLOAD / RATE + adding + PAYLOAD / RATE + (4 + 2) * LATENCY
    assert priced(plan, small()).time.exposed_s == pytest.approx(by_hand)


def test_asynchronous_workers_run_at_full_speed_until_the_server_saturates() -> None:
    """Messages to and from the server use a link's two directions at once, in no order: of two
    links that are passed in turn, s seconds each, N workers keep one busy for N s of (N + 1) s (the
    closed form of a balanced network); a link that takes much longer than all else is always
    busy."""
    few = priced("dp_replicate=1 servers=1 updates=asynchronous microbatch_size=12", small(2))
    turn = 2 * PAYLOAD / RATE + 3 * PAYLOAD / MEMORY_RATE + 4 * LATENCY
    assert few.time.exposed_s == pytest.approx(turn)
    crowd, plan = cpus(33), "dp_replicate=32 servers=1 updates=asynchronous microbatch_size=1"
    full = priced(plan, facts(chain(), crowd, batch=32, precision="fp32"))
    # AdamW's passes over the parameters take longer than their messages.
    busy = 32 * (full.time.optimizer_s + 3 * PAYLOAD / MEMORY_RATE)
    assert full.step_s == pytest.approx(busy)
    memory = crowd.device.memory_bandwidth_bytes_per_s.model_copy(update={"value": 1e12})
    device = crowd.device.model_copy(update={"memory_bandwidth_bytes_per_s": memory})
    quick = crowd.model_copy(update={"device": device})
    passed = priced(plan, facts(chain(), quick, batch=32, precision="fp32"))
    assert passed.step_s == pytest.approx(33 * PAYLOAD / RATE, rel=0.05)


def test_traffic_between_nodes_is_limited_by_the_cards_of_the_servers_node() -> None:
    """Eight cards of 50 GB/s: one server reaches 50, and fifteen workers, eight of them away, give
    it 16 MB each; workers of its own node reach it over 360 GB/s."""
    machines = gpus(2, 8)
    plan = Plan.parse("dp_replicate=15 servers=1")
    served = Served.of(plan, machines, payload_bytes=PAYLOAD)
    assert served.in_s == pytest.approx(8 * PAYLOAD / 50e9)
    assert served.worker_s == pytest.approx(PAYLOAD / 50e9)
    whole_node = Served.of(Plan.parse("dp_replicate=8 servers=8"), machines, payload_bytes=PAYLOAD)
    assert whole_node.in_s == pytest.approx(8 * 8 * PAYLOAD / 8 / 400e9)
    # Nine servers: the last one shares the second node with seven workers on slow links.
    slow = gpus(3, 8, intra_bytes_per_s=10e9)
    several = Served.of(Plan.parse("dp_replicate=15 servers=9"), slow, payload_bytes=PAYLOAD)
    assert several.in_s == pytest.approx(7 * PAYLOAD / 9 / 10e9)


@pytest.mark.parametrize(
    ("plan", "needed", "given"),
    [
        ("dp_replicate=8", 8, 8),
        ("dp_replicate=6 backup_workers=1 servers=1", 6, 7),
        ("dp_replicate=4 backup_workers=3 servers=1", 4, 7),
    ],
)
def test_waiting_for_the_slowest_rank_matches_a_simulation(
    plan: str, needed: int, given: int
) -> None:
    """Draw the ranks' times, sort them, and take the one that is waited for."""
    drawn = np.random.default_rng(1).normal(1.0, 0.1, (200_000, given))
    expected = np.sort(drawn, axis=1)[:, needed - 1].mean() - 1.0
    waited_s = waiting_s(Plan.parse(plan), computing_s=1.0, imbalance=0.1)
    assert waited_s == pytest.approx(max(0.0, expected), abs=2e-3)


def test_local_steps_wait_less_and_asynchronous_workers_never() -> None:
    every_step = waiting_s(Plan.parse("dp_replicate=8"), computing_s=1.0, imbalance=0.1)
    rarely = Plan.parse("dp_replicate=8 updates=local sync_every=16")
    assert waiting_s(rarely, computing_s=1.0, imbalance=0.1) == pytest.approx(every_step / 4)
    never = Plan.parse("dp_replicate=7 servers=1 updates=asynchronous")
    assert waiting_s(never, computing_s=1.0, imbalance=0.1) == 0
    known = small(imbalance=0.1)
    uneven = priced("dp_replicate=4 microbatch_size=3", known)
    plain = priced("dp_replicate=4 microbatch_size=3", small())
    assert uneven.step_s - plain.step_s == pytest.approx(uneven.time.straggling_s)
    computing = uneven.time.compute_s + uneven.time.launch_s
    assert uneven.time.straggling_s == waiting_s(
        Plan.parse("dp_replicate=4"), computing_s=computing, imbalance=0.1
    )


SETTINGS = [
    {"updates": "local", "sync_every": 4},
    {"updates": "diloco", "sync_every": 4},
    {"servers": 1},
    {"servers": 1, "backup_workers": 1},
    {"servers": 2, "updates": "asynchronous"},
    {"servers": 2, "updates": "asynchronous", "max_staleness": 1},
]


@pytest.mark.parametrize("settings", SETTINGS)
@pytest.mark.parametrize("cluster", [gpus(2, 4), cpus(4)])
def test_no_estimate_is_below_the_bounds_of_the_search(
    settings: dict[str, object], cluster: ClusterProfile
) -> None:
    known = facts(chain(), cluster, batch=24, precision="fp32")
    partial = PartialPlan.build(settings)
    search = searched(SearchCache(CostModel(known)), partial, Policy())
    space = search.space
    extra = partial.extra_ranks
    assert (len(space) > 0) == (24 % (cluster.world_size - extra) == 0)
    for index in range(len(space)):
        candidate = search.candidate(index)
        plan = candidate.plan
        assert not plan.updates_in_step
        assert plan.world_size == cluster.world_size
        cost = candidate.estimate
        assert search.bounds.step_s[index] <= cost.step_s * (1 + 1e-9)
        assert search.bounds.peak_high_bytes[index] <= cost.peak_high_bytes * (1 + 1e-9)
