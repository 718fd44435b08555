"""The columns of the matrix, and what a plan leaves open: stage borders and tensor styles."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from engines.legality import problems
from engines.plan import Plan, Schedule
from profiles.model.flow import GLUE, LOSS
from profiles.model.profile import ModelProfile
from tests.engines.cases import cpu_ranks

PLANS: dict[str, str] = {
    "ddp2": "dp_replicate=2",
    "zero1": "dp_replicate=2 zero=1",
    "zero2": "dp_replicate=2 zero=2",
    "zero3": "dp_shard=4",
    "hsdp": "dp_replicate=2 dp_shard=2",
    "tp2": "tp=2",
    "tp4": "tp=4",
    "gpipe": "pp=2 schedule=gpipe microbatches=2",
    "1f1b": "pp=3 schedule=1f1b microbatches=4",
    "interleaved": "pp=2 schedule=interleaved microbatches=4",
    "zbv": "pp=2 schedule=zbv microbatches=4",
    "pp·tp": "pp=2 tp=2 schedule=1f1b microbatches=2",
    "pp·zero1": "pp=2 dp_replicate=2 zero=1 schedule=1f1b microbatches=2",
    "tp·zero3": "dp_shard=2 tp=2",
    "pp·tp·zero1": "pp=2 dp_replicate=2 zero=1 tp=2 schedule=1f1b microbatches=2",
}
Styles = Callable[[int], tuple[tuple[str, str], ...]]
TWO_STAGES_A_RANK = (Schedule.INTERLEAVED, Schedule.ZBV)


def plan_for(name: str, profile: ModelProfile, styles: Styles) -> Plan:
    """Column `name` with what belongs to this model; the plan may still be refused.

    `styles`: how its layers are split over a tp axis of this size.
    """
    return completed(Plan.parse(PLANS[name]), profile, styles)


def completed(plan: Plan, profile: ModelProfile, styles: Styles) -> Plan:
    """`plan` with stages and styles of this model."""
    further: dict[str, object] = {"stages": borders_for(plan, profile)}
    if plan.tp > 1:
        further["tensor_styles"] = styles(plan.tp)
    return plan.model_copy(update=further)


def borders_for(plan: Plan, profile: ModelProfile) -> tuple[str, ...]:
    """Units that begin the stages: parameters evenly shared, at borders that are legal alone.

    Where too few are legal, borders as even as can be, so that legality says what is in the way.
    """
    if plan.pp == 1:
        return ()
    count = plan.pp * (2 if plan.schedule in TWO_STAGES_A_RANK else 1)
    order = tuple(dict.fromkeys(c.unit for c in profile.flow.calls if c.unit not in (GLUE, LOSS)))
    legal = [unit for unit in order[1:] if _is_border(unit, profile)]
    return _even(order, legal if len(legal) >= count - 1 else order[1:], profile, count)


def _is_border(unit: str, profile: ModelProfile) -> bool:
    plan = Plan.parse("pp=2 schedule=1f1b microbatches=2").model_copy(update={"stages": (unit,)})
    return not problems(plan, profile, cpu_ranks(2))


def _even(
    order: Sequence[str], allowed: Sequence[str], profile: ModelProfile, count: int
) -> tuple[str, ...]:
    """`count - 1` of `allowed`, each nearest to its share of the parameters before it."""
    sizes = {unit.name: unit.parameters for unit in profile.units}
    total, before, seen = sum(sizes[unit] for unit in order), {}, 0
    for unit in order:
        before[unit] = seen
        seen += sizes[unit]
    chosen: list[str] = []
    rest = list(allowed)
    for number in range(1, count):
        to_come = count - 1 - number
        free = rest[: len(rest) - to_come]
        if not free:
            break
        nearest = min(free, key=lambda unit: abs(before[unit] - total * number / count))
        chosen.append(nearest)
        rest = rest[rest.index(nearest) + 1 :]
    return tuple(chosen)
