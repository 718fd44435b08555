"""The command of a report that is measured here and kept as JSON beside this file."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

from profiles.record import Document
from tests.namespaces import why_not

Report = TypeVar("Report", bound=Document)


def command(
    kind: type[Report],
    path: Path,
    *,
    about: str | None,
    rank: Callable[[str], None],
    measure: Callable[[], Report],
    table: Callable[[Report], str],
    missing: Callable[[], str | None] = why_not,
) -> int:
    """Measure, keep at `path` and print; `--show` prints what is kept.

    Args:
        rank: one process of the measurement, which starts itself with `--rank WHERE`.
        missing: what the measurement wants and this machine has not; None where it has all.

    Returns:
        The exit code: 2 where this machine lets nobody measure.
    """
    parser = argparse.ArgumentParser(description=about)
    parser.add_argument("--show", action="store_true", help="print the table of the report")
    parser.add_argument("--rank", help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.rank:
        rank(given.rank)
        return 0
    if not given.show:
        lacked = missing()
        if lacked:
            sys.stderr.write(f"{lacked}\n")
            return 2
        measure().save(path)
    sys.stdout.write(f"{table(kind.load(path))}\n")
    return 0
