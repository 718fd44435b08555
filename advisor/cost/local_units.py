"""Units with one rank's part of the parameters along tp and ep, for the optimizer step."""

from __future__ import annotations

from collections.abc import Sequence

from advisor.cost.axes import split_experts, without_experts
from advisor.cost.runs import UnitRun
from advisor.cost.tensor import Styled, cut_unit, is_split
from engines.plan import Plan
from profiles.model.profile import ModelProfile, Numerics, ParameterShape, UnitProfile


def local_units(
    plan: Plan,
    model: ModelProfile,
    runs: Sequence[UnitRun],
    styled: Sequence[Styled],
    *,
    numerics: Numerics,
    shards: int,
    whole_shards: int = 0,
    splits_experts: bool = False,
) -> tuple[UnitProfile, ...]:
    """Return every unit of `model` on one rank; equal ones share an object.

    Args:
        styled: styles of each unit.
        shards: number of ranks that shard states, if experts are split.
        whole_shards: number of ranks that shard states, if some parameters stay whole.
        splits_experts: see `Stack`.
    """
    units: list[UnitProfile] = []
    for run in runs:
        known: dict[Styled, UnitProfile] = {}
        for place in range(run.first, run.last):
            how = styled[place]
            if how not in known:
                unit = run.unit
                if is_split(how):
                    unit = cut_unit(unit, model.units[place].cost(numerics), how, tp=plan.tp)
                if splits_experts and plan.tp > 1:
                    unit = split_experts(unit, tp=plan.tp)
                if plan.ep > 1 and not plan.shards_experts:
                    unit = without_experts(unit, ep=plan.ep, shards=shards)
                if whole_shards and unit.whole_shapes:
                    unit = _with_whole(unit, shards=whole_shards)
                known[how] = unit
            units.append(known[how])
    return tuple(units)


def _with_whole(unit: UnitProfile, *, shards: int) -> UnitProfile:
    """Return `unit` with parameters that stay whole counted `shards` times, by which the optimizer
    step is later divided. Those that tp splits are taken for shards."""
    whole = {(shape.sizes, shape.element_bytes): shape.count for shape in unit.whole_shapes}
    shapes: list[ParameterShape] = []
    added = 0
    for shape in unit.shapes:
        count = min(shape.count, whole.get((shape.sizes, shape.element_bytes), 0))
        first, *rest = shape.sizes or (1,)
        sizes = (first * shards, *rest)
        if count:
            shapes.append(shape.model_copy(update={"sizes": sizes, "count": count}))
            added += count * (shapes[-1].nbytes - shape.nbytes)
        if count < shape.count:
            shapes.append(shape.model_copy(update={"count": shape.count - count}))
    update = {"gradient_bytes": unit.gradient_bytes + added, "shapes": tuple(shapes)}
    return unit.model_copy(update=update)
