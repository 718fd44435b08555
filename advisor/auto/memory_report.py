"""Memory of a training's devices, compared with the prediction."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from advisor.cost import CostModel
from advisor.cost.estimates.process_memory import ProcessMemory, process_memory
from advisor.cost.memory.allocator import ALLOCATOR_SLACK
from advisor.decide.allocator import advice
from advisor.decide.decision import Decision
from advisor.decide.reserved import reserved_bytes
from profiles.errors import InputError
from profiles.units import format_gib, format_percent

if TYPE_CHECKING:
    from engines.parallel import ParallelModel
    from engines.runtime.peak_memory import PeakMemory


def memory_report(parallel: ParallelModel) -> str:
    """Report the ranks' peak and reserved memory next to the prediction, a line each. All ranks
    call it, after some steps.

    Raises:
        InputError: the plan was not decided here, so nothing was predicted.
    """
    decision, peaks = parallel.decision, parallel.memory()
    if not isinstance(decision, Decision):
        raise InputError(
            "nothing was predicted of this training: its plan was given to `apply_plan`",
            hints=["`parallel.memory()` says what it held"],
        )
    predicted = process_memory(CostModel(decision.facts), decision.plan, decision.estimate)
    return "\n".join(_compared(peaks, predicted, reserved_bytes(decision)))


def _compared(peaks: PeakMemory, own: ProcessMemory, reserved: float) -> Iterator[str]:
    most, slackest = peaks.ranks[peaks.fullest], peaks.ranks[peaks.slackest]
    yield str(peaks)
    expected = f"{format_gib(own.low)} to {format_gib(own.high)}"
    yield f"predicted: {expected}, {format_gib(reserved)} reserved"
    if most.peak_bytes > own.high:
        over = format_gib(most.peak_bytes - own.high)
        yield f"rank {peaks.fullest} held {over} more than the upper end"
    if not slackest.allocated_bytes:
        return
    slack, allowed = format_percent(slackest.slack), format_percent(ALLOCATOR_SLACK)
    if slackest.slack > ALLOCATOR_SLACK or slackest.retries:
        yield (
            f"rank {peaks.slackest} reserved {slack} more than its tensors, predictions allow for"
            f" {allowed}: {advice()}"
        )
    else:
        yield f"slack is within the {allowed} that predictions allow for: nothing to set"
