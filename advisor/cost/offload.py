"""What waits outside the device: whether it leaves it at all, and what its ways take.

States of shards are with the exchanges of FSDP2 (`advisor.cost.communication`): their way begins
where a gather or a reduction ends. What is here is hidden by nothing: copies of activations wait
in the device's own stream, and the step for its states.
"""

from __future__ import annotations

from advisor.cost.ledger import Ledger
from advisor.cost.loads import Loads
from engines.offload.kinds import CHUNK_BYTES, OffloadTo
from engines.plan import Plan
from profiles.cluster import Device
from profiles.optimizers import Upkeep


def states_leave(plan: Plan, device: Device) -> bool:
    """Whether FSDP2 keeps states in main memory; a processor's are there anyway."""
    return plan.offload.states and device.kind != "cpu"


def optimizer_leaves(plan: Plan, device: Device) -> bool:
    """Whether optimizer states alone wait elsewhere."""
    return plan.offload.optimizer and _is_elsewhere(plan, device)


def activations_leave(plan: Plan, device: Device) -> bool:
    """Whether what blocks keep waits elsewhere."""
    return plan.offload.activations and _is_elsewhere(plan, device)


def _is_elsewhere(plan: Plan, device: Device) -> bool:
    """Main memory is a processor's own; files, which the kernel may write back, are not."""
    return device.kind != "cpu" or plan.offload_to is OffloadTo.DISK


def chunk_share(loads: Loads) -> float:
    """Of all parameters, those that are stepped together: a chunk, or a unit of one large one."""
    if not loads.parameter_bytes:
        return 1.0
    largest = max(unit.parameter_bytes for unit in loads.entries)
    return min(1.0, max(CHUNK_BYTES, largest) / loads.parameter_bytes)


def away_bytes(plan: Plan, loads: Loads, update: Upkeep, device: Device) -> float:
    """What waits elsewhere at most: optimizer states, and a microbatch's activations of blocks."""
    states = update.state_bytes if optimizer_leaves(plan, device) else 0.0
    return states + (_of_blocks(loads) if activations_leave(plan, device) else 0.0)


def moved_s(plan: Plan, loads: Loads, update: Upkeep, ledger: Ledger, *, device: Device) -> float:
    """Seconds of a step in which states and activations go and come back."""
    to_disk = plan.offload_to is OffloadTo.DISK

    def there_and_back(size_bytes: float, times: int) -> float:
        found = 0.0
        if device.kind != "cpu":
            found += 2 * ledger.to_host(size_bytes, count=2 * times)
        if to_disk:
            found += ledger.to_disk(size_bytes, count=times)
        return times * found

    seconds = 0.0
    if optimizer_leaves(plan, device):
        seconds += there_and_back(update.state_bytes, 1)
    if activations_leave(plan, device):
        seconds += there_and_back(_of_blocks(loads), plan.forwards)
    elif plan.offload.activations:
        # A processor copies them within its memory, there and back: read and written each time.
        moved_bytes = 4 * plan.forwards * _of_blocks(loads)
        copied_s = moved_bytes / device.memory_bandwidth_bytes_per_s.value
        ledger.host_s += copied_s
        seconds += copied_s
    return seconds


def _of_blocks(loads: Loads) -> float:
    return sum(unit.activation_bytes * unit.count for unit in loads.entries if unit.is_block)
