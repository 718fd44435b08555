"""Recompute of a row that does not say: what its program did, or more where that does not fit.

Recipes recompute as little as they can: each layer computed again is time lost. So a blank cell is
the least that fits the device, of nothing, a selection and whole layers, and at least what the
program did by itself.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from types import MappingProxyType

from advisor.predict.memory import predict_memory
from advisor.predict.setup import Setup

_MEGATRON = ("none", "selective", "full")
_OPERATORS = ("none", "selective-ops", "full")
# What a family can choose from, the least first; who has no choice is not listed.
_CHOICES: Mapping[str, tuple[str, ...]] = MappingProxyType(
    {
        "megatron": _MEGATRON,
        "megatron-deepspeed": _MEGATRON,
        "torchtitan": _OPERATORS,
        "fsdp": _OPERATORS,
        "foundry": ("none", "full"),
        "internevo": ("none", "full"),
        "deepspeed": ("none", "full"),
    }
)


def with_least_recompute(setup: Setup) -> Setup:
    """`setup` with the least recompute that fits, its own at least; the most where none does."""
    software = setup.software
    choices = _CHOICES.get(software.family, ())
    if setup.shape is None or software.recompute not in choices:
        return setup
    found = setup
    for recompute in choices[choices.index(software.recompute) :]:
        found = replace(setup, software=replace(software, recompute=recompute))
        if predict_memory(found).fits:
            break
    return found
