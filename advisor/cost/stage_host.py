"""Host time of pipeline stages, besides that of their layers' operations.

Every pass of a microbatch runs Python code of torch's schedules (2.13) and posts its sends and
receives. A stage runs the model's whole forward, with the calls of other stages replaced: code
between modules, and modules that compute on no parameter, are run again on every stage. A split
backward collects the graph, and calls autograd once more for the gradients of each parameter.

Processors alone: an accelerator's host runs ahead. Figures are in launches, as
`python -m tests.benchmarks.stage_host` prints them.
"""

from __future__ import annotations

from advisor.cost.context import CostContext
from advisor.cost.loads import Loads
from engines.plan import Plan
from profiles.machine.cluster import Device
from profiles.model.flow import GLUE, LOSS

# 56 to 60 a microbatch and stage, in a forward and a backward.
PASS = 28
# 6.9 and 7.0 a parameter, of 48 and of 12.
SPLIT_TENSOR = 7


def pass_s(device: Device) -> float:
    """Seconds of a forward or a backward of a microbatch on a stage."""
    return PASS * device.launch_s.value if device.kind == "cpu" else 0.0


def split_s(part: Loads, device: Device) -> float:
    """Seconds of a backward of the stage `part` in two halves."""
    return SPLIT_TENSOR * part.tensors * device.launch_s.value if device.kind == "cpu" else 0.0


def repeated_s(model: CostContext, plan: Plan) -> float:
    """Seconds of what every stage after the first runs again in a forward; 0 without a flow."""
    flow, loads = model.facts.model.flow, model.loads(plan)
    if model.facts.cluster.device.kind != "cpu" or not flow.calls:
        return 0.0
    on_parameters = {
        call.unit
        for call in flow.calls
        if any(value.depends_on_parameters for value in call.values)
    }
    seconds = 0.0
    for number, unit in enumerate(model.facts.model.units):
        if unit.name == LOSS or (unit.name in on_parameters and unit.name != GLUE):
            continue
        for time in model.computing(plan, loads.part(number, number + 1)).times:
            seconds += time.forward_s + time.forward_launch_s
    return seconds
