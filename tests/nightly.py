"""Tests that repeat on other plans or sizes what one of them has shown: `make nightly`."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import pytest


def nightly(*values: Any) -> list[Any]:
    """Parameters of tests that `make test` leaves out; a tuple is one of several names."""
    each = (value if isinstance(value, tuple) else (value,) for value in values)
    return [pytest.param(*value, marks=pytest.mark.nightly) for value in each]


def half(values: Iterable[Any], *, of: int = 2, first: int = 0) -> list[Any]:
    """`values`, of which every second one (`of`: third ...) is left in `make test`."""
    every = list(values)
    often = every[first::of]
    return [*often, *nightly(*(value for value in every if value not in often))]
