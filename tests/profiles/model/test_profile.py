"""Units that are sharded on their own, and what another batch may leave out, by hand."""

from __future__ import annotations

import pytest

from profiles.model.affine import Affine
from profiles.model.flow import GLUE, LOSS, Flow
from profiles.model.profile import ModelProfile, Numerics, UnitCost, UnitProfile
from profiles.model.source import BACKWARD, CaptureSource, ValueRead

COSTS = {Numerics.AS_BUILT: UnitCost()}


def profile(*sizes: tuple[str, int], **more: object) -> ModelProfile:
    """Units of so many bytes; those named `b` and a number are blocks."""
    units = tuple(
        UnitProfile(
            name=name,
            kind="Unit",
            is_block=name.startswith("b"),
            is_shared=name.startswith("tied"),
            parameter_bytes=nbytes,
            dtypes=("float32", "int8"),
            costs=COSTS,
        )
        for name, nbytes in sizes
    )
    return ModelProfile(name="net", units=units, dtype="float32", samples=1, **more)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("sizes", "separate"),
    [
        # Of the largest a 64th: 1 of 64, among blocks and where there are none.
        ((("b0", 64), ("b1", 1), ("b2", 0)), ["b0", "b1"]),
        ((("b0", 128), ("b1", 1)), ["b0"]),
        ((("a", 64), ("c", 1), ("d", 0)), ["a", "c"]),
        # Besides blocks a quarter of one, or a 64th of what is larger yet.
        ((("b0", 64), ("head", 16), ("norm", 15)), ["b0", "head"]),
        ((("b0", 64), ("head", 6400), ("norm", 99)), ["head"]),
        ((("b0", 100), ("head", 6400), ("pos", 100), ("norm", 99)), ["b0", "head", "pos"]),
        ((("b0", 64), ("tied", 64), (GLUE, 64), (LOSS, 64)), ["b0"]),
    ],
)
def test_small_and_shared_units_stay_with_the_root_group(
    sizes: tuple[tuple[str, int], ...], separate: list[str]
) -> None:
    assert [unit.name for unit in profile(*sizes).shard_units()] == separate


@pytest.mark.parametrize(
    ("facts", "varies", "skips_parameters", "skips_units"),
    [
        ({}, False, False, False),
        ({"unused": ("a.weight",)}, False, True, False),
        ({"reads": (ValueRead(unit="b0"),)}, True, True, False),
        ({"reads": (ValueRead(unit=GLUE),)}, True, True, True),
        (
            {"reads": (ValueRead(unit="b0"),), "flow": Flow(inside=(("b1", "b0"),))},
            True,
            True,
            True,
        ),
        ({"reads": (ValueRead(unit="b0", operation=BACKWARD),)}, False, False, False),
        ({"source": CaptureSource.PARAMETERS}, True, True, True),
    ],
)
def test_only_code_that_acts_on_values_may_leave_something_out(
    facts: dict[str, object], varies: bool, skips_parameters: bool, skips_units: bool
) -> None:
    model = profile(("b0", 64), ("b1", 64), **facts)
    assert model.path_varies is varies
    assert model.may_skip_parameters is skips_parameters
    assert model.may_skip_units is skips_units
    assert bool(model.shard_units()) is not skips_units


def test_what_is_trained_is_said_by_a_unit_or_all_that_it_holds() -> None:
    first, second = profile(("b0", 1), ("b1", 1)).units
    adapted = first.model_copy(update={"trained_dtypes": ("bfloat16",)})
    model = profile(("b0", 1)).model_copy(update={"units": (adapted,)})
    assert model.trained_dtypes == {"bfloat16"}
    both = model.model_copy(update={"units": (adapted, second)})
    assert both.trained_dtypes == {"bfloat16", "float32", "int8"}


def test_equal_units_have_one_object_as_their_costs_made_or_read() -> None:
    block, other = ({Numerics.AS_BUILT: UnitCost(forward_flop=Affine(fixed=n))} for n in (1, 2))
    costs = [dict(block), other, dict(block), dict(block)]
    units = tuple(UnitProfile(name=f"b{n}", kind="B", costs=c) for n, c in enumerate(costs))
    made = ModelProfile(name="net", units=units, dtype="float32", samples=1)
    for model in (made, ModelProfile.model_validate_json(made.to_json())):
        first, second, *more = [unit.costs for unit in model.units]
        assert second is not first
        assert all(costs is first for costs in more)
        assert [unit.costs for unit in model.units] == costs


def test_a_unit_of_code_alone_has_no_bytes() -> None:
    code = UnitProfile(name=GLUE, kind="code", costs=COSTS)
    sizes = (code.parameters, code.trainable_parameters, code.parameter_bytes, code.gradient_bytes)
    assert (*sizes, code.buffer_bytes, code.whole_bytes) == (0,) * 6
