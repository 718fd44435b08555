"""Values that skip units, as a stage of a pipeline retains them: counted by hand on a U-Net."""

from __future__ import annotations

import pytest

from advisor.cost.stages import StageBorders
from profiles.model.profile import Numerics
from tests.engines.cases import WIRINGS, cpu_ranks, profile_of

# Of a sample of 8 x 8 pixels: `enter` makes 8 channels, `down` 16 of half the side, `bottom` 16.
# `up` takes what `bottom` and `down` made, `leave` what `up` and `enter` made.
HIGH, LOW, BOTTOM = 8 * 8 * 8 * 4, 16 * 4 * 4 * 4, 16 * 4 * 4 * 4


@pytest.fixture(scope="module")
def borders() -> tuple[StageBorders, dict[str, int]]:
    case = WIRINGS["unet"]
    profile = profile_of(case, case.build())
    return (
        StageBorders(profile, cpu_ranks(3)),
        {unit.name: place for place, unit in enumerate(profile.units)},
    )


@pytest.mark.parametrize(
    ("first", "last", "expected"),
    [
        # It made all three.
        ("enter", "up", (0, HIGH + LOW + BOTTOM)),
        # `down` and `bottom` took the other two in the stage before, which has them saved.
        ("up", None, (BOTTOM, 0)),
        # What `enter` made is handed through: it stays where it was received.
        ("bottom", "up", (LOW, BOTTOM)),
        ("enter", "bottom", (0, HIGH + LOW)),
        ("down", "up", (HIGH, LOW + BOTTOM)),
    ],
)
def test_a_stage_retains_what_it_takes_first_and_what_it_made(
    first: str,
    last: str | None,
    expected: tuple[int, int],
    borders: tuple[StageBorders, dict[str, int]],
) -> None:
    stages, places = borders
    end = len(places) if last is None else places[last]
    start = 0 if first == "enter" else places[first]
    actual = stages.retained(start, end, numerics=Numerics.AS_BUILT, samples=3)
    assert actual == tuple(3 * nbytes for nbytes in expected)
