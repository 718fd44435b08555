"""Queues of a step, worked out by hand, and passes that are replayed one by one."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest

from advisor.cost.communication.exchange import Exchange
from advisor.cost.communication.replay import backward, forward, replay
from advisor.cost.compute.unit_times import UnitTime
from engines.plan import Plan


def timed(forward_s: float, backward_s: float, count: int = 1) -> UnitTime:
    return UnitTime(forward_s, backward_s, 0.0, 0.0, 0.0, 0.0, count)


def sending(
    *, gather: float = 0.0, reduce: float = 0.0, replicate: float = 0.0, units: int = 3
) -> Exchange:
    """Every unit alike, nothing of a root group."""
    gathers, reduces, replicates = ((s,) * units for s in (gather, reduce, replicate))
    zeros = (0.0,) * units
    return Exchange(gathers, reduces, replicates, zeros, zeros, zeros)


@pytest.mark.parametrize(
    ("gather_s", "wall_s"),
    [
        (2.0, 1 + 2 + 3 * 3.0),  # root, first gather; the others end while units compute
        (4.0, 1 + 3 * 4 + 3.0),  # every unit waits for its gather; the last one computes alone
    ],
)
def test_a_forward_waits_for_the_first_gather_and_hides_the_next_ones(
    gather_s: float, wall_s: float
) -> None:
    exchanged = replace(sending(gather=gather_s), root_gather_s=1.0)
    times = [timed(3, 0)] * 3
    played = forward(times, exchanged, gathers=True, overlaps=True)
    assert (played.wall_s, played.sent_s) == (wall_s, 1 + 3 * gather_s)
    in_turn = forward(times, exchanged, gathers=True, overlaps=False)
    assert (in_turn.wall_s, in_turn.sent_s) == (9 + 1 + 3 * gather_s, 1 + 3 * gather_s)
    alone = forward(times, exchanged, gathers=False, overlaps=True)
    assert (alone.wall_s, alone.sent_s) == (9, 0)
    one = Exchange((gather_s,), (0.0,), (0.0,), (0.0,), (0.0,), (0.0,), root_gather_s=1.0)
    assert forward([timed(3, 0, 3)], one, gathers=True, overlaps=True).wall_s == wall_s


def test_a_backward_reduces_behind_its_gathers_and_replicas_sum_behind_both() -> None:
    """Gathers of 2, passes of 3, reductions of 4, sums of 5, in a queue each for shards and
    replicas; in the end the root group's 1 and 0.5.

        computing   2-5       5-8       11-14
        shards      0-2 2-4   5-9 9-11  11-15     15-19     19-20
        replicas                 9-14      15-20     20-25  25-25.5
    """
    exchanged = sending(gather=2, reduce=4, replicate=5)
    exchanged = replace(exchanged, root_reduce_s=1.0, root_replicate_s=0.5)
    every = {"gathers": True, "reduces": True, "replicates": True}
    played = backward([timed(0, 3)] * 3, exchanged, **every, overlaps=True)
    assert (played.wall_s, played.sent_s) == (25.5, 3 * (2 + 4 + 5) + 1.5)
    shards = {"gathers": True, "reduces": True, "replicates": False, "overlaps": True}
    assert backward([timed(0, 3)] * 3, exchanged, **shards).wall_s == 19 + 1
    in_turn = backward([timed(0, 3)] * 3, exchanged, **every, overlaps=False)
    assert in_turn.wall_s == 9 + played.sent_s
    # Without shards the replicas' sums follow the passes: 3, then 5 for each and the root's.
    sums = replace(sending(replicate=5), root_replicate_s=0.5)
    alone = {"gathers": False, "reduces": False, "replicates": True, "overlaps": True}
    assert backward([timed(0, 3)] * 3, sums, **alone).wall_s == 3 + 3 * 5 + 0.5
    # Where passes are longer, the last sum alone is waited for.
    sums = replace(sums, replicate_s=(1.0,) * 3)
    assert backward([timed(0, 3)] * 3, sums, **alone).wall_s == 9 + 1 + 0.5


def test_tensors_of_split_layers_and_launches_are_waited_for_in_each_pass() -> None:
    exchanged = Exchange((0.0,), (0.0,), (0.0,), (0.5,), (0.25,), (0.125,))
    time = UnitTime(1.0, 2.0, 4.0, 8.0, 16.0, 32.0, 2)
    there = forward([time], exchanged, gathers=False, overlaps=True)
    assert (there.wall_s, there.sent_s) == (2 * (1 + 8 + 0.5), 2 * 0.5)
    gathered = forward([time], replace(exchanged, gather_s=(3.0,)), gathers=True, overlaps=True)
    assert gathered.sent_s == 2 * (0.5 + 3)
    none = {"gathers": False, "reduces": False, "replicates": False}
    for overlaps in (True, False):
        back = backward([time], exchanged, **none, overlaps=overlaps)
        assert back.wall_s == 2 * (2 + 16 + 4 + 32 + 0.25 + 0.125)
        assert back.sent_s == 2 * 0.375


@pytest.mark.parametrize(
    ("plan", "gathers", "reductions"),
    [
        ("dp_replicate=2 zero=1", 1, 1),
        ("dp_replicate=2 zero=2", 1, 3),
        ("dp_shard=2", 6, 3),
        ("dp_replicate=2 dp_shard=2", 6, 3),
    ],
)
def test_a_step_of_three_microbatches_sends_as_often_as_its_kind_says(
    plan: str, gathers: int, reductions: int
) -> None:
    """Digits count: units of gathers, hundreds of reductions, tens of thousands of sums."""
    exchanged = sending(gather=1, reduce=100, replicate=10_000, units=1)
    parsed = Plan.parse(f"{plan} microbatches=3")
    played = replay(parsed, [timed(0.125, 0.25)], exchanged, overlaps=False)
    assert played.sent_s == 10_000 + 100 * reductions + gathers
    assert played.wall_s == played.sent_s + 3 * 0.375
    single = replay(Plan.parse(plan), [timed(0.125, 0.25)], exchanged, overlaps=False)
    assert single.sent_s == 10_000 + 100 + min(gathers, 2)


@pytest.mark.parametrize("seed", range(20))
def test_equal_units_take_as_long_as_each_of_them_replayed(seed: int) -> None:
    draw = random.Random(seed)
    counts = [draw.choice((1, 2, 30)) for _ in range(3)]
    seconds = [[draw.choice((0, 1, 2, 5)) + draw.random() for _ in range(3)] for _ in range(5)]
    if seed % 2:
        seconds[3] = [0.0] * 3
    there, back, gathers, reduces, replicates = seconds

    def exchange(column: list[float]) -> tuple[float, ...]:
        return tuple(column)

    def spread(column: list[float]) -> tuple[float, ...]:
        return tuple(s for s, count in zip(column, counts, strict=True) for _ in range(count))

    ways = []
    for shape, repeats in ((exchange, counts), (spread, [1] * sum(counts))):
        zeros = (0.0,) * len(repeats)
        sent = Exchange(shape(gathers), shape(reduces), shape(replicates), zeros, zeros, zeros)
        times = [timed(f, b, n) for f, b, n in zip(shape(there), shape(back), repeats, strict=True)]
        forth = forward(times, sent, gathers=True, overlaps=True)
        home = backward(times, sent, gathers=True, reduces=True, replicates=True, overlaps=True)
        ways.append((forth.wall_s, forth.sent_s, home.wall_s, home.sent_s))
    assert ways[0] == pytest.approx(ways[1])


def test_the_last_reduction_is_waited_for_without_replicas_too() -> None:
    """A reduction of 4 after each pass of 3, the root group's after them all."""
    exchanged = replace(sending(reduce=4), root_reduce_s=1.0)
    only = {"gathers": False, "reduces": True, "replicates": False, "overlaps": True}
    assert backward([timed(0, 3)] * 3, exchanged, **only).wall_s == 3 + 3 * 4 + 1
    short = replace(exchanged, reduce_s=(1.0,) * 3)
    assert backward([timed(0, 3)] * 3, short, **only).wall_s == 9 + 1 + 1
