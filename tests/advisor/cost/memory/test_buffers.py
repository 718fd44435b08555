"""Live bytes of each unit's passes, summed by hand: saved activations, gathers and gradients."""

from __future__ import annotations

import pytest

from advisor.cost.memory.buffers import (
    added_share,
    gathered_by_torch,
    gradients_of_torch,
    late_bytes,
    own_gathered,
    own_gradients,
    shard_degree,
)
from advisor.cost.memory.timeline import next_separate, timeline_of
from engines.plan import Plan, Recompute
from profiles.model.profile import LOSS
from profiles.workload.stack import TORCH, Loss, Stack, States
from tests.advisor.cost.memory.hand_made import loads, unit

SMALL = {"input_bytes": 2.0, "selective_bytes": 5.0, "output_bytes": 1.0, "activation_bytes": 10.0}
BLOCK = {"forward_transient_bytes": 20.0, "backward_transient_bytes": 4.0, "is_block": True}
TIMED = loads(
    unit("a", activation_bytes=100.0, input_bytes=7.0, output_bytes=3.0),
    unit("b", count=2, **SMALL, **BLOCK),
    unit(LOSS, activation_bytes=1000.0, backward_transient_bytes=9.0),
)


@pytest.mark.parametrize(
    ("recompute", "away", "saved", "work"),
    [
        (Recompute.NONE, False, 10, 1 + 4),
        (Recompute.FULL, False, 2, 1 + max(10 - 2 + 4, 20)),  # its forward runs again
        (Recompute.SELECTIVE, False, 5, 1 + max(10 - 5 + 4, 20)),
        (Recompute.NONE, True, 0, 1 + 10 + 4),  # comes back operation by operation
    ],
)
def test_activations_pile_up_in_a_forward_and_go_in_its_backward(
    recompute: Recompute, away: bool, saved: float, work: float
) -> None:
    line = timeline_of(TIMED, recompute, away=away)
    assert list(line.saved) == [100, saved, saved, 1000]
    assert list(line.before) == [0, 100, 100 + saved, 100 + 2 * saved]
    assert list(line.live) == [100, 100 + saved, 100 + 2 * saved, 1100 + 2 * saved]
    assert list(line.forward) == [7, 22, 22, 0]
    assert list(line.backward) == [3, work, work, 9]


def test_the_next_unit_with_a_gather_of_its_own_is_fetched() -> None:
    units = [unit("a", is_separate=flag) for flag in (True, False, True, True)]
    assert next_separate(units, backward=False) == [2, 2, 3, -1]
    assert next_separate(units, backward=True) == [-1, 0, 0, 2]


# Two separate units of 40 and 80 bytes, a small one of 8 in the root group, and the loss.
PARTS = {"is_separate": True, "is_multiplied": True}
SPLIT = loads(
    unit("a", parameter_bytes=40.0, gradient_bytes=44.0, is_block=True, **PARTS),
    unit("norm", parameter_bytes=8.0, gradient_bytes=8.0),
    unit("head", parameter_bytes=80.0, gradient_bytes=88.0, **PARTS),
    unit(LOSS),
    compute_share=0.5,
)


@pytest.mark.parametrize(
    ("words", "forwards", "backwards"),
    [
        # The root group's 4, a unit's copy and that of the one fetched next.
        ("dp_shard=4", [4 + 20 + 40, 4 + 40, 4 + 40, 4], [4 + 20, 4 + 20, 4 + 40 + 20, 4 + 40]),
        # All that was gathered so far, and all of it from the second microbatch on.
        ("dp_shard=1 dp_replicate=4 zero=1", [4 + 20 + 40, 4 + 20 + 40, 64, 64], [24, 24, 64, 64]),
        ("dp_replicate=4 zero=2 microbatches=2", [64] * 4, [64] * 4),
        # Autocast's copies of what is multiplied; a block that runs again makes them again.
        ("dp_replicate=4", [20, 20, 60, 60], [20, 20, 60, 60]),
        ("dp_replicate=4 recompute=full", [20, 20, 60, 40], [20, 0, 40, 40]),
    ],
)
def test_gathered_copies_are_those_of_the_unit_at_work_and_the_next(
    words: str, forwards: list[float], backwards: list[float]
) -> None:
    plan, units = Plan.parse(words), SPLIT.entries
    gathered = gathered_by_torch(plan, SPLIT)
    after, following = (next_separate(units, backward=flag) for flag in (False, True))
    assert [gathered(i, after[i], True) for i in range(4)] == forwards
    assert [gathered(i, following[i], False) for i in range(4)] == backwards


def test_units_of_a_run_are_gathered_and_cast_one_by_one() -> None:
    """Thirty equal units of 40 bytes, of which the ends and the middle are entries."""
    run = loads(unit("a", count=30, parameter_bytes=40.0, **PARTS), compute_share=0.5)
    end = len(run.entries) - 1
    for words in ("dp_replicate=4 zero=1", "dp_replicate=4"):
        gathered = gathered_by_torch(Plan.parse(words), run)
        assert [gathered(i, -1, True) for i in (0, end)] == [20, 30 * 20]
        assert gathered(end, -1, False) == 30 * 20


def test_a_chunked_loss_reads_the_head_in_front_of_it() -> None:
    """Unless that is fetched for its own backward already."""
    head = unit("head", parameter_bytes=80.0, is_separate=True)
    parts = loads(unit("norm"), head, unit(LOSS))
    for stack, nbytes in ((TORCH, 0.0), (Stack(loss=Loss.CHUNKED), 80.0)):
        gathered = gathered_by_torch(Plan.parse("dp_shard=4"), parts, stack)
        assert gathered(2, -1, True) == nbytes
        assert gathered(2, 1, False) == 80
        assert gathered(1, -1, False) == 80


def test_weights_of_a_stack_are_whole_while_their_unit_works_under_zero_3_alone() -> None:
    gathered = own_gathered(Plan.parse("dp_shard=4"), SPLIT)
    assert [gathered(0, 2, True), gathered(2, -1, True), gathered(1, 2, True)] == [64, 44, 44]
    assert gathered(2, 0, False) == 64
    assert own_gathered(Plan.parse("dp_replicate=4 zero=2"), SPLIT)(0, 2, True) == 0
    states = States(weight=2, gradient=2, master=4)
    for stack, made in (
        (Stack(states=states), 0.5 * 88),
        (Stack(states=states, accumulates_in_product=True), 0),
    ):
        gradients = own_gradients(30.0, SPLIT, stack)
        assert (gradients.in_forward, gradients.in_backward(2)) == (30, 30)
        assert gradients.buffers(2) == made
        assert gradients.reduced is None


@pytest.mark.parametrize(
    ("words", "in_forward", "in_backward", "buffers"),
    [
        ("dp_replicate=1", 0, [140, 96, 88, 0], [0, 0, 0, 0]),
        ("microbatches=2", 140, [140] * 4, [44, 8, 88, 0]),
        ("dp_replicate=4", 140, [140] * 4, [44, 8, 88, 0]),  # in buckets, one copied in
        ("dp_replicate=4 microbatches=2", 280, [280] * 4, [44, 8, 88, 0]),
    ],
)
def test_whole_gradients_are_made_one_by_one_or_live_in_buckets(
    words: str, in_forward: float, in_backward: list[float], buffers: list[float]
) -> None:
    gradients = gradients_of_torch(Plan.parse(words), SPLIT, on_device=True)
    assert gradients.in_forward == in_forward
    assert [gradients.in_backward(i) for i in range(4)] == in_backward
    assert [gradients.buffers(i) for i in range(4)] == buffers
    assert (gradients.reduced, gradients.carried) == (None, 0)


@pytest.mark.parametrize(
    ("words", "in_forward", "in_backward", "carried", "adds"),
    [
        ("dp_shard=4", 0, [140 / 4, 96 / 4, 88 / 4, 0], 0, False),
        ("dp_shard=4 microbatches=2", 140 / 4, [140 / 4] * 4, 44, True),
        ("dp_replicate=4 zero=2 microbatches=2", 140 / 4, [140 / 4] * 4, 44, False),
        ("dp_replicate=4 zero=2 microbatches=3", 140 / 4, [140 / 4] * 4, 44, True),
        ("dp_replicate=4 zero=1", 0, [140 / 4, 96 / 4, 88 / 4, 0], 0, False),
    ],
)
def test_reduced_gradients_are_shards_while_the_next_ones_are_made(
    words: str, in_forward: float, in_backward: list[float], carried: float, adds: bool
) -> None:
    """Beside them a unit's gradients in 16 bits and the fp32 input of the reduction before it; and
    the root group's 4 to the end. A reduction holds both forms of its own."""
    for on_device in (True, False):
        gradients = gradients_of_torch(Plan.parse(words), SPLIT, on_device=on_device)
        assert gradients.in_forward == in_forward * on_device
        assert [gradients.in_backward(i) for i in range(4)] == [b * on_device for b in in_backward]
        buffers = [22 + 88 + 4, 88 + 4, 44 + carried + 4, carried + 4]
        assert [gradients.buffers(i) for i in range(4)] == buffers
        assert gradients.reduced is not None
        shard = 88 / 4 * adds * on_device
        assert gradients.reduced(2) == 1.5 * 88 + 4 + shard
        assert gradients.carried == carried
    copied = gradients_of_torch(Plan.parse(words), SPLIT, on_device=True, copies=True)
    assert copied.reduced is not None
    assert copied.reduced(2) == 2 * 88 + 4 + 88 / 4 * adds  # gloo's input and its copy


def test_zero_1_accumulates_whole_gradients_of_several_microbatches() -> None:
    plan = Plan.parse("dp_replicate=4 zero=1 microbatches=2")
    gradients = gradients_of_torch(plan, SPLIT, on_device=True)
    assert (gradients.in_forward, gradients.in_backward(2), gradients.carried) == (140, 140, 0)
    assert [gradients.buffers(i) for i in (0, 1, 2)] == [22 + 88, 88, 44]
    assert gradients.reduced is not None
    assert gradients.reduced(2) == 1.5 * 88


def test_late_units_stay_to_the_end_of_the_backward() -> None:
    late = {"parameter_bytes": 10.0, "gradient_bytes": 100.0, "is_late": True}
    units = [
        unit("a"),
        unit("b", count=2, **late),
        unit("c", gradient_bytes=5.0),
        unit("d", **late),
    ]
    assert late_bytes(units, 0.5) == [165, 55, 55, 0]
    assert late_bytes(units, 0.5, with_parameters=False) == [150, 50, 50, 0]
    assert late_bytes(units, 0.5, with_gradients=False) == [15, 5, 5, 0]


@pytest.mark.parametrize(
    ("words", "degree", "added"),
    [
        ("dp_replicate=4 cp=2", 1, 1.0),
        ("dp_replicate=4 cp=2 zero=1", 8, 1.0),
        ("dp_replicate=4 cp=2 zero=2", 8, 1 / 8),
        ("dp_shard=4 cp=2", 8, 1 / 8),
        ("dp_replicate=2 dp_shard=4 cp=2", 8, 1 / 8),
        ("pp=2 dp_shard=4", 4, 1.0),
    ],
)
def test_states_are_sharded_over_the_ranks_of_a_sequence_too(
    words: str, degree: int, added: float
) -> None:
    plan = Plan.parse(words)
    assert (shard_degree(plan), added_share(plan)) == (degree, added)


def test_late_units_keep_copies_of_their_parameters_where_others_are_released() -> None:
    """ZeRO-2 has them all the same while microbatches add up."""
    late = unit("late", parameter_bytes=10.0, gradient_bytes=100.0, is_late=True)
    whole = loads(*SPLIT.entries, late, compute_share=0.5)
    retained, released = (
        gradients_of_torch(Plan.parse(f"{words} microbatches=2"), whole, on_device=True).buffers(0)
        for words in ("dp_replicate=4 zero=2", "dp_shard=4")
    )
    assert released - retained == 0.5 * 10
