"""The command of a report that is measured here and saved as JSON beside this file.

A report stores the facts that its predictions rest on, so that `--show` and the tests predict by
today's code what was measured then.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

from profiles.record import Document
from tests.namespaces import why_not

NO_FACTS = (
    "this report was measured before reports stored the bench of their machines: its predictions"
    " are of that day; measured anew, it is predicted by today's code"
)

Report = TypeVar("Report", bound=Document)


def command(
    path: Path,
    *,
    about: str | None,
    rank: Callable[[str], None],
    measure: Callable[[], Report],
    repriced: Callable[[], Report],
    table: Callable[[Report], str],
    missing: Callable[[], str | None] = why_not,
) -> int:
    """Measure, save at `path` and print; `--show` prints the saved report.

    Args:
        rank: one process of the measurement, which starts itself with `--rank WHERE`.
        repriced: loads the saved report, as predicted by today's code.
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
    sys.stdout.write(f"{table(repriced())}\n")
    return 0
