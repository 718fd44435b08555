"""The caching allocator of an accelerator: reserved over allocated bytes, streams, workspaces."""

from __future__ import annotations

from typing import TYPE_CHECKING, TypeVar

from advisor.cost.load.loads import ACTIVATION_ERROR, Loads
from advisor.cost.memory.buffers import KEEPS_PARAMETERS, shard_degree
from engines.plan import Plan
from profiles.machine.cluster import Device
from profiles.workload.stack import TORCH, Stack

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    Amount = TypeVar("Amount", float, NDArray[np.float64])
    """Of one plan, or of many."""

# Reserved over allocated memory: 1.08 to 1.10 in Mist's README. Only the upper end of the range
# includes the upper end of this; its middle converts allocated to reserved bytes.
ALLOCATOR_SLACK = 0.10
USUAL_SLACK = 0.09
# cuBLAS's workspace of one handle in torch (ATen/cuda/CublasHandlePool.cpp): 2 of 4096 and 8 of 16
# KiB, from Hopper on 32 MiB.
WORKSPACE_BYTES, HOPPER_WORKSPACE_BYTES = (2 * 4096 + 8 * 16) * 1024, 32 * 2**20


def upper_end(
    allocated: Amount,
    device: Device,
    *,
    doubtful: Amount | float = 0.0,
    ahead: Amount | float = 0.0,
    error: float = ACTIVATION_ERROR,
) -> Amount:
    """Upper end of a peak, for one plan or many: adds the `error` of `doubtful` bytes (activations
    and temporaries), early gathers (`ahead`), the allocator's slack and the context."""
    high = allocated + error * doubtful + ahead
    return high * (1 + ALLOCATOR_SLACK) + device.context_bytes.high


def room_bytes(usable_bytes: float, device: Device) -> float:
    """Bytes that a plan may allocate so that it fits `usable_bytes` with slack and context."""
    return (usable_bytes - device.context_bytes.high) / (1 + ALLOCATOR_SLACK)


def workspace_bytes(device: Device, stack: Stack = TORCH) -> float:
    """Bytes of matrix-multiply libraries' workspaces in the allocator."""
    if device.kind == "cpu":
        return 0.0
    each = HOPPER_WORKSPACE_BYTES if device.is_hopper_or_later else WORKSPACE_BYTES
    return float(stack.workspaces * each)


def other_streams(
    plan: Plan, loads: Loads, *, computing: float, copy: float, on_device: bool
) -> float:
    """Bytes that CUDA's allocator keeps in a step under FSDP2, less those that never leave: a block
    serves the stream that it was made for, and no other.

    Reduced shards of gradients are made in the stream of reduce-scatters, and flat gather buffers
    in that of gathers: 3.1 and 0.8 GiB beside 16.4 that one rank of eight of a GPT of 7 billion
    parameters allocated at its peak on an H200, where 22.6 were reserved.

    Args:
        computing: most bytes at any moment without gradients.
        copy: of the largest gathered unit; parameters that stay are gathered in place.
        on_device: False if shards go to the host.
    """
    if not plan.data_parallel.is_sharded:
        return 0.0
    shards = loads.gradient_bytes / shard_degree(plan) * on_device
    return computing + shards + copy * (plan.data_parallel not in KEEPS_PARAMETERS)
