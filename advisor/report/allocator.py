"""Advice on torch's caching allocator, where what it holds back decides whether a plan fits."""

from __future__ import annotations

from collections.abc import Iterator

from advisor.cost.memory import ALLOCATOR_SLACK
from advisor.decision import Decision
from profiles.units import format_gib

SETTING = "expandable_segments:True"
# Blocks above are not split, so that large ones stay whole for large tensors (torch's notes on CUDA
# semantics). 512 MB leaves what a step usually asks for splittable; torch accepts more than 20.
SPLIT = "max_split_size_mb:512"


def allocator_hint(decision: Decision) -> Iterator[str]:
    """Said where the plan fits with less to spare than the allocator's slack: with twice as much of
    it in pieces that are too small, it would not."""
    device, estimate = decision.facts.cluster.device, decision.estimate
    if device.kind == "cpu":
        return
    usable, context = decision.policy.usable_bytes(device), device.context_bytes.high
    slack = (estimate.peak_high_bytes - context) * ALLOCATOR_SLACK / (1 + ALLOCATOR_SLACK)
    spare = usable - estimate.peak_high_bytes
    if spare >= slack:
        return
    yield (
        f"at the peak {format_gib(estimate.reserved_bytes)} of {format_gib(usable)} usable are"
        f" reserved for {format_gib(estimate.peak_bytes)}; up to {format_gib(slack)} may be lost"
        f" in pieces that are too small, and {format_gib(max(0.0, spare))} are left beside:"
        f" `{SETTING}` in PYTORCH_CUDA_ALLOC_CONF avoids most of it, or `{SPLIT}` where that is"
        " not supported; torch.cuda.max_memory_reserved() shows what is"
    )
