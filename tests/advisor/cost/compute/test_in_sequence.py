"""Launches behind a device's work, beside a queue that is played call by call."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from advisor.cost.compute.unit_passes import UnitTime, in_sequence

seconds = st.floats(0, 10, allow_nan=False).map(lambda s: round(s, 3))
passes = st.tuples(seconds, seconds)  # (work of the device, launches of the host)
units = st.lists(st.tuples(passes, passes, st.integers(1, 4)), min_size=1, max_size=6)


def time_of(forward: tuple[float, float], backward: tuple[float, float], count: int) -> UnitTime:
    waited, ahead = zip(
        *((max(0.0, host - work), max(0.0, work - host)) for work, host in (forward, backward)),
        strict=True,
    )
    return UnitTime(
        forward_s=forward[0],
        backward_s=backward[0],
        recompute_s=0.0,
        forward_launch_s=waited[0],
        backward_launch_s=waited[1],
        recompute_launch_s=0.0,
        count=count,
        ahead_s=(ahead[0], ahead[1]),
    )


def played(queue: list[tuple[float, float]]) -> float:
    """Seconds until the device is through with passes whose last kernel is launched at the end."""
    host = device = 0.0
    for work, launches in queue:
        host += launches
        device = max(device + work, host)
    return device


@given(units)
def test_a_microbatch_lasts_as_long_as_the_queue_of_its_passes(
    drawn: list[tuple[tuple[float, float], tuple[float, float], int]],
) -> None:
    times = in_sequence([time_of(*each) for each in drawn])
    queue = [forward for forward, _, count in drawn for _ in range(count)]
    queue += [backward for _, backward, count in reversed(drawn) for _ in range(count)]
    own = sum(
        t.count * (t.forward_s + t.forward_launch_s + t.backward_s + t.backward_launch_s)
        for t in times
    )
    assert own == pytest.approx(played(queue))


def test_a_heavy_unit_hides_the_launches_of_light_ones_behind_it() -> None:
    heavy, light = time_of((5, 1), (5, 1), 1), time_of((1, 2), (1, 2), 3)
    first, second = in_sequence([heavy, light])
    assert (first.forward_launch_s, second.forward_launch_s) == (0, 0)  # 4 s ahead, 3 s behind
    assert second.backward_launch_s == pytest.approx(2 / 3)  # 1 s is left of them
    assert in_sequence([light, heavy])[0].forward_launch_s == 1  # nothing came before
