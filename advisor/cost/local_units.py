"""Units with one rank's part of the parameters along tp and ep, for the optimizer step."""

from __future__ import annotations

from collections.abc import Sequence

from advisor.cost.axes import split_experts, without_experts
from advisor.cost.runs import UnitRun
from advisor.cost.tensor import Styled, cut_unit, is_split
from engines.plan import Plan
from profiles.model.profile import ModelProfile, Numerics, UnitProfile


def local_units(
    plan: Plan,
    model: ModelProfile,
    runs: Sequence[UnitRun],
    styled: Sequence[Styled],
    *,
    numerics: Numerics,
    shards: int,
    splits_experts: bool = False,
) -> tuple[UnitProfile, ...]:
    """Return every unit of `model` on one rank; equal ones share an object.

    Args:
        styled: styles of each unit.
        shards: number of ranks that shard states, if experts are split.
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
                known[how] = unit
            units.append(known[how])
    return tuple(units)
