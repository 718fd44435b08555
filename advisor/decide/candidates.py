"""Candidates: all legal plans, and the reasons why settings allow none."""

from __future__ import annotations

from collections.abc import Iterator

from advisor.cost import CostModel
from advisor.cost.stages.complete import completed
from advisor.inputs.facts import Facts, captured
from advisor.inputs.policy import Policy
from advisor.search.cache import SearchCache
from advisor.search.legal import Styles, expert_degrees, space_of, styles_of
from advisor.search.search import Rows, Search
from advisor.search.space import KINDS, RECOMPUTES, SCHEDULES, Space
from advisor.search.stages import StageSearch
from engines.legality import Problem, problems
from engines.plan import DataParallel, Offload, PartialPlan, Plan
from profiles.errors import InputError, PlanError


def legal_plans(
    facts: Facts,
    partial: PartialPlan,
    *,
    offload: Offload = Offload.NONE,
    styles: Styles | None = None,
    costs: CostModel | None = None,
) -> list[Plan]:
    """List every legal plan with the settings of `partial`; for few devices (see `advisor.search`).

    Precision is the workload's; states are offloaded only if `offload` or `partial` says so. The
    order is fixed: simpler degrees and kinds first, larger microbatches first.
    """
    costs = costs or CostModel(facts)
    styles = styles or styles_of(facts, by_tokens=partial.sequence_parallel)
    space = space_of(facts, partial, styles=styles, offload=offload, costs=costs)
    stages = StageSearch(SearchCache(costs), partial, Policy())
    return [stages.plan(space, index) for index in range(len(space))]


def searched(
    cache: SearchCache,
    partial: PartialPlan,
    policy: Policy,
    *,
    offload: Offload = Offload.NONE,
    styles: Styles | None = None,
    is_long: bool | None = None,
    among: tuple[Space, Rows] | None = None,
) -> Search:
    """Return a search over the plans of `legal_plans`, for the facts of `cache`.

    Args:
        among: a space that differs in what is not searched, and rows of it: only these are
            searched, unless the spaces have other rows.
    """
    cache = cache.under(partial)
    space = cache.space(partial, offload=offload, styles=styles, is_long=is_long)
    if among is not None and space.has_rows_of(among[0]):
        space = space.part(among[1])
    return Search(cache, policy, space, StageSearch(cache, partial, policy))


def why_illegal(
    facts: Facts, partial: PartialPlan, *, styles: Styles | None = None
) -> list[Problem]:
    """Return the rules that every plan with `partial` breaks; empty if some plan is legal."""
    styles = styles or styles_of(facts, by_tokens=partial.sequence_parallel)
    if len(space_of(facts, partial, styles=styles)):
        return []
    try:
        plan = _filled(facts, partial, styles)
    except InputError as error:
        return [Problem(rule="settings", what=error.what, hint=" ".join(error.hints))]
    indivisible = facts.workload.optimizer.indivisible
    broken = problems(plan, facts.model, facts.cluster, indivisible=indivisible)
    if not broken and not captured(plan, facts.model):
        broken.append(
            Problem(
                rule="precision-profile",
                what=f"the model was not profiled in precision={plan.precision}",
                hint="profile the model with this precision",
            )
        )
    return broken or [_batch_problem(facts, partial, plan)]


def refuse(facts: Facts, partial: PartialPlan, *, styles: Styles | None = None) -> PlanError:
    """Return the error for settings that allow no legal plan, with the nearest legal settings."""
    broken = why_illegal(facts, partial, styles=styles)
    where = [f"plan: {partial}"] if partial.fixes() else []
    where += [f"also: {problem.what}" for problem in broken[1:]]
    hints = list(nearest_settings(facts, partial, styles=styles))
    hints += [problem.hint for problem in broken if problem.hint and problem.hint not in hints]
    return PlanError(broken[0].what, where="\n".join(where) or None, hints=hints)


def nearest_settings(
    facts: Facts, partial: PartialPlan, *, styles: Styles | None = None
) -> Iterator[str]:
    """Yield, for each fixed setting, the values that are legal with the others unchanged.

    `styles` are those of `partial`: blocks that are split by tokens or not have others.
    """

    def space(each: PartialPlan) -> Space:
        by_tokens = each.sequence_parallel
        known = styles if by_tokens == partial.sequence_parallel else None
        return space_of(facts, each, styles=known or styles_of(facts, by_tokens=by_tokens))

    for key, value in partial.fixed.items():
        others = partial.leaving(key)
        variants = [others]
        if key == "ep":  # a space has a single degree of it
            variants = [others.fixing(ep=degree) for degree in expert_degrees(facts, others)]
        legal = {legal_value for each in variants for legal_value in _values(space(each), key)}
        legal.discard(value)
        words = [str(each) for each in sorted(legal)]
        if words:
            listed = " or ".join([", ".join(words[:-1]), words[-1]] if words[1:] else words)
            yield f"`{key}` may be {listed} here"


def _values(space: Space, key: str) -> set[int] | set[str]:
    """Return the values of a setting in `space`, as numbers or words."""
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


def _filled(facts: Facts, partial: PartialPlan, styles: Styles) -> Plan:
    """Complete `partial` to a plan; remaining devices become replicas or shards, as it suggests."""
    partial = partial.fixing(precision=partial.precision or facts.precision)
    left = facts.cluster.world_size - partial.extra_ranks
    replicas = max(1, left // partial.model_ranks)
    if not partial.fixes("dp_replicate", "dp_shard"):
        is_sharded = DataParallel.FULL_SHARD in (partial.kinds or ())
        partial = partial.fixing(**{"dp_shard" if is_sharded else "dp_replicate": replicas})
    rows = facts.workload.global_batch_size // replicas
    return completed(partial, facts.model, facts.cluster, rows=rows, styles=styles)


def _batch_problem(facts: Facts, partial: PartialPlan, plan: Plan) -> Problem:
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
    named = partial.only("microbatch_size", "microbatches", "accumulation")
    return Problem(
        rule="batch",
        what=f"{named} does not divide the {local} samples of a replica evenly",
        hint="microbatch_size x microbatches x accumulation is the batch of a replica:"
        f" {batch} / {replicas} = {local}",
    )
