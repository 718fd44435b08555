"""The bound of a step: how long ranks wait in it until one that is late ends the job."""

from __future__ import annotations

import logging

from engines.runtime.steps import Steps
from engines.runtime.world import DEFAULT_TIMEOUT_S, World
from profiles.units import format_seconds

log = logging.getLogger(__name__)

TIMES = 20.0
"""The longest step that was predicted or measured, for batches that are longer than planned."""
LEAST_S, MOST_S = 60.0, 600.0


class StepBound:
    """Follows the step times of a training; the job's own time limit until some are known.

    A limit that the user chose stays what it is.

    Attributes:
        predicted_s: step time of the plan as it was estimated; 0 where it was given.
    """

    def __init__(self, steps: Steps, world: World, *, is_compiled: bool) -> None:
        self.predicted_s = 0.0
        self._steps, self._world = steps, world
        # Other lengths compile anew in the middle of a training.
        self._is_fixed = is_compiled or world.timeout_s != DEFAULT_TIMEOUT_S
        self._bound_s = world.timeout_s
        self._begun, self._look_at = 0, 1

    def next_s(self) -> float:
        """The bound of the next step, in seconds; said by rank 0 when it changes."""
        self._begun += 1
        if self._is_fixed or self._begun < self._look_at:
            return self._bound_s
        measured = self._steps.timing()
        if measured is not None:
            self._look_at *= 2
            longest_s = max(measured.high_s, self.predicted_s)
            bound_s = min(MOST_S, max(LEAST_S, TIMES * longest_s))
            if bound_s != self._bound_s and self._world.rank == 0 and self._world.size > 1:
                log.info(
                    "ranks wait for each other for at most %s in a step: %.0f times the longest"
                    " (%s measured%s), %.0f s to %.0f s",
                    format_seconds(bound_s),
                    TIMES,
                    format_seconds(measured.high_s),
                    f", {format_seconds(self.predicted_s)} predicted" if self.predicted_s else "",
                    LEAST_S,
                    MOST_S,
                )
            self._bound_s = bound_s
        return self._bound_s
