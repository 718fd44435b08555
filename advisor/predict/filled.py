"""Blanks that memory fills: a microbatch as large as fits, and as little recompute as fits."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from types import MappingProxyType

from advisor.cost import Estimate
from advisor.predict.case import case_of, with_microbatch
from advisor.predict.setup import Setup
from profiles.machine.cluster import Device

# Of the allocator's slack, what it cannot give back in need: blocks that are used in part.
NOT_GIVEN_BACK = 1 / 3
LARGEST = 4096
_ALL = ("none", "selective", "full")
# What a family can choose from, the least first; who has no choice is not listed.
_CHOICES: Mapping[str, tuple[str, ...]] = MappingProxyType(
    {
        "megatron": _ALL,
        "megatron-deepspeed": _ALL,
        "nemo": _ALL,
        "torchtitan": _ALL,
        "fsdp": _ALL,
        "nanotron": _ALL,
        "foundry": ("none", "full"),
        "internevo": ("none", "full"),
        "deepspeed": ("none", "full"),
    }
)


def fits(estimate: Estimate, device: Device) -> bool:
    """Whether the fullest rank's peak fits, what the allocator can give back given back."""
    cached = estimate.reserved_bytes - estimate.peak_bytes
    return estimate.peak_bytes + NOT_GIVEN_BACK * cached <= device.memory_bytes.value


def used_bytes(reserved: float, peak: float, device: Device) -> float:
    """What the device shows as used: cached blocks go back before a request fails."""
    return min(reserved, max(peak, device.memory_bytes.value))


def setup_fits(setup: Setup) -> bool:
    """Whether a setup runs."""
    return fits(case_of(setup).estimate(), setup.cluster.device)


def filled(setup: Setup) -> Setup:
    """`setup` with the largest microbatch, a power of two, that fits; 1 where none does."""
    size = 1
    while size < LARGEST and setup_fits(with_microbatch(setup, 2 * size)):
        size *= 2
    return replace(with_microbatch(setup, size), filled=True)


def with_least_recompute(setup: Setup) -> Setup:
    """`setup` with the least recompute that fits, its own at least; the most where none does.

    Recipes recompute as little as they can: each layer computed again is time lost.
    """
    software = setup.software
    choices = _CHOICES.get(software.family, ())
    if setup.shape is None or software.recompute not in choices:
        return setup
    chosen = setup
    for recompute in choices[choices.index(software.recompute) :]:
        chosen = replace(setup, software=replace(software, recompute=recompute))
        if setup_fits(chosen):
            break
    return chosen
