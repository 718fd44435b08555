"""Host time of pipeline stages, besides that of their layers' operations.

Every pass of a microbatch runs Python code of torch's schedules (2.13) and posts its sends and
receives. A stage runs the model's forward up to its last unit. Its own calls are intercepted; those
of earlier stages are replaced by zeros of their outputs' shapes, while code between modules, and
modules that compute on no parameter, are run again. A split backward collects the graph, and calls
autograd once more for the gradients of each parameter.

Processors alone: an accelerator's host runs ahead. Figures are in launches, as
`python -m tests.benchmarks.stage_host` prints them on idle cores: under GPipe and 1F1B 32
to 43 a microbatch on the first stage with 3 units and 46 to 53 with 6; on the second, 35 to 51 with
1 after 3 others and 53 to 76 with 4 after 6.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate

from advisor.cost.calibration import CALIBRATION
from advisor.cost.context import CostContext
from advisor.cost.load.loads import Loads
from engines.plan import Plan
from profiles.machine.cluster import Device
from profiles.model.profile import GLUE, LOSS

# Of a forward or a backward; of a unit's own call; of the zeros in place of an earlier call.
PASS, CALL, ZEROS = 10, 4, 5
# 5.9 to 7.0 a parameter.
SPLIT_TENSOR = 7


def forward_s(part: Loads, device: Device) -> float:
    """Seconds of a microbatch's forward on the stage `part`."""
    calls = sum(name not in (GLUE, LOSS) for name in part.names)
    return (PASS + CALL * calls) * device.launch_s.value if device.kind == "cpu" else 0.0


def backward_s(device: Device) -> float:
    """Seconds of a microbatch's backward on a stage."""
    return PASS * device.launch_s.value if device.kind == "cpu" else 0.0


def split_s(part: Loads, device: Device) -> float:
    """Seconds of a backward of the stage `part` in two halves."""
    return SPLIT_TENSOR * part.tensors * device.launch_s.value if device.kind == "cpu" else 0.0


def repeated_s(model: CostContext, plan: Plan) -> Sequence[float]:
    """Seconds of what a stage after the first runs again in a forward, by the unit that it begins
    with."""
    device = model.facts.cluster.device
    if device.kind != "cpu":
        return [0.0] * len(model.facts.model.units)
    loads = model.own_loads(plan)
    bandwidth, zeros_s = CALIBRATION.bandwidth_bytes_per_s(device), ZEROS * device.launch_s.value
    times = zip(loads.entries, model.computing(plan, loads).times, strict=True)
    each = [(unit, time) for unit, time in times for _ in range(unit.count)]
    repeated = set(model.stages.repeated)
    again = (each[n][1] for n in repeated)
    everywhere = sum(time.forward_s + time.forward_launch_s for time in again)
    earlier = [
        time.glue_s[0] + (n not in repeated) * (unit.output_bytes / bandwidth + zeros_s)
        for n, (unit, time) in enumerate(each)
    ]
    return list(accumulate(earlier[:-1], initial=everywhere))
