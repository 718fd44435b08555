"""A bar that shows a bench's way, on a terminal only."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager

from profiles.machine.bench.collectives import Tell


@contextmanager
def progress(*, rank: int, budget_s: float) -> Iterator[Tell]:
    """Return a callback for each thing that is timed; rank 0 shows a bar on stderr.

    It shows the share of the time: that is what a bench is given.
    """
    if rank != 0 or not sys.stderr.isatty():
        yield lambda what: None
        return
    from rich.console import Console
    from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

    columns = (
        TextColumn("timing"),
        BarColumn(),
        TimeElapsedColumn(),
        TextColumn("{task.description}"),
    )
    with Progress(*columns, console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task("", total=budget_s)
        began = time.perf_counter()

        def tell(what: str) -> None:
            spent = min(budget_s, time.perf_counter() - began)
            bar.update(task, completed=spent, description=what)

        yield tell
