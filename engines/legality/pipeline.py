"""Rules of pipelines: borders, schedule and microbatches. No torch here."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from itertools import pairwise

from engines.legality.problem import Problem
from engines.plan import Plan, Schedule
from profiles.errors import near_misses
from profiles.machine.cluster import ClusterProfile
from profiles.model.flow import Flow
from profiles.model.profile import ModelProfile

_ONE_STAGE = (Schedule.NAIVE, Schedule.GPIPE, Schedule.ONE_F_ONE_B)


def pipeline(plan: Plan, model: ModelProfile, cluster: ClusterProfile) -> Iterator[Problem]:
    """A pipeline names its schedule and the units that begin its stages, and has a loss."""
    if plan.pp == 1:
        return
    if not model.has_loss or not model.flow.calls:
        yield Problem(
            rule="pipeline-without-loss",
            what="a pipeline runs the loss on its last stage, the profile was taken without one",
            hint="give loss_fn, or a model that returns its loss, and capture the profile with it",
        )
        return
    borders = list(_borders(plan, model.flow))
    yield from borders
    yield from _changed_buffers(plan, model)
    if not borders:
        yield from _hidden(plan, model.flow)
    yield from schedule_problems(plan)


def _changed_buffers(plan: Plan, model: ModelProfile) -> Iterator[Problem]:
    """Code between units runs on every stage, and a stage has its own units' results alone."""
    buffers = model.flow.buffers_between
    if buffers:
        yield Problem(
            rule="buffer-between-stages",
            what=f"code between units changes the buffer `{buffers[0]}` by what units computed:"
            f" pp={plan.pp} runs it on stages that have other results, or none",
            hint="change it in the forward of the module that computes them; or replicate or shard",
        )


def _borders(plan: Plan, flow: Flow) -> Iterator[Problem]:
    """Names of units, in the order of their first calls, as many as the schedule has borders."""
    order = flow.order
    unknown = [name for name in plan.stages if name not in order]
    for name in unknown:
        yield Problem(
            rule="stage-unknown",
            what=f"stage border `{name}` is not a unit that the model calls",
            hint=_instead(name, order),
        )
    if unknown:
        return
    positions = [order[name] for name in plan.stages]
    if positions and positions[0] == 0:
        yield Problem(
            rule="stage-empty",
            what=f"`{plan.stages[0]}` is the first unit: stage 0 would have nothing to do",
            hint=f"begin stage 1 later: {_listed(order, after=1)}",
        )
    for (before, one), (after, other) in pairwise(zip(positions, plan.stages, strict=True)):
        if after <= before:
            yield Problem(
                rule="stage-order",
                what=f"stage borders are in the order of calls: `{other}` is not after `{one}`",
                hint=f"the order is {_listed(order)}",
            )
    yield from _count(plan, order)


def _instead(name: str, order: Collection[str]) -> str:
    """Units to begin a stage with in place of `name`."""
    around = next((unit for unit in order if name.startswith(f"{unit}.")), None)
    if around is not None:
        return f"it is a part of `{around}`, which runs as one piece: begin the stage there"
    within = [unit for unit in order if unit.startswith(f"{name}.")]
    if within:
        return f"it holds the units {_listed(within)}: name one of them"
    near = near_misses(name, order)
    return f"did you mean {' or '.join(near)}?" if near else f"units: {_listed(order)}"


def _count(plan: Plan, order: Collection[str]) -> Iterator[Problem]:
    count, pp = len(plan.stages) + 1, plan.pp
    if len(order) < pp:
        yield Problem(
            rule="stages-too-many",
            what=f"pp={pp} needs {pp} units, the model calls {len(order)}",
            hint=f"set pp to at most {len(order)}"
            if len(order) > 1
            else "leave pp at 1: nothing is cut but between calls of units",
        )
    elif plan.schedule is Schedule.ZBV and count != 2 * pp:
        yield Problem(
            rule="stage-count",
            what=f"schedule=zbv has two stages a rank: pp={pp} needs {2 * pp - 1} borders,"
            f" `stages` names {count - 1}",
            hint=f"name {2 * pp - 1} units",
        )
    elif plan.schedule in _ONE_STAGE and count != pp:
        yield Problem(
            rule="stage-count",
            what=f"schedule={plan.schedule} has one stage a rank: pp={pp} needs {pp - 1} borders,"
            f" `stages` names {count - 1}",
            hint=f"name {pp - 1} of {_listed(order, after=1)}",
        )
    elif count % pp or count < pp:
        yield Problem(
            rule="stage-count",
            what=f"pp={pp} needs as many stages on every rank, `stages` makes {count}",
            hint=f"name {pp - 1} units, or {2 * pp - 1} for two stages a rank",
        )


def _hidden(plan: Plan, flow: Flow) -> Iterator[Problem]:
    hidden = flow.hidden
    for name in plan.stages if hidden else ():
        position = flow.first_call(name)
        assert position is not None
        for source, target in hidden:
            if source < position <= target:
                yield Problem(
                    rule="stage-hidden-value",
                    what=f"`{flow.calls[target].unit}` takes something that"
                    f" `{flow.calls[source].unit}` made and does not return (a hook, a cache, a"
                    f" change in place): it cannot be sent over the border at `{name}`",
                    hint="switch it off (`use_cache=False`, `output_router_logits=False`), or let"
                    " the unit return it",
                )
                break


def schedule_problems(plan: Plan) -> Iterator[Problem]:
    """The schedule can be run with so many microbatches; borders do not matter."""
    pp, count = plan.pp, plan.microbatches
    match plan.schedule:
        case None:
            yield Problem(
                rule="pipeline-without-schedule",
                what="a pipeline needs a schedule",
                hint="set schedule=1f1b (or naive, gpipe, interleaved, zero_bubble, zbv)",
            )
        case Schedule.ONE_F_ONE_B | Schedule.ZBV if count < pp:
            yield Problem(
                rule="pipeline-microbatches",
                what=f"schedule={plan.schedule} keeps a microbatch in every stage: microbatches="
                f"{count}, pp={pp}",
                hint=f"set microbatches to {pp} or more, or schedule=gpipe",
            )
        case Schedule.INTERLEAVED | Schedule.ZERO_BUBBLE if count % pp:
            yield Problem(
                rule="pipeline-microbatches",
                what=f"schedule={plan.schedule} goes round the ranks: microbatches={count} is no"
                f" multiple of pp={pp}",
                hint=f"set microbatches to {count - count % pp or pp} or {count + pp - count % pp}",
            )
        case _:
            return


def _listed(names: Collection[str], *, after: int = 0) -> str:
    """Some of `names`, without the first `after`."""
    shown = list(names)[after:]
    return ", ".join(shown[:6]) + (", ..." if len(shown) > 6 else "")
