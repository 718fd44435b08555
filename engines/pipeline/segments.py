"""The calls, values and parameters of each stage: the plan's borders on the flow."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise

from torch import nn

from engines.plan import Plan, Schedule
from profiles.model.flow import GLUE, LOSS, Flow, Terms, UnitCall


@dataclass(frozen=True, slots=True)
class Segment:
    """Calls [first, last) of the flow, as one stage of a pipeline.

    Attributes:
        index, count: the number of the stage, and of how many.
        received: values from the previous stage, in order, or sums of some; some only pass through.
        sent: for the next stage.
        parameters: names of the parameters that its calls need; a tied one by its first name.
    """

    index: int
    count: int
    first: int
    last: int
    received: tuple[Terms, ...]
    sent: tuple[Terms, ...]
    parameters: frozenset[str]

    @property
    def is_last(self) -> bool:
        return self.index == self.count - 1


def segments_of(plan: Plan, flow: Flow, model: nn.Module) -> tuple[Segment, ...]:
    """The stages of a legal plan, in order. A parameter that no call needs is the first one's."""
    starts = [flow.first_call(unit) for unit in plan.stages]
    borders = [0, *(start for start in starts if start is not None), len(flow.calls)]
    needed = [_needed(flow, model, *ends) for ends in pairwise(borders)]
    everywhere = {name for name, _ in model.named_parameters()}
    needed[0] |= everywhere.difference(*needed)
    return tuple(
        Segment(
            index=index,
            count=len(needed),
            first=first,
            last=last,
            received=flow.crossing_terms(first),
            sent=flow.crossing_terms(last),
            parameters=frozenset(needed[index]),
        )
        for index, (first, last) in enumerate(pairwise(borders))
    )


def stages_of_rank(plan: Plan, rank: int) -> tuple[int, ...]:
    """The stages that rank `rank` of the pipeline drives, in order.

    Stages go round the ranks; under ZBV down and up, so that the first rank has the loss.
    """
    count = len(plan.stages) + 1
    if plan.schedule is Schedule.ZBV:
        return rank, count - 1 - rank
    return tuple(range(rank, count, plan.pp))


def rank_of_stage(plan: Plan, stage: int) -> int:
    """The rank of the pipeline that drives `stage`."""
    return next(rank for rank in range(plan.pp) if stage in stages_of_rank(plan, rank))


def is_unit(call: UnitCall) -> bool:
    """True if a module is called, and not code between modules."""
    return call.unit not in (GLUE, LOSS)


def unit_calls(flow: Flow) -> tuple[int, ...]:
    """Numbers of the calls of units, in order."""
    return tuple(number for number, call in enumerate(flow.calls) if is_unit(call))


def _needed(flow: Flow, model: nn.Module, first: int, last: int) -> set[str]:
    """Names of the parameters that calls [first, last) use: own, borrowed, and through glue."""
    names = {parameter: name for name, parameter in model.named_parameters()}
    called = {call.unit for call in flow.calls[first:last] if is_unit(call)}
    called |= {unit for unit, caller in flow.inside if caller in called}
    needed = {names[p] for unit in called for p in model.get_submodule(unit).parameters()}
    for call in flow.calls[first:last]:
        if call.unit != GLUE:
            needed.update(call.parameters)
    for edge in flow.edges:
        source = flow.calls[edge.source]
        if source.unit == GLUE and first <= edge.target < last:
            needed.add(source.parameters[edge.value])
    return needed
