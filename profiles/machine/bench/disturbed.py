"""Other processes on the cores of a bench: what is timed beside them is slower than it will be."""

from __future__ import annotations

import torch

from profiles.machine.bench.job import Job
from profiles.machine.host import machine_cores, scheduled_s
from profiles.units import format_percent

# Of the time that a rank computes or waits to.
MOST_WAITING = 0.1
BEGINNING = "other processes took the cores"


class Disturbance:
    """The time that ranks wait for a core, from its beginning.

    Args:
        ranks_per_node: where these need more cores than a node has, they wait for each other.
    """

    def __init__(self, *, ranks_per_node: int) -> None:
        self._is_shared = ranks_per_node * torch.get_num_threads() > machine_cores()
        self._begun = scheduled_s()

    def note(self, job: Job) -> str:
        """Describe what the most disturbed rank lost; empty for nothing much. All ranks call it."""
        running, waiting = (
            now - before for now, before in zip(scheduled_s(), self._begun, strict=True)
        )
        share = 0.0 if self._is_shared or not waiting else waiting / (running + waiting)
        most = job.slowest([share])[0]
        if most <= MOST_WAITING:
            return ""
        return (
            f"{BEGINNING} for {format_percent(most)} of the time in which this machine was timed:"
            " it may be faster than that; time it when it is idle (`advise probe --bench`)"
        )
