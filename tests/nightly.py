"""Tests that repeat on other plans or sizes what one of them has shown: `make nightly`."""

from __future__ import annotations

from typing import Any

import pytest


def nightly(*values: Any) -> list[Any]:
    """Parameters of tests that `make test` leaves out; a tuple is one of several names."""
    each = (value if isinstance(value, tuple) else (value,) for value in values)
    return [pytest.param(*value, marks=pytest.mark.nightly) for value in each]
