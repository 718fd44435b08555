"""Advice on torch's caching allocator, where what it may hold back decides whether a plan fits."""

from __future__ import annotations

from collections.abc import Iterator

from advisor.comparison import Verdict
from advisor.cost.memory import ALLOCATOR_SLACK
from advisor.decision import Decision
from advisor.policy import Policy
from profiles.cluster import Device
from profiles.units import format_gib

# Blocks above are not split, so that large ones stay whole for large tensors (torch's notes on CUDA
# semantics, which name no value). 512 MB leaves what a step usually asks for splittable.
ADVICE = (
    "`expandable_segments:True` in PYTORCH_CUDA_ALLOC_CONF avoids most of it, or"
    " `max_split_size_mb:512` where that is not supported"
)


def without_slack(peak_high_bytes: float, device: Device) -> float:
    """The upper end of a peak of which the allocator loses nothing in pieces that are too small."""
    context = device.context_bytes.high
    return (peak_high_bytes - context) / (1 + ALLOCATOR_SLACK) + context


def slack_decides(peak_high_bytes: float, device: Device, policy: Policy) -> bool:
    """Whether a plan fits without the allocator's slack and not with it."""
    if device.kind == "cpu":
        return False
    usable = policy.usable_bytes(device)
    return without_slack(peak_high_bytes, device) <= usable < peak_high_bytes


def allocator_hint(decision: Decision) -> Iterator[str]:
    """Of the first plan that the slack alone leaves out, beside what the one that was taken
    reserves."""
    device, policy, own = decision.facts.cluster.device, decision.policy, decision.estimate
    usable = format_gib(policy.usable_bytes(device))
    for other in decision.alternatives:
        high = other.peak_high_bytes
        if other.verdict is Verdict.NO_FIT and slack_decides(high, device, policy):
            yield (
                f"only what the allocator may lose leaves {other.title} out: it needs up to"
                f" {format_gib(high)} with it, {format_gib(without_slack(high, device))} without,"
                f" of {usable} usable (this plan reserves {format_gib(own.reserved_bytes)} for"
                f" {format_gib(own.peak_bytes)}); {ADVICE}. Compare"
                " torch.cuda.max_memory_reserved() with max_memory_allocated(), and pin the plan"
            )
            return
