"""Policy: objective, and every threshold with its reason."""

from __future__ import annotations

from enum import StrEnum

from pydantic import Field, PositiveInt

from profiles.machine.cluster import Device
from profiles.record import Record


class Objective(StrEnum):
    """Criterion of the best plan."""

    TREE = "tree"  # the families that the decision tree leads to; the fastest, ties to the simpler
    TIME = "time"  # the fastest plan that fits, whatever the tree says
    MEMORY = "memory"  # the plan that fits with the most memory left


class Policy(Record):
    """Thresholds and criteria of a decision.

    Attributes:
        objective: what the best plan is.
        headroom_fraction: part of device memory left free on purpose. The upper end of an estimate
            already holds allocator slack; this is for what grows later and is seen by no estimate:
            allocator pressure ran a job out of memory at step 21, not step 1 (NVIDIA-NeMo/
            Automodel#2336).
        host_headroom_fraction: the same for main memory, which data loaders and page cache share;
            DeepSpeed's estimate of host memory adds half of the states (its documentation, factor
            1.5), so a third of the memory is left.
        simplicity_margin: plans whose step differs by less are equally fast, and the simpler one is
            taken. The same configuration under another release of the software differs by 1 to 7 %
            in published runs of dense models; 5 % is inside that scatter.
        allow_lossy: allow rounded or compressed gradients (`Plan.compression`). They change the
            training, so speed alone is no reason for them.
        allow_stale: allow asynchronous and periodic updates (`Plan.updates`, servers). They change
            the training, so speed alone is no reason for them.
        alternatives: plans listed besides the winner; what fits a screen.
        device_factors: multiples of the nodes (or devices of one node) to try when nothing fits.
    """

    objective: Objective = Objective.TREE
    headroom_fraction: float = Field(default=0.05, ge=0, lt=1)
    host_headroom_fraction: float = Field(default=1 / 3, ge=0, lt=1)
    simplicity_margin: float = Field(default=0.05, ge=0)
    allow_lossy: bool = False
    allow_stale: bool = False
    alternatives: PositiveInt = 6
    device_factors: tuple[PositiveInt, ...] = (2, 4, 8, 16)

    @property
    def by_numbers(self) -> Policy:
        """Return the same policy without preference for simple plans: the fastest plan of each
        kind."""
        if self.objective is not Objective.TREE:
            return self
        return self.model_copy(update={"objective": Objective.TIME})

    def usable_bytes(self, device: Device) -> float:
        """Device memory available to a plan."""
        return device.memory_bytes.value * (1 - self.headroom_fraction)

    def usable_host_bytes(self, host_memory_bytes: float) -> float:
        """Main memory of a node available to offloaded states."""
        return host_memory_bytes * (1 - self.host_headroom_fraction)
