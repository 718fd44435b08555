"""Bounds of a round for any borders: no more than the round of any stages, played."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from advisor.cost.stages.pipeline import StageTimes, play
from advisor.search.staged import StagedBytes, filled_s, one_f_one_b_s
from engines.plan import Schedule

SECONDS = st.floats(0.0, 9.0)


@given(data=st.data(), ranks=st.integers(1, 6), microbatches=st.integers(1, 12))
def test_no_stages_run_a_round_of_1f1b_or_zero_bubble_faster_than_its_bound(
    data: st.DataObject, ranks: int, microbatches: int
) -> None:
    """Stages of any seconds, of which some forwards are longer and shorter than `share`."""
    forward, backward = (
        np.array(data.draw(st.lists(SECONDS, min_size=ranks, max_size=ranks))) for _ in range(2)
    )
    share, both = data.draw(st.floats(0.0, 1.0)), forward + backward
    rows = np.array([both.sum()]), np.array([share])
    of = np.array([ranks]), np.array([microbatches])
    longer = np.maximum(0.0, forward - share * both).sum()
    shorter = np.maximum(0.0, share * both - forward).sum()
    nothing = (0.0,) * ranks

    def played_s(schedule: Schedule, weight: np.ndarray) -> float:
        times = StageTimes(
            tuple(forward), tuple(backward - weight), tuple(weight), nothing[: ranks - 1]
        )
        return play(schedule, times, ranks=ranks, microbatches=microbatches, waits=False).wall_s

    wall_s = played_s(Schedule.ONE_F_ONE_B, np.zeros(ranks))
    assert one_f_one_b_s(*rows, np.array([longer]), *of)[0] <= wall_s * (1 + 1e-9) + 1e-9
    wall_s = played_s(Schedule.ZERO_BUBBLE, backward / 2)
    assert filled_s(*rows, np.array([shorter]), *of)[0] <= wall_s * (1 + 1e-9) + 1e-9


def test_the_bound_of_equal_stages_has_most_of_the_bubble_though_one_unit_has_no_backward() -> None:
    """Eight stages and microbatches of 1 s forward and 2 s backward: 3 (8 + 7) s (GPipe, section
    2.3); rotary tables of 0.1 s take little of it away."""
    through, share, of = np.array([24.0]), np.array([1 / 3]), (np.array([8]), np.array([8]))
    equal_s = one_f_one_b_s(through, share, np.array([0.0]), *of)[0]
    assert 40 < equal_s <= 45
    assert one_f_one_b_s(through + 0.1, share, np.array([0.1 * 2 / 3]), *of)[0] == pytest.approx(
        equal_s, rel=0.02
    )


def test_the_first_and_the_last_rank_have_the_units_around_the_blocks() -> None:
    nothing, first, between, last = (np.array([float(n)]) for n in range(4))
    amounts = StagedBytes(*(nothing,) * 6, first=first, between=between, last=last)
    assert [float(amounts.on(rank, 4)[0]) for rank in range(4)] == [1, 2, 2, 3]
