"""Time and traffic against formulas worked out by hand."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from advisor.cost import Estimate, estimate
from advisor.cost.communication.exchange import COMMUNICATION_ERROR, Exchange, communication_error
from advisor.cost.communication.replay import replay, slowdown
from advisor.cost.compute.unit_times import UnitTime, product_efficiency, size_efficiency
from advisor.decide.candidates import legal_plans
from engines.plan import PartialPlan, Plan
from profiles.errors import PlanError
from profiles.machine.cluster import AxisFits, Collective, LinkFit, Overlap
from profiles.provenance import Quantity, Source
from profiles.workload.stack import TORCH, Stack
from tests.advisor.cost.collectives import collective_s
from tests.factories import chain, cpus, facts, gpus, transformer

COUNTS = 6 * 8  # of replicas
"""Bytes of a step's message of terms of the loss, rows, failed ranks and kind of step, in fp64."""


def on_cpus(plan: str, *, ranks: int, batch: int) -> Estimate:
    return estimate(Plan.parse(plan), facts(chain(), cpus(ranks), batch=batch, precision="fp32"))


def test_computing_is_flop_over_reached_rate_plus_bytes_over_bandwidth() -> None:
    cost = on_cpus("microbatch_size=2 accumulation=3", ranks=1, batch=6)
    # Four units, 2 FLOP a parameter and token forward, twice that backward; 50 GFLOP/s x 0.8.
    flop = 6 * 4 * 3 * 2 * 512 * 1_000_000
    # Two rows forward, four backward; 10 GB/s.
    moved = 6 * 4 * 6 * 512 * 1000 * 4
    # Two of three microbatches find gradients: both are read, their sum is written.
    added = 2 * 3 * 4_000_000 * 4
    assert cost.time.compute_s == pytest.approx(flop / 40e9 + (moved + added) / 10e9)
    # An addition by itself is a fifth of a kernel with its module's call and its node.
    assert cost.time.launch_s == pytest.approx((3 * 4 * 3 + 2 * 4 / 5) * 5e-6)
    assert cost.time.exposed_s == pytest.approx(0, abs=1e-12)
    # AdamW in passes that each read and write: 84 bytes per element
    # (tests/engines/state/test_optimizer_footprint), 9 a pass, of each of four tensors.
    passes = 4 * 84 / 9
    assert cost.time.optimizer_s == pytest.approx(4e6 * 84 / 10e9 + passes * 5e-6 / 5)
    assert cost.mfu == pytest.approx(flop / cost.step_s / 50e9)
    assert cost.samples_per_s == pytest.approx(6 / cost.step_s)


@pytest.mark.parametrize(
    ("plan", "share"),
    [
        ("dp_replicate=4", 1.0),
        ("dp_replicate=4 zero=1", 1.0),
        ("dp_replicate=4 zero=2", 1 / 4),
        ("dp_shard=4", 1 / 4),
    ],
)
def test_further_microbatches_add_whole_gradients_or_shards(plan: str, share: float) -> None:
    """Three times the bytes of them, 16 MB over 10 GB/s, for each microbatch but the first."""
    microbatches, rows = 5, 2
    once = on_cpus(f"{plan} microbatch_size={rows}", ranks=4, batch=4 * rows).time.compute_s
    often = on_cpus(
        f"{plan} microbatch_size={rows} accumulation={microbatches}",
        ranks=4,
        batch=4 * rows * microbatches,
    ).time.compute_s
    added = (microbatches - 1) * 3 * share * 16e6 / 10e9
    assert often - microbatches * once == pytest.approx(added)


@pytest.mark.parametrize(("gflop", "efficiency"), [(128, 0.95), (16, 0.9), (1, 0.6), (0, 0.1)])
def test_matmul_efficiency_meets_calculons_points(gflop: float, efficiency: float) -> None:
    # On the device of the curve, an A100 of 312 TFLOP/s; relative to what large products reach.
    assert size_efficiency(gflop * 1e9, 312e12) == pytest.approx(efficiency / 0.95)


def test_ring_collectives_pay_each_step_and_their_bus_bytes() -> None:
    node = gpus(1, 8)
    payload = 1e9
    gather = collective_s(node, Collective.ALL_GATHER, payload, group_size=8)
    assert gather == pytest.approx(7 * 5e-6 + 7 / 8 * payload / 360e9)
    reduce = collective_s(node, Collective.ALL_REDUCE, payload, group_size=8)
    assert reduce == pytest.approx(14 * 5e-6 + 14 / 8 * payload / 360e9)


def test_in_an_all_to_all_the_ranks_of_a_node_share_its_cards() -> None:
    """Two nodes of eight with 400 GB/s each: half of what all eight hold goes to the other node."""
    seconds = collective_s(gpus(2, 8), Collective.ALL_TO_ALL, 1e9, group_size=16)
    assert seconds == pytest.approx(14 * 5e-6 + 1 * 10e-6 + 8 * 1e9 / 2 / 400e9)
    # A gather of as much crosses the cards once for all of them: links inside are slower.
    gather = collective_s(gpus(2, 8), Collective.ALL_GATHER, 1e9, group_size=16)
    assert gather == pytest.approx(14 * 5e-6 + 1 * 10e-6 + 15 / 16 * 1e9 / 360e9)
    # One rank of every node: its own eighth of the cards, as before.
    alone = collective_s(gpus(4, 8), Collective.ALL_TO_ALL, 1e9, group_size=4, stride=8)
    assert alone == pytest.approx(3 * 10e-6 + 3 / 4 * 1e9 / 50e9)
    # With cards for everybody's bytes, what stays inside the node takes longest.
    fast = gpus(2, 8, inter_bytes_per_s=1e14)
    inside = collective_s(fast, Collective.ALL_TO_ALL, 1e9, group_size=16)
    assert inside == pytest.approx(14 * 5e-6 + 1 * 10e-6 + 7 / 16 * 1e9 / 360e9)


def test_a_group_of_one_rank_per_node_gets_its_share_of_the_nodes_cards() -> None:
    nodes = gpus(4, 8)
    between = collective_s(nodes, Collective.ALL_REDUCE, 1e9, group_size=4, stride=8)
    # 400 GB/s a node, eight such groups at once; a tree of four nodes is two levels up and down.
    assert between == pytest.approx(2 * 2 * 10e-6 + 2 * 3 / 4 * 1e9 / 50e9)


def test_an_all_reduce_over_two_nodes_sends_its_payload_once_between_them() -> None:
    slow = gpus(2, 8, inter_bytes_per_s=10e9)
    seconds = collective_s(slow, Collective.ALL_REDUCE, 1e9, group_size=16)
    # Trees over nodes: 2 x (2-1)/2 of the payload at 10 GB/s; a ring of 16 would send 1.9 of it.
    assert seconds == pytest.approx(2 * 7 * 5e-6 + 2 * 10e-6 + 1e9 / 10e9)


def test_a_measured_fit_takes_precedence() -> None:
    cluster = cpus(2)
    assert cluster.intra is not None
    fit = LinkFit(latency_s=1e-3, busbw_bytes_per_s=2e9)
    link = cluster.intra.model_copy(update={"fits": {Collective.ALL_REDUCE: fit}})
    measured = cluster.model_copy(update={"intra": link})
    seconds = collective_s(measured, Collective.ALL_REDUCE, 1e6, group_size=2)
    assert seconds == pytest.approx(1e-3 + 1e6 / 2e9)


def test_a_fit_of_all_ranks_is_divided_among_groups_that_share_a_nodes_cards() -> None:
    """Eight devices behind two cards: all at once saw 40 GB/s between nodes. A group with one rank
    a node is one of eight that talk at once; one inside a node uses no cards."""
    fits = {Collective.ALL_REDUCE: LinkFit(latency_s=1e-3, busbw_bytes_per_s=40e9)}
    cluster = gpus(2, 8, inter_bytes_per_s=50e9).model_copy(update={"network_cards": 2})
    assert cluster.inter is not None
    assert cluster.intra is not None
    measured = cluster.model_copy(
        update={
            "inter": cluster.inter.model_copy(update={"fits": fits}),
            "intra": cluster.intra.model_copy(update={"fits": fits}),
        }
    )
    all_ranks = collective_s(measured, Collective.ALL_REDUCE, 1e9, group_size=16)
    assert all_ranks == pytest.approx(1e-3 + 2 * 15 / 16 * 1e9 / 40e9)
    alone = collective_s(measured, Collective.ALL_REDUCE, 1e9, group_size=2, stride=8)
    assert alone == pytest.approx(1e-3 + 1e9 / (40e9 / 8))
    inside = collective_s(measured, Collective.ALL_REDUCE, 1e9, group_size=2)
    assert inside == pytest.approx(1e-3 + 1e9 / 40e9)


def test_a_measured_axis_takes_precedence_over_the_tier_and_only_on_itself() -> None:
    exact = LinkFit(latency_s=2e-3, busbw_bytes_per_s=3e9)
    axis = AxisFits(group_size=2, stride=2, fits={Collective.ALL_GATHER: exact})
    cluster = cpus(4).model_copy(update={"axes": (axis,)})
    there = collective_s(cluster, Collective.ALL_GATHER, 1e6, group_size=2, stride=2)
    assert there == pytest.approx(2e-3 + 0.5e6 / 3e9)
    for elsewhere in ({"group_size": 2}, {"group_size": 4}):
        known = collective_s(cpus(4), Collective.ALL_GATHER, 1e6, **elsewhere)
        assert collective_s(cluster, Collective.ALL_GATHER, 1e6, **elsewhere) == known


def test_the_error_of_communication_is_that_of_the_plans_collectives() -> None:
    def fit(residual: float) -> LinkFit:
        return LinkFit(latency_s=1e-3, busbw_bytes_per_s=1e9, relative_residual=residual)

    fits = {
        Collective.ALL_REDUCE: fit(0.3),
        Collective.ALL_GATHER: fit(0.1),
        Collective.REDUCE_SCATTER: fit(0.2),
        Collective.ALL_TO_ALL: fit(0.9),
    }
    cluster = cpus(2).model_copy(update={"axes": (AxisFits(group_size=2, stride=1, fits=fits),)})
    for plan, residual in (("dp_replicate=2", 0.3), ("dp_shard=2", 0.2)):
        error = communication_error(Plan.parse(plan), cluster)
        assert error == pytest.approx((COMMUNICATION_ERROR**2 + residual**2) ** 0.5)


def times_as_long(value: float, error: float = 0.0) -> Quantity:
    return Quantity(value=value, source=Source.MEASURED, relative_error=error)


@pytest.mark.parametrize("sent_s", [0.1, 10.0])
def test_assumed_contention_slows_computing_and_sending_alike(sent_s: float) -> None:
    """Galvatron's 1.1 to 1.3, where nobody measured."""
    assumed = slowdown(None, computing_s=1.0, sent_s=sent_s)
    assert assumed.low == pytest.approx(0.1)
    assert assumed.middle == pytest.approx(0.2)
    assert assumed.high == pytest.approx(0.3)


def test_measured_contention_equals_two_queues_worked_out_by_hand() -> None:
    overlap = Overlap(computing=times_as_long(1.5), communication=times_as_long(3.0))
    # One second of sending takes 3 while computing runs, which does 2 of its 10 in that time: the
    # other 8 follow. 3 + 8 = 11: a second more.
    assert slowdown(overlap, computing_s=10, sent_s=1).middle == pytest.approx(3 + 8 - 10)
    # One second of computing takes 1.5 while sending runs, which does 0.5 of its 10: 1.5 + 9.5.
    assert slowdown(overlap, computing_s=1, sent_s=10).middle == pytest.approx(1.5 + 9.5 - 10)


def test_a_machine_without_contention_is_faster_than_the_usual_one() -> None:
    none = Overlap(computing=times_as_long(1), communication=times_as_long(1))
    usual = estimate(Plan.parse("dp_shard=8 microbatch_size=1"), facts(cluster=gpus(1, 8)))
    free = estimate(
        Plan.parse("dp_shard=8 microbatch_size=1"),
        facts(cluster=gpus(1, 8).model_copy(update={"overlap": none})),
    )
    assert usual.time.overlapped_s > 0
    assert usual.step_s - free.step_s == pytest.approx(0.2 * usual.time.overlapped_s)


def test_measured_efficiency_of_products_replaces_the_curve_on_accelerators() -> None:
    shares = {512: 0.1, 1024: 0.5, 8192: 1.0}
    efficiency = {edge: times_as_long(share) for edge, share in shares.items()}
    device = gpus(1, 1).device.model_copy(update={"matmul_efficiency": efficiency})
    for edge, share in shares.items():
        assert product_efficiency(device, 2.0 * edge**3, 1e15) == pytest.approx(share)
    # Half-way on the logarithm of the FLOP, and no further than what was measured.
    between = 2.0 * (512 * 1024) ** 1.5
    assert product_efficiency(device, between, 1e15) == pytest.approx(0.3)
    assert product_efficiency(device, 1.0, 1e15) == pytest.approx(0.1)
    assert product_efficiency(device, 1e18, 1e15) == pytest.approx(1.0)
    cpu = cpus(1).device.model_copy(update={"matmul_efficiency": efficiency})
    assert product_efficiency(cpu, 1e9, 1e12) == size_efficiency(1e9, 1e12)


@pytest.mark.parametrize(
    ("plan", "expected"),
    [
        # payload bytes: calls, for 4 units of 4 MB and 3 microbatches
        ("dp_replicate=4", {("all_reduce", 2**20): 1, ("all_reduce", 16_000_000 - 2**20): 1}),
        (
            "dp_replicate=4 zero=1",
            {("all_gather", 4_000_000): 4, ("reduce_scatter", 4_000_000): 4},
        ),
        (
            "dp_replicate=4 zero=2",
            {("all_gather", 4_000_000): 4, ("reduce_scatter", 4_000_000): 12},
        ),
        (
            "dp_shard=4",
            {("all_gather", 4_000_000): 24, ("reduce_scatter", 4_000_000): 12},
        ),
        (
            "dp_replicate=2 dp_shard=2",
            {
                ("all_gather", 4_000_000): 24,
                ("reduce_scatter", 4_000_000): 12,
                ("all_reduce", 2_000_000): 4,
            },
        ),
    ],
)
def test_collectives_of_a_step_are_those_of_the_engines(
    plan: str, expected: dict[tuple[str, int], int]
) -> None:
    cost = on_cpus(f"{plan} microbatch_size=1 accumulation=3", ranks=4, batch=12)
    large = {
        (t.kind.value, t.payload_bytes): t.count for t in cost.traffic if t.payload_bytes > COUNTS
    }
    assert large == expected
    small = {t.payload_bytes: t.count for t in cost.traffic if t.payload_bytes <= COUNTS}
    assert small == {COUNTS: 1, 4: 1}  # the counts and the loss


def test_zero_3_sends_half_as_much_again_as_ddp_and_zero_1_as_much() -> None:
    """ZeRO paper, section 7: 2P elements for DDP and stages 1 and 2, 3P for stage 3."""
    bus = {
        plan: sum(
            t.bus_bytes
            for t in on_cpus(f"{plan} microbatch_size=1", ranks=4, batch=4).traffic
            if t.payload_bytes > COUNTS
        )
        for plan in ("dp_replicate=4", "dp_replicate=4 zero=1", "dp_shard=4")
    }
    assert bus["dp_replicate=4"] == pytest.approx(2 * 3 / 4 * 16e6)
    assert bus["dp_replicate=4 zero=1"] == pytest.approx(bus["dp_replicate=4"])
    assert bus["dp_shard=4"] == pytest.approx(1.5 * bus["dp_replicate=4"])


def units(count: int, forward_s: float, backward_s: float) -> tuple[UnitTime, ...]:
    return (UnitTime(forward_s, backward_s, 0.0, 0.0, 0.0, 0.0),) * count


def sent(count: int, *, gather_s: float, reduce_s: float) -> Exchange:
    zeros = (0.0,) * count
    return Exchange((gather_s,) * count, (reduce_s,) * count, zeros, zeros, zeros, zeros)


@pytest.mark.parametrize(
    ("gather_s", "reduce_s", "exposed_s"),
    [
        # Hidden but for the first gather of each pass and the last reduction.
        (4.0, 0.0, 4 + 4),
        (4.0, 3.0, 4 + 4 + 3),
        # Forward: first gather, then max(0, AG - F) twice = 15 + 2 x 5.
        # Backward of 20 s hides the others: first gather 15.
        (15.0, 0.0, 15 + 2 * 5 + 15),
    ],
)
def test_replay_exposes_what_computing_cannot_hide(
    gather_s: float, reduce_s: float, exposed_s: float
) -> None:
    plan = Plan.parse("dp_shard=2 microbatch_size=1")
    replayed = replay(
        plan, units(3, 10, 20), sent(3, gather_s=gather_s, reduce_s=reduce_s), overlaps=True
    )
    assert replayed.wall_s == pytest.approx(3 * 30 + exposed_s)


def test_nothing_overlaps_on_cpus() -> None:
    plan = Plan.parse("dp_shard=2 microbatch_size=1")
    exchanged = sent(3, gather_s=4, reduce_s=3)
    replayed = replay(plan, units(3, 10, 20), exchanged, overlaps=False)
    assert replayed.wall_s == pytest.approx(3 * 30 + 6 * 4 + 3 * 3)


def test_host_transfers_are_counted_separately_from_collectives() -> None:
    """ZeRO-1 on one device: all fp32 parameters come once, all fp32 gradients go once."""
    small = transformer(name="small", layers=3, hidden=256, ffn=512, vocab=1000, tokens=64)
    plan = Plan.parse("zero=1 microbatch_size=2 accumulation=2 precision=bf16 offload=states")
    cost = estimate(plan, facts(small, gpus(1, 1), batch=4))
    moved = 2 * 4 * small.parameters
    assert cost.host_traffic_bytes == moved
    assert cost.time.exposed_s == pytest.approx(0, abs=1e-12)
    # 24 GB/s of PCIe; what is hidden slows computing by a fifth of its length.
    hidden = cost.time.overlapped_s
    assert cost.time.host_s == pytest.approx(moved / 24e9 - hidden + 0.2 * hidden)


def test_host_transfers_and_collectives_share_the_exposed_time() -> None:
    plan = Plan.parse("dp_shard=8 microbatch_size=1 precision=bf16 offload=states")
    slow = facts(transformer(layers=4), gpus(1, 8, intra_bytes_per_s=24e9), batch=8)
    cost = estimate(plan, slow)
    sent = sum(traffic.seconds for traffic in cost.traffic)
    # One queue: what is not hidden is shared out as the seconds that wait in it.
    transfers = cost.host_traffic_bytes / 24e9
    assert cost.time.host_s / cost.time.exposed_s == pytest.approx(transfers / sent)
    assert cost.time.total == pytest.approx(cost.step_s)


def test_the_range_of_a_step_includes_the_error_of_launch_times() -> None:
    """Launch times are uncertain by half; so is a step that consists of launches only."""
    launched = cpus(1)
    wide = launched.device.launch_s.model_copy(update={"relative_error": 0.5, "value": 100.0})
    device = launched.device.model_copy(update={"launch_s": wide})
    whole = facts(
        chain(), launched.model_copy(update={"device": device}), batch=1, precision="fp32"
    )
    cost = estimate(Plan.parse("microbatch_size=1"), whole)
    # With the 15 % of the model itself, as independent errors add: sqrt(0.5^2 + 0.15^2).
    assert cost.step_high_s / cost.step_s == pytest.approx(1.522, abs=0.001)


def test_accumulation_exchanges_ddp_gradients_once() -> None:
    once = on_cpus("dp_replicate=4 microbatch_size=4", ranks=4, batch=16)
    often = on_cpus("dp_replicate=4 microbatch_size=1 accumulation=4", ranks=4, batch=16)
    assert often.time.exposed_s == pytest.approx(once.time.exposed_s)


def test_full_recompute_runs_the_blocks_forward_again() -> None:
    cost = on_cpus("microbatch_size=1 recompute=full", ranks=1, batch=1)
    # Forward is a third of forward and backward, in FLOP and in bytes here.
    assert cost.time.recompute_s == pytest.approx(cost.time.compute_s / 3)


@pytest.mark.parametrize(
    ("stack", "kernels"),
    [
        # A forward and two backward; one again; hooks in Python, two for a kernel of the backward.
        (TORCH, {"none": 3, "full": 3 + 1 + 2 * 2, "selective": 3 + 1 + 2 * 2 + 5}),
        (TORCH.model_copy(update={"recomputes_whole": True}), {"none": 3, "full": 3 + 1}),
    ],
)
def test_recompute_costs_a_processor_its_hooks(stack: Stack, kernels: dict[str, int]) -> None:
    for recompute, launched in kernels.items():
        plan = Plan.parse(f"microbatch_size=1 recompute={recompute}")
        known = facts(chain(), cpus(1), batch=1, precision="fp32", stack=stack)
        assert estimate(plan, known).time.launch_s == pytest.approx(4 * launched * 5e-6)


def test_an_accelerator_that_is_busy_hides_the_hooks_of_recompute() -> None:
    known = facts(transformer(), gpus(1, 8), batch=8)
    none, full, selective = (
        estimate(Plan.parse(f"dp_shard=8 microbatch_size=1 recompute={kind}"), known).time
        for kind in ("none", "full", "selective")
    )
    assert none.launch_s == full.launch_s == selective.launch_s
    hooks = 10 + 1  # of the first unit, before which the device has nothing to do
    assert 0 < none.launch_s < hooks * known.cluster.device.launch_s.value


def test_a_plan_without_a_microbatch_size_is_refused() -> None:
    with pytest.raises(PlanError, match="microbatch_size open"):
        on_cpus("dp_shard=2", ranks=2, batch=2)


SMALL = transformer(name="small", layers=3, hidden=256, ffn=512, vocab=1000, tokens=64)


@given(
    faster=st.floats(1, 1000),
    latency=st.sampled_from((1.0, 0.5)),
    index=st.integers(0, 200),
    tier=st.sampled_from(("intra", "inter")),
)
def test_faster_links_never_lengthen_a_step(
    faster: float, latency: float, index: int, tier: str
) -> None:
    before = facts(SMALL, gpus(2, 4, inter_bytes_per_s=5e9), batch=16)
    link = getattr(before.cluster, tier)
    bandwidth = link.bandwidth_bytes_per_s
    better = link.model_copy(
        update={
            "bandwidth_bytes_per_s": bandwidth.model_copy(
                update={"value": bandwidth.value * faster}
            ),
            "latency_s": link.latency_s.model_copy(
                update={"value": link.latency_s.value * latency}
            ),
        }
    )
    after = facts(SMALL, before.cluster.model_copy(update={tier: better}), batch=16)
    plans = legal_plans(before, PartialPlan())
    plan = plans[index % len(plans)]
    assert estimate(plan, after).step_s <= estimate(plan, before).step_s * (1 + 1e-12)


def test_the_parts_add_up_to_the_step_and_lie_in_its_range() -> None:
    for plan in legal_plans(facts(), PartialPlan()):
        cost = estimate(plan, facts())
        assert cost.time.total == pytest.approx(cost.step_s)
        assert cost.step_low_s < cost.step_s < cost.step_high_s
        assert 0 < cost.mfu < 1


def test_neither_ring_nor_tree_outruns_an_oversubscribed_switch() -> None:
    """Two nodes at 400 GB/s, 4:1: an all-reduce of 8 GB sends 8 GB up from each, at 100 GB/s."""
    crowded = gpus(2, 8).model_copy(update={"oversubscription": 4.0})
    seconds = collective_s(crowded, Collective.ALL_REDUCE, 8e9, group_size=16)
    assert seconds == pytest.approx(8e9 / 100e9, rel=0.01)
    # One rank of each node: an eighth of the way up for each of the eight groups.
    strided = collective_s(crowded, Collective.ALL_REDUCE, 8e9, group_size=2, stride=8)
    assert strided == pytest.approx(8e9 / 12.5e9, rel=0.01)
