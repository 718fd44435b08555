"""Loads of a few units with numbers that one can tell from one another in a sum."""

from __future__ import annotations

from typing import Any

from advisor.cost.load.loads import Loads
from advisor.cost.load.unit_load import UnitLoad


def unit(name: str, **said: Any) -> UnitLoad:
    """A unit with nothing but what is said."""
    flags = dict.fromkeys(("is_block", "is_separate", "is_late", "is_multiplied"), False)
    numbers = dict.fromkeys(
        (
            "parameter_bytes",
            "gradient_bytes",
            "forward_flop",
            "backward_flop",
            "forward_moved_bytes",
            "backward_moved_bytes",
            "activation_bytes",
            "selective_bytes",
            "input_bytes",
            "output_bytes",
            "forward_transient_bytes",
            "backward_transient_bytes",
        ),
        0.0,
    )
    kernels = {"forward_kernels": 0, "backward_kernels": 0}
    return UnitLoad(name=name, **{**flags, **numbers, **kernels, **said})


def loads(*units: UnitLoad, compute_share: float = 1.0) -> Loads:
    names = tuple(each.name for each in units for _ in range(each.count))
    return Loads(units, 1, compute_share, 0.0, names)
