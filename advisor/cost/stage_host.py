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

# 48 to 55 a microbatch and stage of 12 parameters, in both passes; 72 to 89 with 48.
PASS = 28
# 5.9 to 7.0 a parameter.
SPLIT_TENSOR = 7


def pass_s(device: Device) -> float:
    """Seconds of a forward or a backward of a microbatch on a stage."""
    return PASS * device.launch_s.value if device.kind == "cpu" else 0.0


def split_s(part: Loads, device: Device) -> float:
    """Seconds of a backward of the stage `part` in two halves."""
    return SPLIT_TENSOR * part.tensors * device.launch_s.value if device.kind == "cpu" else 0.0


def repeated_s(model: CostContext, plan: Plan) -> float:
    """Seconds of what every stage after the first runs again in a forward."""
    if model.facts.cluster.device.kind != "cpu":
        return 0.0
    loads = model.loads(plan)
    times = (model.computing(plan, loads.part(n, n + 1)).times for n in model.stages.repeated)
    return sum(time.forward_s + time.forward_launch_s for each in times for time in each)
