"""First units of the stages in the matrix."""

from __future__ import annotations

import pytest

pytest.importorskip("transformers")

from engines.legality import problems
from engines.plan import Plan
from profiles.model.affine import Affine
from profiles.model.flow import Edge, Flow, UnitCall, Value
from profiles.model.profile import ModelProfile, Numerics, UnitCost, UnitProfile
from tests.engines.cases import cpu_ranks
from tests.matrix.plans import PLANS, borders_for


def chain(sizes: list[int], *, hidden: tuple[int, int] | None = None) -> ModelProfile:
    """Units a, b, c ... one after another, with so many parameters; `hidden`: a call takes what
    another left behind."""
    names = "abcdefgh"[: len(sizes)]
    value = Value(shape=(2, 4), dtype="float32", bytes=Affine(fixed=32))
    left = value.model_copy(update={"is_returned": False})
    calls = [UnitCall(unit=name, values=(value, left)) for name in names]
    edges = [Edge(source=n, value=0, target=n + 1) for n in range(len(sizes) - 1)]
    if hidden is not None:
        edges.append(Edge(source=hidden[0], value=1, target=hidden[1]))
    units = [
        UnitProfile(
            name=name, kind="Linear", parameters=size, costs={Numerics.AS_BUILT: UnitCost()}
        )
        for name, size in zip(names, sizes, strict=True)
    ]
    return ModelProfile(
        name="chain", units=tuple(units), dtype="float32", samples=2, has_loss=True,
        flow=Flow(calls=tuple(calls), edges=tuple(edges)),
    )  # fmt: skip


@pytest.mark.parametrize(
    ("sizes", "column", "borders"),
    [
        ([1, 1, 1, 1], "gpipe", "c"),
        ([6, 1, 1, 1, 3], "gpipe", "b"),
        ([2, 1, 1, 2, 2, 2, 2], "1f1b", "d f"),
        ([1, 1, 1, 1], "zbv", "b c d"),
        ([9, 1, 1, 1], "interleaved", "b c d"),  # the last ones are left to the last stages
        ([4, 4], "ddp2", ""),
    ],
)
def test_stages_share_the_parameters_evenly(sizes: list[int], column: str, borders: str) -> None:
    assert borders_for(Plan.parse(PLANS[column]), chain(sizes)) == tuple(borders.split())


def test_a_border_that_is_not_legal_is_moved_to_the_nearest_that_is() -> None:
    profile = chain([1, 1, 1, 1, 1, 1], hidden=(2, 3))  # nothing may begin at d
    plan = Plan.parse(PLANS["gpipe"])
    assert borders_for(plan, chain([1, 1, 1, 1, 1, 1])) == ("d",)
    (border,) = borders_for(plan, profile)
    assert border in "ce"
    actual = plan.model_copy(update={"stages": (border,)})
    assert problems(actual, profile, cpu_ranks(2)) == []


def test_a_model_with_too_few_borders_is_left_to_legality() -> None:
    profile = chain([1, 1, 1])
    plan = Plan.parse(PLANS["zbv"])
    actual = plan.model_copy(update={"stages": borders_for(plan, profile)})
    rules = [problem.rule for problem in problems(actual, profile, cpu_ranks(2))]
    assert rules == ["stage-count"]
