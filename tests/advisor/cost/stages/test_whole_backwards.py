"""Stages whose backward zero-bubble schedules leave in one piece, against the engine's own rule."""

from __future__ import annotations

import pytest

from advisor.cost.stages.stage_borders import StageBorders
from advisor.search.legal import segment_starts
from engines.pipeline.segments import segments_of
from engines.pipeline.split_backward import can_split
from engines.plan import Plan, Schedule
from tests.engines.cases import CASES, WIRINGS, cpu_ranks, profile_of

EVERY = {**CASES, **WIRINGS}


def at(name: str) -> list[tuple[str, frozenset[int], frozenset[int]]]:
    """(border, stages that the cost model has whole, stages that the engine does not split)."""
    model = EVERY[name].build()
    profile = profile_of(EVERY[name], model)
    borders, compared = StageBorders(profile, cpu_ranks(2)), []
    for start in segment_starts(profile, cpu_ranks(2))[1:]:
        plan = Plan(pp=2, schedule=Schedule.ZERO_BUBBLE, microbatches=2, stages=(start,))
        segments = segments_of(plan, profile.flow, model)
        whole = {s.index for s in segments if not can_split(s, profile.flow, model)}
        priced = borders.whole_backwards(plan, borders.ends(plan))
        compared.append((start, priced, frozenset(whole)))
    return compared


@pytest.mark.parametrize("name", EVERY)
def test_whole_backwards_are_those_that_the_engine_does_not_split(name: str) -> None:
    for start, priced, whole in at(name):
        assert priced == whole, start


def test_some_stages_are_split_and_some_are_not() -> None:
    wholes = {bool(whole) for name in EVERY for _, _, whole in at(name)}
    assert wholes == {True, False}
