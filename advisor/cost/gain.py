"""The gain of one plan over another, and its range: narrower than those of their steps.

Both are predicted from the same constants. If launches take half as long again as the bench saw,
they do under both plans, and what one gains over the other hardly changes.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import hypot, sqrt

from advisor.cost.breakdown import Estimate
from advisor.cost.compute import COMPUTE_ERROR


@dataclass(frozen=True, slots=True)
class StepGain:
    """Seconds of a step that a plan saves; `doubt_s` is the half-width of their range."""

    seconds: float
    doubt_s: float

    @property
    def is_sure(self) -> bool:
        return self.seconds > self.doubt_s


def gain_of(one: Estimate, over: Estimate) -> StepGain:
    """The gain of `one` over another plan of the same facts.

    Errors of the device's constants move both steps together. Errors of the roofline and of what
    ranks send are each plan's own: here those of `one`, which is to be relied on; those of the
    other make it slower as often as faster.
    """
    first, second = _Doubts.of(one), _Doubts.of(over)
    return StepGain(
        seconds=over.step_s - one.step_s,
        doubt_s=hypot(
            first.computing_s - second.computing_s,
            first.launching_s - second.launching_s,
            first.own_s,
            first.sending_s,
        ),
    )


@dataclass(frozen=True, slots=True)
class _Doubts:
    """Parts of the half-width of a step's range, in seconds.

    Attributes:
        computing_s, launching_s: from the rates of the device, and the time of its launches.
            Idle time has the error of what is waited for.
        own_s: from the roofline.
        sending_s: from communication, exposed and overlapped.
    """

    computing_s: float
    launching_s: float
    own_s: float
    sending_s: float

    @classmethod
    def of(cls, estimate: Estimate) -> _Doubts:
        time = estimate.time
        computed_s = time.compute_s + time.recompute_s
        working_s = computed_s + time.launch_s
        waited_s = time.idle_s + time.straggling_s
        # A stage that waits for launches keeps the others waiting for as long.
        launching = time.launch_s / working_s if working_s else 0.0
        launched_s = time.launch_s + launching * waited_s
        computed_s += (1 - launching) * waited_s + time.optimizer_s
        rates, compute_own = _split(estimate.compute_error)
        launches, launch_own = _split(estimate.launch_error)
        spread_s = estimate.launch_error * time.launch_s
        spread_s += estimate.compute_error * (computed_s + launched_s - time.launch_s)
        return cls(
            computing_s=rates * computed_s,
            launching_s=launches * launched_s,
            own_s=compute_own * computed_s + launch_own * launched_s,
            sending_s=max(0.0, estimate.step_high_s - estimate.step_s - spread_s),
        )


def _split(error: float) -> tuple[float, float]:
    """Share of a relative error that is the device's, and that which is the roofline's."""
    own = min(error, COMPUTE_ERROR)
    return sqrt(error**2 - own**2), own
