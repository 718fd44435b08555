"""Defaults that follow from memory: the largest microbatch and the least recompute that fit."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from types import MappingProxyType

from advisor.cost import Estimate
from advisor.predict.case import case_of, with_microbatch
from advisor.predict.setup import Setup
from profiles.machine.cluster import Device

# Share of the allocator's cached bytes that it cannot release: partially used blocks.
NOT_GIVEN_BACK = 1 / 3
LARGEST = 4096
_ALL = ("none", "selective", "full")
# Recompute modes that a family offers, cheapest first; families without a choice are absent.
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
    """Return True if the fullest rank's peak fits after the allocator releases its cache."""
    cached = estimate.reserved_bytes - estimate.peak_bytes
    return estimate.peak_bytes + NOT_GIVEN_BACK * cached <= device.memory_bytes.value


def used_bytes(reserved: float, peak: float, device: Device) -> float:
    """Device memory reported as used: the allocator releases cached blocks before it fails."""
    return min(reserved, max(peak, device.memory_bytes.value))


def setup_fits(setup: Setup) -> bool:
    """Return True if a setup fits its devices."""
    return fits(case_of(setup).estimate(), setup.cluster.device)


def filled(setup: Setup) -> Setup:
    """Return `setup` with the largest power-of-two microbatch that fits, 1 if none does."""
    size = 1
    while size < LARGEST and setup_fits(with_microbatch(setup, 2 * size)):
        size *= 2
    return replace(with_microbatch(setup, size), filled=True)


def with_least_recompute(setup: Setup) -> Setup:
    """Return `setup` with the least recompute that fits, at least its own; the most if none does.

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
