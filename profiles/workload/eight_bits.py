"""Linear layers that multiply in 8 bits: one rule for engines and prices."""

from __future__ import annotations

MULTIPLE = 16
"""Features are multiples of it: rows of 8-bit factors are read 16 bytes at a time (cuBLASLt)."""
NARROWEST = 64
"""Casts cost as much as narrower products save: routers of few experts, adapters of low rank."""


def takes_eight_bits(inputs: int, outputs: int) -> bool:
    """True if a layer of so many features on a rank multiplies in 8 bits under `precision=fp8`."""
    return min(inputs, outputs) >= NARROWEST and not (inputs % MULTIPLE or outputs % MULTIPLE)
