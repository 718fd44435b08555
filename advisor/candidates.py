"""Candidates: every legal plan of the data-parallel family, and why settings allow none."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from advisor.facts import Facts, captured
from engines.legality import Problem, problems
from engines.plan import DataParallel, Offload, Plan, Precision, Recompute
from profiles.errors import InputError, PlanError

Pins = Mapping[str, Any]
"""Settings that a search must keep, as `engines.plan.parse_settings` returns them."""

# The engines are there; what pipelines and split layers take is not in the costs.
_NOT_PLANNED = {"pp": "pipelines", "tp": "split layers"}
_OTHER_AXES = ("pp", "cp", "tp")
# Settings that are not searched: pinned or default.
_CARRIED = (
    "pp",
    "cp",
    "tp",
    "ep",
    "sync_batch_norm",
    "compile",
    "schedule",
    "stages",
    "tensor_styles",
)


@dataclass(frozen=True, slots=True)
class Shape:
    """A data-parallel kind with its degrees."""

    kind: DataParallel
    replicate: int
    shard: int


def legal_plans(facts: Facts, pins: Pins, *, offload: Offload = Offload.NONE) -> list[Plan]:
    """Every legal plan that keeps `pins`: kinds x degrees x microbatches x recompute.

    Precision is the workload's and never searched; states go to the host only where `offload` or a
    pin says so. In a fixed order: simpler kinds first, larger microbatches first.
    """
    found = []
    offload = Offload(pins.get("offload", offload))
    for shape in _shapes(facts, pins, offload):
        for recompute in _recomputes(facts, pins):
            legal = False
            for size, rounds, accumulation in _microbatches(facts, pins, shape):
                plan = _plan(facts, pins, shape, recompute, offload, size, rounds, accumulation)
                # Legality does not look at microbatches: one answer is good for all of them.
                if not legal and not _is_legal(plan, facts):
                    break
                legal = True
                found.append(plan)
    return found


def why_illegal(facts: Facts, pins: Pins) -> list[Problem]:
    """What stands in the way of every plan that keeps `pins`; empty where there is a legal one."""
    if legal_plans(facts, pins):
        return []
    try:
        plan = _filled(facts, pins)
    except InputError as error:
        return [Problem(rule="settings", what=error.what, hint=" ".join(error.hints))]
    found = _problems(plan, facts)
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
    asked = " ".join(f"{key}={value}" for key, value in pins.items())
    where = [f"plan: {asked}"] if asked else []
    where += [f"also: {problem.what}" for problem in found[1:]]
    hints = list(nearest_settings(facts, pins))
    hints += [problem.hint for problem in found if problem.hint and problem.hint not in hints]
    return PlanError(found[0].what, where="\n".join(where) or None, hints=hints)


def nearest_settings(facts: Facts, pins: Pins) -> Iterator[str]:
    """For each pin, the values that it may have if the other pins stay."""
    for key, value in pins.items():
        others = {name: kept for name, kept in pins.items() if name != key}
        plans = legal_plans(facts, others)
        if key == "zero":
            values = {_zero(plan) for plan in plans}
        else:
            values = {getattr(plan, key) for plan in plans}
        values.discard(value)
        words = [str(v) for v in sorted(v for v in values if isinstance(v, (int, str)))]
        if words:
            listed = " or ".join([", ".join(words[:-1]), words[-1]] if words[1:] else words)
            yield f"`{key}` may be {listed} here"


def divisors(number: int) -> list[int]:
    """Ascending.

    >>> divisors(12)
    [1, 2, 3, 4, 6, 12]
    """
    return [value for value in range(1, number + 1) if number % value == 0]


def _shapes(facts: Facts, pins: Pins, offload: Offload) -> Iterator[Shape]:
    rest = facts.cluster.world_size
    for axis in _OTHER_AXES:
        degree = int(pins.get(axis, 1))
        if rest % degree:
            return
        rest //= degree
    wanted = _kinds(pins)
    for shape in _all_shapes(rest):
        if wanted is not None and shape.kind not in wanted:
            continue
        if pins.get("dp_replicate", shape.replicate) != shape.replicate:
            continue
        if pins.get("dp_shard", shape.shard) != shape.shard:
            continue
        # One device shards nothing; only offload or the user's word makes it FSDP.
        alone = rest == 1 and shape.kind is not DataParallel.NONE
        if alone and wanted is None and offload is Offload.NONE:
            continue
        yield shape


def _all_shapes(world: int) -> Iterator[Shape]:
    if world == 1:
        yield Shape(DataParallel.NONE, 1, 1)
    else:
        yield Shape(DataParallel.REPLICATE, world, 1)
    yield Shape(DataParallel.ZERO1, world, 1)
    yield Shape(DataParallel.ZERO2, world, 1)
    yield Shape(DataParallel.FULL_SHARD, 1, world)
    for shard in divisors(world)[1:-1]:
        yield Shape(DataParallel.HYBRID_SHARD, world // shard, shard)


def _kinds(pins: Pins) -> tuple[DataParallel, ...] | None:
    if "data_parallel" in pins:
        return (DataParallel(pins["data_parallel"]),)
    if "zero" not in pins:
        return None
    return {
        0: (DataParallel.NONE, DataParallel.REPLICATE),
        1: (DataParallel.ZERO1,),
        2: (DataParallel.ZERO2,),
        3: (DataParallel.FULL_SHARD, DataParallel.HYBRID_SHARD),
    }.get(int(pins["zero"]), ())


def _zero(plan: Plan) -> int:
    kind = plan.data_parallel
    order = {DataParallel.ZERO1: 1, DataParallel.ZERO2: 2}
    return order.get(kind, 3 if kind.is_sharded else 0)


def _recomputes(facts: Facts, pins: Pins) -> Iterable[Recompute]:
    if "recompute" in pins:
        return (Recompute(pins["recompute"]),)
    return tuple(Recompute) if any(facts.model.blocks()) else (Recompute.NONE,)


def _microbatches(facts: Facts, pins: Pins, shape: Shape) -> Iterator[tuple[int, int, int]]:
    """(size, microbatches, accumulation) that cut a replica's part of the batch evenly."""
    local, left = divmod(facts.workload.global_batch_size, shape.replicate * shape.shard)
    if left:
        return
    rounds = int(pins.get("microbatches", 1))
    for size in reversed(divisors(local)):
        forwards = local // size
        if pins.get("microbatch_size", size) != size or forwards % rounds:
            continue
        if pins.get("accumulation", forwards // rounds) == forwards // rounds:
            yield size, rounds, forwards // rounds


def _plan(
    facts: Facts,
    pins: Pins,
    shape: Shape,
    recompute: Recompute,
    offload: Offload,
    size: int,
    rounds: int,
    accumulation: int,
) -> Plan:
    carried = {key: pins[key] for key in _CARRIED if key in pins}
    return Plan.build(
        {
            **carried,
            "data_parallel": shape.kind,
            "dp_replicate": shape.replicate,
            "dp_shard": shape.shard,
            "microbatch_size": size,
            "microbatches": rounds,
            "accumulation": accumulation,
            "recompute": recompute,
            "precision": _precision(facts, pins),
            "offload": offload,
        }
    )


def _precision(facts: Facts, pins: Pins) -> Precision:
    return Precision(pins.get("precision", facts.precision))


def _is_legal(plan: Plan, facts: Facts) -> bool:
    return not _problems(plan, facts) and captured(plan, facts.model)


def _problems(plan: Plan, facts: Facts) -> list[Problem]:
    not_planned = [
        Problem(
            rule="not-planned",
            what=f"{what} ({axis}={getattr(plan, axis)}) have an engine, and no costs here yet:"
            " they cannot be compared",
            hint="train with them by `auto_parallelize(..., plan=...)`, or plan the data-parallel"
            " family: dp_replicate, dp_shard, zero",
        )
        for axis, what in _NOT_PLANNED.items()
        if getattr(plan, axis) > 1
    ]
    if not_planned:
        return not_planned
    whole_because = facts.workload.optimizer.whole_because
    return problems(plan, facts.model, facts.cluster, whole_because=whole_because)


def _filled(facts: Facts, pins: Pins) -> Plan:
    """`pins` as a plan: what they leave open of the degrees goes where they point."""
    settings = {"precision": _precision(facts, pins), **pins}
    if not {"dp_replicate", "dp_shard"} & set(pins):
        used = 1
        for axis in _OTHER_AXES:
            used *= int(pins.get(axis, 1))
        kinds = _kinds(pins) or ()
        axis = "dp_shard" if DataParallel.FULL_SHARD in kinds else "dp_replicate"
        settings[axis] = max(1, facts.cluster.world_size // used)
    return Plan.build(settings, where="plan")


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
