"""Advice on torch's caching allocator, if its slack decides whether a plan fits."""

from __future__ import annotations

from collections.abc import Iterator
from importlib import metadata

from advisor.cost import Estimate
from advisor.cost.memory.allocator import ALLOCATOR_SLACK
from advisor.decide.comparison import PlanVerdict
from advisor.decide.decision import Decision
from advisor.decide.reserved import reserved_bytes
from advisor.inputs.policy import Policy
from profiles.machine.cluster import Device
from profiles.units import format_gib

# The oldest torch that this project supports. From it up to 2.15, torch reads the first name if it
# is set, else the second (c10/cuda/CUDAAllocatorConfig.h in their wheels); 2.9 ignored the second
# on CUDA (pytorch/pytorch, issue 183387).
_READS_BOTH = (2, 11)
# Reserved over allocated, of 76 plans on an H200: up to 1.46, under full recompute
# (`tests/validation/gpu.json`).
LARGEST_SLACK = 0.46
_OF_CUDA, _OF_ALL = "PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF"


def variable(version: str | None) -> str:
    """Name of the allocator's environment variable in a version of torch; None is the newest.

    >>> variable("2.13.0+cpu"), variable("2.9.1")
    ('PYTORCH_ALLOC_CONF', 'PYTORCH_CUDA_ALLOC_CONF')
    """
    if version is None:
        return _OF_ALL
    major, minor = (int(number) for number in version.split(".")[:2])
    return _OF_ALL if (major, minor) >= _READS_BOTH else _OF_CUDA


def advice(version: str | None = None) -> str:
    """Describe settings against fragmentation, for a version of torch; by default the installed
    one.

    Blocks above the split size are not split, which saves large ones for large tensors (torch's
    notes on CUDA semantics, which name no value); with 512 MB, blocks of the usual sizes of a step
    can still be split.
    """
    name = variable(version or _installed())
    words = (
        f"`expandable_segments:True` in {name} avoids most of it, or `max_split_size_mb:512` if"
        " that is not supported"
    )
    if name == _OF_ALL:
        words += f" ({_OF_CUDA} takes precedence if it is set)"
    return words


def _installed() -> str | None:
    try:
        return metadata.version("torch")
    except metadata.PackageNotFoundError:
        return None


def without_slack(peak_high_bytes: float, device: Device) -> float:
    """Return the upper end of a peak without fragmentation."""
    context = device.context_bytes.high
    return (peak_high_bytes - context) / (1 + ALLOCATOR_SLACK) + context


def slack_decides(peak_high_bytes: float, device: Device, policy: Policy) -> bool:
    """True if a plan fits without the allocator's slack but not with it."""
    if device.kind == "cpu":
        return False
    usable = policy.usable_bytes(device)
    return without_slack(peak_high_bytes, device) <= usable < peak_high_bytes


def _is_near(estimate: Estimate, device: Device, usable_bytes: float) -> bool:
    """True if a replay of the step, which takes up to 0.1 s, could find more than there is."""
    return device.kind != "cpu" and estimate.peak_bytes * (1 + LARGEST_SLACK) > usable_bytes


def allocator_hint(decision: Decision) -> Iterator[str]:
    """Yield advice where the plan taken may be fragmented beyond the memory; else on the first plan
    that only the slack leaves out, with the reserved memory of the plan taken."""
    device, policy, own = decision.facts.cluster.device, decision.policy, decision.estimate
    usable_bytes = policy.usable_bytes(device)
    usable = format_gib(usable_bytes)
    reserved = reserved_bytes(decision) if _is_near(own, device, usable_bytes) else 0.0
    if reserved > usable_bytes:
        yield (
            f"the allocator may reserve {format_gib(reserved)} of {usable} usable, for a peak of"
            f" {format_gib(own.peak_bytes)}, in pieces that do not fit each other, and then run"
            f" out: {advice()}"
        )
        return
    for other in decision.alternatives:
        high = other.peak_high_bytes
        if other.verdict is PlanVerdict.NO_FIT and slack_decides(high, device, policy):
            yield (
                f"only the allocator's slack leaves {other.title} out: it needs up to"
                f" {format_gib(high)} with it, {format_gib(without_slack(high, device))} without,"
                f" of {usable} usable (this plan reserves"
                f" {format_gib(reserved_bytes(decision))} for {format_gib(own.peak_bytes)});"
                f" {advice()}. Fix that plan to run it, and `advisor.memory_report(parallel)` shows"
                " its memory"
            )
            return
