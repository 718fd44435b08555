"""Tests that repeat on other plans or sizes what one of them has shown: `make nightly`.

Cases are marked where they are written, or by their id in `nightly.txt`: each value of such a case,
or one like it, is in a case of `make test` too.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import pytest

LISTED = Path(__file__).with_name("nightly.txt")


def nightly(*values: Any) -> list[Any]:
    """Parameters of tests that `make test` leaves out; a tuple is one of several names."""
    each = (value if isinstance(value, tuple) else (value,) for value in values)
    return [pytest.param(*value, marks=pytest.mark.nightly) for value in each]


def half(values: Iterable[Any], *, of: int = 2, first: int = 0) -> list[Any]:
    """`values`, of which every second one (`of`: third ...) is left in `make test`."""
    every = list(values)
    often = every[first::of]
    return [*often, *nightly(*(value for value in every if value not in often))]


def mark_listed(items: Sequence[pytest.Item], *, is_whole: bool) -> None:
    """Mark the `items` that `nightly.txt` names.

    Args:
        is_whole: True if `items` are all tests.

    Raises:
        UsageError: a line names no test.
    """
    listed = set(LISTED.read_text().splitlines())
    for item in items:
        if item.nodeid in listed:
            item.add_marker(pytest.mark.nightly)
    unknown = sorted(listed - {item.nodeid for item in items}) if is_whole else []
    if unknown:
        raise pytest.UsageError(f"{LISTED.name} names no test by {unknown[0]!r}")
