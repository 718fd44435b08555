"""Zero-bubble splits of a stage's backward: gradients of inputs first, of weights later.

The split (`profiles.torch_compat.pipelining`) finds the weights by the inputs that meet them in the
graph to the output. What is refused here, torch's own left out silently (a decoder's embedding on
the stage of the last encoder layer), counted twice or failed at (T5's table of relative positions).
"""

from __future__ import annotations

from torch import nn

from engines.pipeline.segments import Segment, is_unit
from profiles.model.flow import GLUE, Flow


def can_split(segment: Segment, flow: Flow, model: nn.Module) -> bool:
    """True if every call of `segment` that has weights turns received values into one output.

    The first stage always can: it has no gradient to send, and does all of its backward later.
    """
    if segment.index == 0:
        return True
    own = range(segment.first, segment.last)
    if any(flow.calls[n].parameters for n in own if flow.calls[n].unit != GLUE):
        return False
    if any(flow.calls[e.source].unit == GLUE and e.target in own for e in flow.edges):
        return False
    units = [flow.calls[n].unit for n in own if is_unit(flow.calls[n])]
    if {caller for _, caller in flow.inside} & set(units) or not _used_once(units, model):
        return False
    received = (terms[-1] for terms in segment.received)
    fed = {(n, v) for n, v in received if flow.calls[n].values[v].needs_gradient}
    for number in own:
        call = flow.calls[number]
        takes = any((e.source, e.value) in fed for e in flow.edges if e.target == number)
        outputs = [v for v, value in enumerate(call.values) if value.needs_gradient]
        if is_unit(call) and _trainable(call.unit, model) and (not takes or len(outputs) > 1):
            return False
        if takes:
            fed.update((number, value) for value in outputs)
    return True


def _trainable(unit: str, model: nn.Module) -> bool:
    return any(p.requires_grad for p in model.get_submodule(unit).parameters())


def _used_once(units: list[str], model: nn.Module) -> bool:
    """True if no parameter is in two places, nor its unit called twice."""
    uses = [
        id(parameter)
        for unit in units
        for parameter in _every_parameter(model.get_submodule(unit))
        if parameter.requires_grad
    ]
    return len(uses) == len(set(uses))


def _every_parameter(unit: nn.Module) -> list[nn.Parameter]:
    return [p for _, p in unit.named_parameters(remove_duplicate=False)]
