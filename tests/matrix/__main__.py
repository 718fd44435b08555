"""`python -m tests.matrix`: run the matrix, or a part of it, and keep what came out.

    --only ARCHITECTURE --plan PLAN    these rows and columns (each may be given again); else all
    --out FILE                         tests/matrix/results.json unless named; other cells stay
    --resume                           leave out what FILE has as trained or refused

The file is written after every row. The exit status is 1 if any cell neither trained nor was
refused.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections import Counter
from pathlib import Path

import torch
import transformers

from tests.matrix.architectures import ARCHITECTURES
from tests.matrix.plans import PLANS
from tests.matrix.results import ALLOWED, RESULTS, Cell, Results
from tests.matrix.run import RANKS, cells_of, start_ranks
from tests.workers import Pool


def main(arguments: list[str]) -> int:
    options = _parser().parse_args(arguments)
    results = Results(torch=torch.__version__, transformers=transformers.__version__)
    if options.out.exists():
        cells = Results.load(options.out).cells
        results = results.model_copy(update={"cells": cells})
    done = {k for k, c in results.by_place().items() if options.resume and c.outcome in ALLOWED}
    rows, columns = options.only or list(ARCHITECTURES), options.plan or list(PLANS)
    wrong, pool = 0, Pool(RANKS)
    try:
        start_ranks(pool)
        for number, row in enumerate(rows, 1):
            wanted = [column for column in columns if (row, column) not in done]
            _say(f"[{number}/{len(rows)}] {row}: {len(wanted)} cells")
            cells = []
            start = time.monotonic()
            for cell in cells_of(row, wanted, pool) if wanted else ():
                cells.append(cell)
                wrong += cell.outcome not in ALLOWED
                _say(f"    {_line(cell)} ({time.monotonic() - start:.1f} s)")
                start = time.monotonic()
            results = results.with_cells(cells, rows=ARCHITECTURES, columns=PLANS)
            results.save(options.out)
    finally:
        pool.close()
    counts = Counter(cell.outcome for cell in results.cells)
    _say(", ".join(f"{count} {outcome}" for outcome, count in sorted(counts.items())))
    return 1 if wrong else 0


def _line(cell: Cell) -> str:
    words = [f"{cell.plan}: {cell.outcome}"]
    if cell.gradient_error is not None:
        errors = f"loss {cell.loss_error:.1e}, gradient {cell.gradient_error:.1e}"
        words.append(f"{errors} ({cell.worst_gradient})")
    if cell.text:
        words.append(cell.text)
    return "; ".join(words)


def _say(text: str) -> None:
    print(text, flush=True)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m tests.matrix")
    parser.add_argument(
        "--only", action="append", choices=list(ARCHITECTURES), metavar="ARCHITECTURE"
    )
    parser.add_argument("--plan", action="append", choices=list(PLANS), metavar="PLAN")
    parser.add_argument("--out", type=Path, default=RESULTS, metavar="FILE")
    parser.add_argument("--resume", action="store_true")
    return parser


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
