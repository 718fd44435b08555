"""Pipelines: orders against torch's own, wall time against closed forms and drawings by hand."""

from __future__ import annotations

from itertools import pairwise
from random import Random
from unittest.mock import Mock

import pytest
from torch.distributed.pipelining import schedules as torch_schedules

from advisor.cost.stages.orders import (
    ONE_STAGE,
    SPLITS_BACKWARD,
    Action,
    Order,
    PassKind,
    moments,
    orders,
    stages_of,
)
from advisor.cost.stages.pipeline import Played, StageTimes, play, timeline
from engines.plan import Schedule

GPIPE, ONE_F_ONE_B, NAIVE = Schedule.GPIPE, Schedule.ONE_F_ONE_B, Schedule.NAIVE
INTERLEAVED, ZERO_BUBBLE, ZBV = Schedule.INTERLEAVED, Schedule.ZERO_BUBBLE, Schedule.ZBV
TORCH = {
    GPIPE: torch_schedules.ScheduleGPipe,
    ONE_F_ONE_B: torch_schedules.Schedule1F1B,
    INTERLEAVED: torch_schedules.ScheduleInterleaved1F1B,
    ZERO_BUBBLE: torch_schedules.ScheduleInterleavedZeroBubble,
    ZBV: torch_schedules.ScheduleZBVZeroBubble,
}
SHAPES = [
    (GPIPE, 4, 1, 6),
    (ONE_F_ONE_B, 2, 1, 2),
    (ONE_F_ONE_B, 4, 1, 7),
    (ONE_F_ONE_B, 5, 1, 5),
    (INTERLEAVED, 4, 2, 4),
    (INTERLEAVED, 4, 2, 8),
    (INTERLEAVED, 3, 3, 12),
    (ZERO_BUBBLE, 4, 1, 8),
    (ZERO_BUBBLE, 4, 2, 8),
    (ZERO_BUBBLE, 3, 2, 3),
    (ZBV, 2, 2, 3),
    (ZBV, 4, 2, 4),
    (ZBV, 4, 2, 12),
]


def of_torch(schedule: Schedule, ranks: int, chunks: int, microbatches: int) -> tuple[Order, ...]:
    """The orders that torch's schedule makes for all ranks, without idle slots."""

    def stage(index: int) -> Mock:
        return Mock(
            group_size=ranks,
            group_rank=0,
            num_stages=ranks * chunks,
            stage_index=index,
            is_last=False,
            submod=None,
        )

    if schedule in ONE_STAGE:
        made = TORCH[schedule](stage(0), microbatches, loss_fn=None)._get_pipeline_order()
    else:
        own = [stage(chunk * ranks) for chunk in range(chunks)]
        made = TORCH[schedule](own, microbatches, loss_fn=Mock()).pipeline_order
    kinds = {getattr(torch_schedules, kind.value): kind for kind in PassKind}
    return tuple(
        tuple(
            Action(kinds[slot.computation_type], slot.stage_index, slot.microbatch_index)
            for slot in made[rank]
            if slot is not None and slot.computation_type in kinds
        )
        for rank in range(ranks)
    )


@pytest.mark.parametrize(("schedule", "ranks", "chunks", "microbatches"), SHAPES)
def test_orders_equal_those_of_torch(
    schedule: Schedule, ranks: int, chunks: int, microbatches: int
) -> None:
    ours = orders(schedule, ranks=ranks, stages=ranks * chunks, microbatches=microbatches)
    theirs = of_torch(schedule, ranks, chunks, microbatches)
    if schedule is ONE_F_ONE_B:
        # torch's table, which only draws pictures of this schedule, counts the last rank's forwards
        # from one; what it runs (`_step_microbatches`) counts from zero, as the other ranks' do.
        last = [
            action._replace(microbatch=action.microbatch - (action.kind is PassKind.FORWARD))
            for action in theirs[-1]
        ]
        theirs = (*theirs[:-1], tuple(last))
    assert ours == theirs


def equal(
    stages: int, forward_s: float, backward_s: float, weight_s: float = 0.0, send_s: float = 0.0
) -> StageTimes:
    return StageTimes(
        forward_s=(forward_s,) * stages,
        backward_s=(backward_s,) * stages,
        weight_s=(weight_s,) * stages,
        send_s=(send_s,) * (stages - 1),
    )


def uneven(
    schedule: Schedule, stages: int, *, seed: int, spread: float, send_s: float
) -> StageTimes:
    draw = Random(seed)
    whole = [1 + spread * draw.random() for _ in range(stages)]
    splits = schedule in SPLITS_BACKWARD
    return StageTimes(
        forward_s=tuple(whole),
        backward_s=tuple((1 if splits else 2) * t * (1 + draw.random() / 10) for t in whole),
        weight_s=tuple(t if splits else 0.0 for t in whole),
        send_s=tuple(send_s * draw.random() for _ in range(stages - 1)),
    )


def by_hand(
    schedule: Schedule, times: StageTimes, *, ranks: int, microbatches: int, waits: bool
) -> list[float]:
    """Simulate every action and return the time at which each rank ends."""
    stages = len(times.forward_s)
    left = [
        list(o) for o in orders(schedule, ranks=ranks, stages=stages, microbatches=microbatches)
    ]
    home = {
        stage: rank
        for rank in range(ranks)
        for stage in stages_of(schedule, rank, ranks=ranks, stages=stages)
    }
    seconds = {
        PassKind.FORWARD: times.forward_s,
        PassKind.BACKWARD: times.backward_s,
        PassKind.INPUT: times.backward_s,
        PassKind.WEIGHT: times.weight_s,
    }
    ends: dict[tuple[bool, int, int], float] = {}
    free = [0.0] * ranks
    while any(left):
        before = sum(map(len, left))
        for rank, queue in enumerate(left):
            if not queue:
                continue
            kind, stage, microbatch = queue[0]
            source = stage - 1 if kind is PassKind.FORWARD else stage + 1
            start = free[rank]
            if kind is not PassKind.WEIGHT and 0 <= source < stages:
                made = ends.get((kind is PassKind.FORWARD, source, microbatch))
                if made is None:
                    continue
                send = times.send_s[min(stage, source)] if home[source] != rank else 0.0
                start = max(start, made) + send if waits else max(start, made + send)
            free[rank] = start + seconds[kind][stage]
            if kind is not PassKind.WEIGHT:
                ends[kind is PassKind.FORWARD, stage, microbatch] = free[rank]
            queue.pop(0)
        assert sum(map(len, left)) < before, "the orders wait for each other"
    return free


@pytest.mark.parametrize("schedule", [GPIPE, ONE_F_ONE_B])
@pytest.mark.parametrize(("ranks", "microbatches"), [(2, 2), (4, 8), (8, 64)])
def test_a_pipeline_of_equal_stages_idles_for_p_minus_1_microbatches(
    schedule: Schedule, ranks: int, microbatches: int
) -> None:
    """(p - 1)(f + b), of both: GPipe, arXiv:1811.06965; PipeDream-flush, arXiv:2104.04473."""
    played = play(
        schedule, equal(ranks, 1.0, 2.0), ranks=ranks, microbatches=microbatches, waits=True
    )
    assert played.wall_s == pytest.approx((microbatches + ranks - 1) * 3.0)
    assert played.idle_s == pytest.approx([(ranks - 1) * 3.0] * ranks)


@pytest.mark.parametrize("chunks", [2, 3, 4])
def test_interleaving_divides_the_bubble_by_the_stages_of_a_rank(chunks: int) -> None:
    """(p - 1)(f + b) / v, arXiv:2104.04473 section 2.2."""
    ranks, microbatches = 4, 16
    times = equal(ranks * chunks, 1.0 / chunks, 2.0 / chunks)
    played = play(INTERLEAVED, times, ranks=ranks, microbatches=microbatches, waits=False)
    assert played.wall_s - microbatches * 3.0 == pytest.approx((ranks - 1) * 3.0 / chunks)


def test_naive_stages_take_the_sum_of_their_times() -> None:
    times = StageTimes((1.0, 2.0), (3.0, 4.0), (0.0, 0.0), (0.5,))
    played = play(NAIVE, times, ranks=2, microbatches=3, waits=True)
    assert played.wall_s == pytest.approx(3 * (1 + 0.5 + 2 + 4 + 0.5 + 3))


def test_zero_bubble_fills_the_bubble_with_weight_gradients() -> None:
    """ZB-H1 leaves (p - 1)(f + b - w) of it; arXiv:2401.10241, table 1."""
    ranks, microbatches = 4, 16
    played = play(
        ZERO_BUBBLE,
        equal(ranks, 1.0, 1.0, 1.0),
        ranks=ranks,
        microbatches=microbatches,
        waits=False,
    )
    assert played.wall_s == pytest.approx(microbatches * 3.0 + (ranks - 1) * 1.0)


def test_an_uneven_pipeline_drawn_by_hand() -> None:
    """1F1B, two stages, two microbatches, f = (1, 2), b = (3, 4):

    rank 0: F0 0-1  F1 1-2                     B0 7-10         B1 13-16
    rank 1:         F0 1-3     B0 3-7   F1 7-9       B1 9-13
    """
    times = StageTimes((1.0, 2.0), (3.0, 4.0), (0.0, 0.0), (0.0,))
    played = play(ONE_F_ONE_B, times, ranks=2, microbatches=2, waits=True)
    assert played == Played(16.0, (16.0, 13.0), (8.0, 12.0))


def test_sends_overlap_or_block_as_drawn_by_hand() -> None:
    """The same with a send of 1 second.

    overlapped: rank 1: F0 2-4 B0 4-8 F1 8-10 B1 10-14      rank 0: B0 9-12, B1 15-18
    blocking:   rank 1: F0 2-4 B0 4-8 F1 9-11 B1 11-15      rank 0: B0 9-12, B1 16-19
    """
    times = StageTimes((1.0, 2.0), (3.0, 4.0), (0.0, 0.0), (1.0,))
    overlapped = play(ONE_F_ONE_B, times, ranks=2, microbatches=2, waits=False)
    blocking = play(ONE_F_ONE_B, times, ranks=2, microbatches=2, waits=True)
    assert (overlapped.end_s, blocking.end_s) == ((18.0, 14.0), (19.0, 15.0))


@pytest.mark.parametrize("waits", [True, False])
@pytest.mark.parametrize("spread", [0.0, 1.0])
@pytest.mark.parametrize("send_s", [0.0, 0.3])
@pytest.mark.parametrize("schedule", list(Schedule))
def test_shortcuts_equal_a_simulation_of_every_action(
    schedule: Schedule, send_s: float, spread: float, waits: bool
) -> None:
    for ranks, chunks, microbatches in [(2, 2, 6), (3, 2, 24), (5, 3, 40), (4, 1, 8), (6, 1, 96)]:
        if schedule in ONE_STAGE:
            chunks = 1
        elif schedule is ZBV:
            chunks = 2
        times = uneven(schedule, ranks * chunks, seed=microbatches, spread=spread, send_s=send_s)
        shape = {"ranks": ranks, "microbatches": microbatches, "waits": waits}
        played = play(schedule, times, **shape)
        # Rounds of more than eight microbatches a rank are continued, not played, where a rank has
        # several stages or two halves of a backward.
        is_played = schedule in ONE_STAGE or microbatches <= 8 * ranks
        close = 1e-9 if is_played else 0.02
        assert played.end_s == pytest.approx(by_hand(schedule, times, **shape), rel=close)


def test_extrapolating_a_long_round_equals_simulating_it() -> None:
    for schedule, chunks in ((INTERLEAVED, 2), (ZERO_BUBBLE, 1), (ZBV, 2)):
        times = equal(4 * chunks, 1.0, 1.0, 1.0 if schedule in SPLITS_BACKWARD else 0.0, 0.1)
        shape = {"ranks": 4, "microbatches": 120, "waits": False}
        played = play(schedule, times, **shape)
        simulated = by_hand(schedule, times, **shape)
        assert played.wall_s == pytest.approx(max(simulated), rel=0.002)


def test_longer_stages_and_sends_never_shorten_a_round() -> None:
    for schedule in Schedule:
        chunks = 1 if schedule in ONE_STAGE else 2
        walls = [
            play(
                schedule,
                uneven(schedule, 4 * chunks, seed=3, spread=spread, send_s=spread / 10),
                ranks=4,
                microbatches=16,
                waits=True,
            ).wall_s
            for spread in (0.0, 0.1, 0.5, 2.0)
        ]
        assert all(less <= more for less, more in pairwise(walls))


def most(schedule: Schedule, ranks: int, chunks: int, microbatches: int) -> list[int]:
    per_rank = moments(schedule, ranks=ranks, stages=ranks * chunks, microbatches=microbatches)
    return [max(sum(moment.saved) for moment in of_rank) for of_rank in per_rank]


def test_microbatches_in_flight_match_the_papers() -> None:
    assert most(NAIVE, 4, 1, 8) == [1, 1, 1, 1]
    assert most(GPIPE, 4, 1, 8) == [8, 8, 8, 8]
    assert most(ONE_F_ONE_B, 4, 1, 8) == [4, 3, 2, 1]
    assert most(ONE_F_ONE_B, 4, 1, 2) == [2, 2, 2, 1]
    # arXiv:2104.04473: (v - 1) p + 2 (p - 1 - rank) warm-ups and one more, of 1/v of the layers.
    assert most(INTERLEAVED, 4, 2, 8) == [11, 9, 7, 5]
    # arXiv:2401.10241: ZB-H1 holds no more than 1F1B, ZB-V as much on every rank.
    assert most(ZERO_BUBBLE, 4, 1, 16) == [4, 4, 4, 4]
    assert most(ZBV, 4, 2, 16) == [8, 8, 8, 8]


@pytest.mark.parametrize("schedule", list(Schedule))
def test_moments_cover_the_most_microbatches_in_flight(schedule: Schedule) -> None:
    ranks, microbatches = 3, 24
    stages = ranks * (1 if schedule in ONE_STAGE else 2)
    shape = {"ranks": ranks, "stages": stages, "microbatches": microbatches}
    per_rank = moments(schedule, **shape)
    for rank, order in enumerate(orders(schedule, **shape)):
        own = stages_of(schedule, rank, ranks=ranks, stages=stages)
        in_flight = dict.fromkeys(own, 0)
        fullest = dict(in_flight)
        for kind, stage, _ in order:
            in_flight[stage] += kind is PassKind.FORWARD
            fullest = {stage: max(fullest[stage], in_flight[stage]) for stage in own}
            in_flight[stage] -= kind in (PassKind.BACKWARD, PassKind.WEIGHT)
        assert not any(in_flight.values())
        shown = [max(moment.saved[n] for moment in per_rank[rank]) for n in range(len(own))]
        assert shown == list(fullest.values())


def test_a_stage_with_an_unsplit_backward_frees_its_activations_with_the_input_gradient() -> None:
    shape = {"ranks": 4, "stages": 4, "microbatches": 16}
    split = moments(ZERO_BUBBLE, **shape)
    whole = moments(ZERO_BUBBLE, **shape, whole=frozenset(range(4)))
    assert [max(sum(m.saved) for m in rank) for rank in whole] == [4, 3, 2, 1]
    assert [max(sum(m.waiting) for m in rank) for rank in split] == [1, 2, 3, 4]


def test_the_timeline_equals_the_uneven_pipeline_drawn_by_hand() -> None:
    """See `test_an_uneven_pipeline_drawn_by_hand`."""
    times = StageTimes((1.0, 2.0), (3.0, 4.0), (0.0, 0.0), (0.0,))
    spans = timeline(ONE_F_ONE_B, times, ranks=2, microbatches=2, waits=True)
    drawn = {
        0: [("F", 0, 0, 1), ("F", 1, 1, 2), ("B", 0, 7, 10), ("B", 1, 13, 16)],
        1: [("F", 0, 1, 3), ("B", 0, 3, 7), ("F", 1, 7, 9), ("B", 1, 9, 13)],
    }
    for rank, expected in drawn.items():
        assert expected == [
            (span.action.kind, span.action.microbatch, span.start_s, span.end_s)
            for span in spans
            if span.rank == span.action.stage == rank
        ]


@pytest.mark.parametrize("schedule", list(Schedule))
def test_a_timeline_ends_with_its_round_and_no_rank_runs_two_passes_at_once(
    schedule: Schedule,
) -> None:
    stages = 3 * (1 if schedule in ONE_STAGE else 2)
    times = uneven(schedule, stages, seed=1, spread=1.0, send_s=0.3)
    shape = {"ranks": 3, "microbatches": 12, "waits": True}
    spans = timeline(schedule, times, **shape)
    played = play(schedule, times, **shape)
    for rank in range(3):
        own = [span for span in spans if span.rank == rank]
        assert own[-1].end_s == pytest.approx(played.end_s[rank])
        assert sum(span.end_s - span.start_s for span in own) == pytest.approx(played.busy_s[rank])
        assert all(one.end_s <= other.start_s + 1e-9 for one, other in pairwise(own))
