"""Exposed communication of stacks, messages beside the passes, and strides of ties, by hand."""

from __future__ import annotations

import pytest

from advisor.cost import estimate
from advisor.cost.communication.exchange import Exchange
from advisor.cost.communication.exposed import gathers_s, reduced_share, split_exposed
from advisor.cost.communication.groups import tie_stride
from advisor.cost.communication.small_collectives import small_collectives_s, summed_s
from advisor.cost.compute.unit_times import Computing, UnitTime
from advisor.cost.ledger import Ledger
from engines.plan import Plan
from profiles.machine.cluster import Collective
from profiles.model.source import ValueRead
from profiles.workload.stack import TORCH, Stack, States
from tests.advisor.cost.communication.test_axes import mixture
from tests.factories import chain, cpus, facts, gpus, small_llama

NOTHING_HIDDEN = Stack(overlap_gradients=False, overlap_parameters=False)
SENT = Exchange((1.0, 10.0), (2.0, 20.0), (3.0, 30.0), (0.0,) * 2, (0.0,) * 2, (0.0,) * 2, 5, 6, 7)
COMPUTING = Computing((UnitTime(0, 0, 0, 0, 0, 0, 4), UnitTime(0, 0, 0, 0, 0, 0, 1)), 0.0)


@pytest.mark.parametrize(
    ("plan", "gathers", "reductions"),
    [
        ("dp_replicate=2", 0, 1),
        ("dp_replicate=2 zero=1", 1, 1),
        ("dp_replicate=2 zero=2", 0, 3),
        ("dp_shard=2", 0, 3),
    ],
)
def test_a_stack_without_overlap_waits_for_gradients_and_for_parameters_of_zero1(
    plan: str, gathers: int, reductions: int
) -> None:
    parsed = Plan.parse(f"{plan} microbatches=3")
    left, waited_s = split_exposed(NOTHING_HIDDEN, parsed, SENT, COMPUTING)
    summed = 4 * 3 + 30 + 7
    assert waited_s == gathers * (4 + 10 + 5) + reductions * (4 * 2 + 20 + 6) + summed
    assert (left.reduce_s, left.replicate_s) == ((0, 0), (0, 0))
    assert (left.root_reduce_s, left.root_replicate_s) == (0, 0)
    extra = (0.0, 0.0, 0.0) if gathers else (1.0, 10.0, 5.0)
    assert (*left.gather_s, left.root_gather_s) == extra
    assert split_exposed(TORCH, parsed, SENT, COMPUTING) == (SENT, 0.0)


def test_gathers_hide_behind_the_forwards_of_earlier_stages_where_a_stack_overlaps_them() -> None:
    """Forwards of 1, 2 and 4 s: the last stage's gather must be there when the one before ends."""
    states = States(weight=2, gradient=4, master=4)
    ranks = [[(1.0, 0.5), (2.0, 3.0), (4.0, 8.0)], [(9.0, 0.25)]]
    assert gathers_s(Stack(states=states), ranks) == 0.5 + 11 - 3
    assert gathers_s(Stack(states=states), [[(1.0, 0.5), (1.0, 0.75)]]) == 0.5
    assert gathers_s(Stack(states=states), [[*ranks[0], (16.0, 1.0)]]) == 0.5 + 12 - 7
    assert gathers_s(Stack(states=states, overlap_parameters=False), ranks) == 0.5 + 11
    assert gathers_s(TORCH, ranks) == 0.5 + 11 + 0.25


def test_gradients_are_sent_as_they_are_held_unless_a_stack_says_otherwise() -> None:
    states = States(weight=2, gradient=2, master=4)
    stacks = (TORCH, Stack(reduce_bytes=2), Stack(states=states))
    assert [reduced_share(stack) for stack in stacks] == [1.0, 0.5, 0.5]
    assert reduced_share(Stack(states=states, reduce_bytes=4)) == 1.0


@pytest.mark.parametrize(
    ("plan", "stages", "stride"),
    [
        ("pp=4 dp_replicate=2", (0, 3), 6),
        ("pp=4 dp_replicate=2", (1, 3), 4),
        ("pp=4 dp_replicate=2", (0, 1, 3), 3),
        ("pp=6 dp_replicate=2", (0, 1, 2), 2),
        ("pp=5", (0, 1, 3), 2),  # one and a half, rounded up
        ("pp=4", (0, 1, 3), 1),  # two would end behind the last rank
    ],
)
def test_ties_of_several_stages_are_as_far_apart_as_in_the_mean(
    plan: str, stages: tuple[int, ...], stride: int
) -> None:
    assert tie_stride(stages, Plan.parse(plan)) == stride


def normed(buffer_bytes: int) -> dict[str, object]:
    """A chain with two batch norms in its first unit."""
    first, *others = chain().units
    units = (first.model_copy(update={"buffer_bytes": buffer_bytes}), *others)
    return {"batch_norms": ("a", "b"), "units": units}


def charged(plan: str, ledger: Ledger, *, backward_s: float = 0.0, **changes: object) -> float:
    model = chain().model_copy(update=changes)
    return small_collectives_s(Plan.parse(plan), model, ledger, backward_s=backward_s)


def messages(plan: str, **changes: object) -> dict[str, tuple[float, float, int, int]]:
    """Payload, count, group and stride of each."""
    ledger = Ledger(cpus(8), {})
    charged(plan, ledger, **changes)
    return {
        each.purpose: (each.payload_bytes, each.count, each.group_size, each.stride)
        for each in ledger.traffic()
    }


def test_counts_grow_with_rounds_and_with_replicas_of_several_ranks() -> None:
    """32 bytes, 8 a round, 16 a replica of several ranks, and 16 where there are several."""
    for plan, nbytes in (
        ("dp_replicate=2", 32 + 16),
        ("pp=2 schedule=gpipe microbatches=2 accumulation=3", 32 + 3 * 8 + 16),
        ("pp=2 schedule=naive microbatches=2 accumulation=3", 32 + 6 * 8 + 16),
        ("tp=2 dp_replicate=4", 32 + 4 * 16 + 16),
    ):
        sent = messages(plan)
        world = Plan.parse(plan).world_size
        assert sent["sample count"] == (nbytes, 1, world, 1)
        assert sent["loss"] == (4, 1, world, 1)
        assert ("seed (broadcast)" in sent) == ("tp" in plan)


@pytest.mark.parametrize(
    ("plan", "facts", "group"),
    [
        ("dp_replicate=4", {"unused": ("a",)}, 4),
        ("dp_replicate=2 cp=2", {"unused": ("a",)}, 4),
        ("dp_replicate=2 tp=2", {"unused": ("a",)}, None),
        ("dp_shard=4", {"unused": ("a",)}, None),
        ("dp_shard=4", {"reads": (ValueRead(unit="a"),)}, 4),
        ("dp_replicate=4", {"reads": (ValueRead(unit="a"),)}, 4),
        ("dp_replicate=4", {}, None),
    ],
)
def test_ranks_ask_which_parameters_were_used_where_that_may_differ(
    plan: str, facts: dict[str, object], group: int | None
) -> None:
    sent = messages(plan, **facts).get("unused parameters")
    assert sent == ((4, 1, group, 1) if group else None)


def test_batch_norms_send_statistics_twice_a_pass_or_buffers_once() -> None:
    synced = messages("dp_replicate=4 cp=2 sync_batch_norm=true microbatches=3", **normed(800))
    assert synced["batch norm statistics"] == (400, 2 * 2 * 3, 4, 2)
    assert "buffers (broadcast)" not in synced
    assert messages("dp_replicate=4 tp=2", **normed(800))["buffers (broadcast)"] == (800, 1, 4, 2)
    assert "buffers (broadcast)" not in messages("tp=4", **normed(800))


def test_what_the_backward_does_not_hide_of_the_buffers_is_waited_for() -> None:
    cluster = cpus(2)
    one_s = Ledger(cluster, {}).seconds(Collective.SEND_RECV, 1e9, 2, 1)
    for hidden_s in (0.25 * one_s, 2 * one_s):
        whole, plain = (
            charged("dp_shard=2", Ledger(cluster, {}), backward_s=hidden_s, **more)
            for more in (normed(10**9), {})
        )
        assert whole - plain == pytest.approx(max(0.0, one_s - hidden_s))
    each_s = Ledger(cluster, {}).seconds(Collective.ALL_REDUCE, 5e8, 2, 1)
    plan = "dp_replicate=2 sync_batch_norm=true microbatches=3"
    whole, plain = (charged(plan, Ledger(cluster, {}), **more) for more in (normed(10**9), {}))
    assert whole - plain == pytest.approx(2 * 2 * 3 * each_s)


@pytest.mark.parametrize(
    ("mib", "tensors", "count"),
    [(24, 24, 1), (25, 25, 1), (100, 100, 4), (102, 102, 4), (103, 103, 5), (100, 2, 2)],
)
def test_flat_messages_are_full_half_a_tensor_past_25_mib(
    mib: int, tensors: int, count: int
) -> None:
    ledger, nbytes = Ledger(cpus(4), {}), mib * 2.0**20
    group = {"group_size": 2, "stride": 2}
    seconds = summed_s(ledger, "sums", gradient_bytes=nbytes, tensors=tensors, **group)
    sent = {each.purpose: each for each in ledger.traffic()}
    assert sent["sums: which there are"].payload_bytes == 4 * tensors
    assert (sent["sums"].count, sent["sums"].payload_bytes) == (count, nbytes / count)
    assert seconds == pytest.approx(sum(each.seconds for each in sent.values()))


def test_a_stack_hides_its_share_of_what_split_layers_exchange() -> None:
    plan, cluster = Plan.parse("tp=2 microbatch_size=1"), gpus(1, 2)
    none, some = (
        estimate(plan, facts(small_llama(), cluster, batch=1, stack=stack))
        for stack in (TORCH, Stack(overlap_tensor=0.25))
    )
    others = ("sample count", "loss", "seed (broadcast)")
    split_s = sum(t.seconds for t in none.traffic if t.purpose not in others)
    other_s = sum(t.seconds for t in none.traffic if t.purpose in others)
    assert split_s > other_s
    assert none.time.exposed_s == pytest.approx(split_s + other_s)
    assert some.time.exposed_s == pytest.approx(0.75 * split_s + other_s)


@pytest.mark.parametrize(("nodes", "distinct"), [(1, 1 - (3 / 4) ** 2), (2, 1 - (1 / 2) ** 2)])
def test_tokens_that_are_sent_once_reach_the_distinct_places_of_their_experts(
    nodes: int, distinct: float
) -> None:
    """Two experts of a token, on 4 ranks of a node or on 2 nodes: n (1 - (1 - 1/n)^2) places."""
    places = 4 if nodes == 1 else nodes
    plan = Plan.parse("dp_replicate=4 ep=4 microbatch_size=2 precision=fp32")
    each, once = (
        {
            t.payload_bytes
            for t in estimate(
                plan, facts(mixture(), gpus(nodes, 4 // nodes), batch=8, precision="fp32", stack=s)
            ).traffic
            if t.kind is Collective.ALL_TO_ALL
        }
        for s in (TORCH, Stack(sends_tokens_once=True))
    )
    assert max(once) == pytest.approx(max(each) * places * distinct / 2)
