"""Advice on torch's caching allocator, where what it may hold back decides whether a plan fits."""

from __future__ import annotations

from collections.abc import Iterator
from importlib import metadata

from advisor.cost.memory import ALLOCATOR_SLACK
from advisor.decide.comparison import PlanVerdict
from advisor.decide.decision import Decision
from advisor.decide.reserved import reserved_bytes
from advisor.inputs.policy import Policy
from profiles.machine.cluster import Device
from profiles.units import format_gib

# The oldest torch that this project runs with. It and later ones up to 2.15 read the first name
# where it is set, else the second (c10/cuda/CUDAAllocatorConfig.h in their wheels); 2.9 took no
# notice of the second on CUDA (pytorch/pytorch, issue 183387).
_READS_BOTH = (2, 11)
_OF_CUDA, _OF_ALL = "PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF"


def variable(version: str | None) -> str:
    """What torch of this version calls the allocator's settings; None: of the newest.

    >>> variable("2.13.0+cpu"), variable("2.9.1")
    ('PYTORCH_ALLOC_CONF', 'PYTORCH_CUDA_ALLOC_CONF')
    """
    if version is None:
        return _OF_ALL
    major, minor = (int(number) for number in version.split(".")[:2])
    return _OF_ALL if (major, minor) >= _READS_BOTH else _OF_CUDA


def advice(version: str | None = None) -> str:
    """Settings against memory in pieces that are too small, by the name that torch of `version`
    reads; by default the one that is installed here.

    Blocks above the split size are not split, so that large ones stay whole for large tensors
    (torch's notes on CUDA semantics, which name no value); 512 MB leaves what a step usually asks
    for splittable.
    """
    name = variable(version or _installed())
    words = (
        f"`expandable_segments:True` in {name} avoids most of it, or `max_split_size_mb:512` where"
        " that is not supported"
    )
    if name == _OF_ALL:
        words += f" ({_OF_CUDA} takes precedence where it is set)"
    return words


def _installed() -> str | None:
    try:
        return metadata.version("torch")
    except metadata.PackageNotFoundError:
        return None


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
        if other.verdict is PlanVerdict.NO_FIT and slack_decides(high, device, policy):
            yield (
                f"only what the allocator may lose leaves {other.title} out: it needs up to"
                f" {format_gib(high)} with it, {format_gib(without_slack(high, device))} without,"
                f" of {usable} usable (this plan reserves"
                f" {format_gib(reserved_bytes(decision))} for {format_gib(own.peak_bytes)});"
                f" {advice()}. Pin the plan, and `advisor.memory_report(parallel)` says what it"
                " holds"
            )
            return
