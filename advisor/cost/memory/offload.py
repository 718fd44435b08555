"""Offloaded states and activations: which are offloaded, and transfer times.

FSDP2's transfers of shards are part of its collectives (`advisor.cost.communication`) and overlap
like them. Transfers here are exposed: copies of activations run in the compute stream, the
optimizer step waits for its states, and a page fault for its page. The page cache is not modeled:
all files are read from and written to the disk.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, TypeVar

from advisor.cost.ledger import Ledger, disk_bytes_per_s, host_link_bytes_per_s
from advisor.cost.load.loads import Loads
from engines.plan import CHUNK_BYTES, DataParallel, OffloadTo, Plan
from profiles.machine.cluster import ClusterProfile, Device
from profiles.workload.optimizers import Upkeep

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    Amount = TypeVar("Amount", float, NDArray[np.float64])
    """Of one plan, or of many."""


def states_leave(plan: Plan, device: Device) -> bool:
    """Return True if FSDP2 offloads states."""
    return plan.offload.states and is_elsewhere(device, to_disk=_to_disk(plan))


def optimizer_leaves(plan: Plan, device: Device) -> bool:
    """Return True if only optimizer states are offloaded."""
    return plan.offload.optimizer and is_elsewhere(device, to_disk=_to_disk(plan))


def activations_leave(plan: Plan, device: Device) -> bool:
    """Return True if blocks' saved activations are offloaded."""
    return plan.offload.activations and is_elsewhere(device, to_disk=_to_disk(plan))


def is_elsewhere(device: Device, *, to_disk: bool) -> bool:
    """Return True if offloading moves bytes: a CPU's own memory is main memory, files are not."""
    return device.kind != "cpu" or to_disk


def chunk_share(loads: Loads) -> float:
    """Share of the parameters that are stepped together: a chunk, or a larger unit."""
    if not loads.parameter_bytes:
        return 1.0
    largest = max(unit.parameter_bytes for unit in loads.entries)
    return min(1.0, max(CHUNK_BYTES, largest) / loads.parameter_bytes)


def away_bytes(plan: Plan, loads: Loads, update: Upkeep, device: Device) -> float:
    """Peak of offloaded bytes: optimizer states, and a microbatch's activations of blocks."""
    states = update.state_bytes if optimizer_leaves(plan, device) else 0.0
    return states + (of_blocks_bytes(loads) if activations_leave(plan, device) else 0.0)


def moved_s(
    plan: Plan, loads: Loads, update: Upkeep, ledger: Ledger, *, cluster: ClusterProfile
) -> float:
    """Seconds per step to offload and reload optimizer states and activations."""
    device, to_disk = cluster.device, _to_disk(plan)
    moved = update.state_bytes if optimizer_leaves(plan, device) else 0.0
    blocks = plan.forwards * of_blocks_bytes(loads)
    if activations_leave(plan, device):
        moved += blocks
    seconds = moved * there_and_back_s(cluster, to_disk=to_disk)
    if device.kind != "cpu":
        ledger.host_bytes += 2 * moved
    if plan.offload.activations and not activations_leave(plan, device):
        seconds += copied_s(blocks, device)
    ledger.host_s += seconds
    return seconds


def there_and_back_s(cluster: ClusterProfile, *, to_disk: bool) -> float:
    """Seconds per byte to offload and reload; all devices of a node share its disk."""
    seconds = 0.0
    if cluster.device.kind != "cpu":
        seconds += 2 / host_link_bytes_per_s(cluster).value
    if to_disk:
        written, read = disk_bytes_per_s(cluster)
        seconds += cluster.devices_per_node * (1 / written.value + 1 / read.value)
    return seconds


def copied_s(moved_bytes: Amount, device: Device) -> Amount:
    """On CPU, copies within main memory: a read and a write each way."""
    return moved_bytes * (4 / device.memory_bandwidth_bytes_per_s.value)


def shards_in_files_s(
    cluster: ClusterProfile,
    *,
    parameter_bytes: Amount,
    gradient_bytes: Amount,
    state_bytes: Amount,
    gathers: Amount,
    reductions: Amount,
) -> Amount:
    """Seconds per step of file accesses for a rank's shards.

    Parameters are read by every gather, gradients written by every reduction and read by the next
    one, which adds to them; the step reads all of them and writes parameters and states.
    """
    written, read = disk_bytes_per_s(cluster)
    reads = (gathers + 1) * parameter_bytes + reductions * gradient_bytes + state_bytes
    writes = parameter_bytes + reductions * gradient_bytes + state_bytes
    return (reads * (1 / read.value) + writes * (1 / written.value)) * cluster.devices_per_node


def filed_s(
    plan: Plan,
    parts: Sequence[Loads],
    update: Upkeep,
    ledger: Ledger,
    *,
    degree: int,
    rounds: int,
    cluster: ClusterProfile,
) -> float:
    """`shards_in_files_s` of a plan, recorded in `ledger`; 0 without files.

    Args:
        parts: of the model that the rank has a shard of, over `degree` ranks.
        rounds: after which gradients are reduced, of plans that reduce more than once a step.
    """
    if not (plan.offload.states and _to_disk(plan)):
        return 0.0
    keeps = plan.data_parallel in (DataParallel.ZERO1, DataParallel.ZERO2)
    seconds = shards_in_files_s(
        cluster,
        parameter_bytes=sum(part.parameter_bytes for part in parts) / degree,
        gradient_bytes=sum(part.gradient_bytes for part in parts) / degree,
        state_bytes=update.state_bytes,
        gathers=1.0 if keeps else 2.0 * plan.forwards,
        reductions=1.0 if plan.data_parallel is DataParallel.ZERO1 else float(rounds),
    )
    ledger.host_s += seconds
    return seconds


def of_blocks_bytes(loads: Loads) -> float:
    """Bytes of a microbatch that blocks save."""
    return sum(unit.activation_bytes * unit.count for unit in loads.entries if unit.is_block)


def _to_disk(plan: Plan) -> bool:
    return plan.offload_to is OffloadTo.DISK
