"""Candidates: every legal plan, and why settings allow none."""

from __future__ import annotations

from collections.abc import Iterator

from advisor.cost import CostModel
from advisor.cost.complete import completed
from advisor.inputs.facts import Facts, captured
from advisor.inputs.policy import Policy
from advisor.search.cache import Kept
from advisor.search.legal import Styles, expert_degrees, kinds, space_of, styles_of
from advisor.search.search import Search
from advisor.search.space import KINDS, RECOMPUTES, SCHEDULES, Space
from advisor.search.space import Pins as Pins
from advisor.search.stages import Stages
from engines.legality import Problem, problems
from engines.plan import DataParallel, Offload, Plan, Precision, format_setting
from profiles.errors import InputError, PlanError


def legal_plans(
    facts: Facts,
    pins: Pins,
    *,
    offload: Offload = Offload.NONE,
    styles: Styles | None = None,
    costs: CostModel | None = None,
) -> list[Plan]:
    """Every legal plan that keeps `pins`, one by one: for few devices (see `advisor.search`).

    Precision is the workload's and never searched; states go to the host only where `offload` or a
    pin says so. In a fixed order: simpler degrees and kinds first, larger microbatches first.
    """
    costs = costs or CostModel(facts)
    styles = styles or styles_of(facts)
    space = space_of(facts, pins, styles=styles, offload=offload, costs=costs)
    stages = Stages(Kept(costs), pins, Policy())
    return [stages.plan(space, index) for index in range(len(space))]


def searched(
    kept: Kept,
    pins: Pins,
    policy: Policy,
    *,
    offload: Offload = Offload.NONE,
    styles: Styles | None = None,
    is_long: bool | None = None,
) -> Search:
    """A search over the same plans, of the facts that `kept` is of."""
    if pins.get("compile"):
        kept = kept.compiled()
    space = kept.space(pins, offload=offload, styles=styles, is_long=is_long)
    return Search(kept, policy, space, Stages(kept, pins, policy))


def why_illegal(facts: Facts, pins: Pins, *, styles: Styles | None = None) -> list[Problem]:
    """What stands in the way of every plan that keeps `pins`; empty where there is a legal one."""
    styles = styles or styles_of(facts)
    if len(space_of(facts, pins, styles=styles)):
        return []
    try:
        plan = _filled(facts, pins, styles)
    except InputError as error:
        return [Problem(rule="settings", what=error.what, hint=" ".join(error.hints))]
    whole_because = facts.workload.optimizer.whole_because
    found = problems(plan, facts.model, facts.cluster, whole_because=whole_because)
    if not found and not captured(plan, facts.model):
        found.append(
            Problem(
                rule="precision-profile",
                what=f"the model was not looked at in precision={plan.precision}",
                hint="profile the model with this precision",
            )
        )
    return found or [_batch_problem(facts, pins, plan)]


def refuse(facts: Facts, pins: Pins) -> PlanError:
    """The error for pins that allow no legal plan: the problems and the nearest legal settings."""
    found = why_illegal(facts, pins)
    asked = " ".join(f"{key}={format_setting(value)}" for key, value in pins.items())
    where = [f"plan: {asked}"] if asked else []
    where += [f"also: {problem.what}" for problem in found[1:]]
    hints = list(nearest_settings(facts, pins))
    hints += [problem.hint for problem in found if problem.hint and problem.hint not in hints]
    return PlanError(found[0].what, where="\n".join(where) or None, hints=hints)


def nearest_settings(facts: Facts, pins: Pins) -> Iterator[str]:
    """For each pin, the values that it may have if the other pins stay."""
    for key, value in pins.items():
        others = {name: kept for name, kept in pins.items() if name != key}
        wanted = [others]
        if key == "ep":  # a space has one degree of it
            wanted = [{**others, "ep": degree} for degree in expert_degrees(facts, others)]
        spaces = [space_of(facts, each, styles=styles_of(facts)) for each in wanted]
        values = {found for space in spaces for found in _values(space, key)}
        values.discard(value)
        words = [str(v) for v in sorted(values)]
        if words:
            listed = " or ".join([", ".join(words[:-1]), words[-1]] if words[1:] else words)
            yield f"`{key}` may be {listed} here"


def _values(space: Space, key: str) -> set[int] | set[str]:
    """What plans of `space` have for a setting: a number or a word."""
    if not len(space):
        return set()
    match key:
        case "zero":
            return {_zero(KINDS[n]) for n in set(space.kind)}
        case "data_parallel":
            return {KINDS[n].value for n in set(space.kind)}
        case "recompute":
            return {RECOMPUTES[n].value for n in set(space.recompute)}
        case "schedule":
            named = (SCHEDULES[n] for n in set(space.schedule))
            return {schedule.value for schedule in named if schedule is not None}
        case "precision" | "offload":
            return {getattr(space, key).value}
        case "pp" | "tp" | "cp" | "dp_replicate" | "dp_shard":
            return {int(n) for n in set(getattr(space, key))}
        case "microbatch_size" | "microbatches" | "accumulation":
            return {int(n) for n in set(getattr(space, key))}
    return {space.ep} if key == "ep" else set()


def _zero(kind: DataParallel) -> int:
    order = {DataParallel.ZERO1: 1, DataParallel.ZERO2: 2}
    return order.get(kind, 3 if kind.is_sharded else 0)


def _filled(facts: Facts, pins: Pins, styles: Styles) -> Plan:
    """`pins` as a plan: what they leave open of the degrees goes where they point."""
    settings = {"precision": Precision(pins.get("precision", facts.precision)), **pins}
    used = 1
    for axis in ("pp", "cp", "tp"):
        used *= int(pins.get(axis, 1))
    beside = int(pins.get("servers", 0)) + int(pins.get("backup_workers", 0))
    replicas = max(1, (facts.cluster.world_size - beside) // used)
    if not {"dp_replicate", "dp_shard"} & set(pins):
        is_sharded = DataParallel.FULL_SHARD in (kinds(pins) or ())
        settings["dp_shard" if is_sharded else "dp_replicate"] = replicas
    rows = facts.workload.global_batch_size // replicas
    return completed(settings, facts.model, facts.cluster, rows=rows, styles=styles)


def _batch_problem(facts: Facts, pins: Pins, plan: Plan) -> Problem:
    batch, replicas = facts.workload.global_batch_size, plan.data_degree
    if batch % replicas:
        lower, higher = batch // replicas * replicas, (batch // replicas + 1) * replicas
        near = f"{lower} or {higher}" if lower else str(higher)
        return Problem(
            rule="batch",
            what=f"a global batch of {batch} does not divide over {replicas} replicas:"
            f" {batch} % {replicas} = {batch % replicas}",
            hint=f"set the global batch to {near}",
        )
    local = batch // replicas
    named = [
        f"{key}={pins[key]}"
        for key in ("microbatch_size", "microbatches", "accumulation")
        if key in pins
    ]
    return Problem(
        rule="batch",
        what=f"{' '.join(named)} does not cut the {local} samples of a replica evenly",
        hint="microbatch_size x microbatches x accumulation is the batch of a replica:"
        f" {batch} / {replicas} = {local}",
    )
