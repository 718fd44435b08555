"""What leaves the device between uses, and where to: settings of plans."""

from __future__ import annotations

from enum import StrEnum

CHUNK_BYTES = 32 * 2**20
"""Parameters whose states are on the device together: enough to fill its copies and kernels, and
little beside what a model keeps."""


class Offload(StrEnum):
    """What lives outside the device between uses."""

    NONE = "none"
    STATES = "states"  # parameter shards, gradient shards and optimizer states; the step runs there
    OPTIMIZER = "optimizer"  # optimizer states; the step has a few parameters' on the device
    ACTIVATIONS = "activations"  # what a block keeps for its backward
    STATES_ACTIVATIONS = "states,activations"
    OPTIMIZER_ACTIVATIONS = "optimizer,activations"

    @property
    def states(self) -> bool:
        """Whether FSDP2 keeps all states of its shards in main memory."""
        return "states" in self.value.split(",")

    @property
    def optimizer(self) -> bool:
        """Whether optimizer states alone leave the device."""
        return "optimizer" in self.value.split(",")

    @property
    def activations(self) -> bool:
        """Whether what blocks keep for their backward leaves the device."""
        return "activations" in self.value.split(",")


class OffloadTo(StrEnum):
    """Where it waits."""

    HOST = "host"  # main memory, page-locked beside an accelerator
    DISK = "disk"  # files of a folder that the user names, mapped into memory
