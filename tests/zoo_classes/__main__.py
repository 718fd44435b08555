"""`python -m tests.zoo_classes`: classes of transformers under four plans, against one process.

    --only CLASS --plan PLAN    these (each may be given again); else all
    --sample N --seed S         N of all classes, in an order by the seed
    --again                     run what FILE knows too, but for what trained there
    --out FILE                  tests/validation/zoo.json unless named
    --counts                    say what FILE knows, and run nothing

What FILE knows is left out, so that a run that was stopped goes on, unless it is of other versions
of torch or transformers. It is written after each class.
The exit status is 1 if a cell neither trained nor was refused.
"""

from __future__ import annotations

import argparse
import logging
import sys
import time
from pathlib import Path

import torch
import transformers

from tests.matrix.results import ALLOWED, Cell, Outcome
from tests.matrix.run import start_ranks
from tests.workers import Pool
from tests.zoo_classes.classes import class_names, sampled
from tests.zoo_classes.results import RESULTS, Classes, counts
from tests.zoo_classes.run import PLANS, RANKS, cells_of


def main(arguments: list[str]) -> int:
    options = _parser().parse_args(arguments)
    results = Classes(
        torch=torch.__version__, transformers=transformers.__version__, classes=len(class_names())
    )
    if options.out.exists():
        before = Classes.load(options.out)
        if (before.torch, before.transformers) == (results.torch, results.transformers):
            results = before
    if not options.counts:
        results = _run(results, options)
    print(counts(results, PLANS))
    return 1 if any(cell.outcome not in ALLOWED for cell in results.cells) else 0


def _run(results: Classes, options: argparse.Namespace) -> Classes:
    names = options.only or sampled(options.sample or len(class_names()), options.seed)
    columns = options.plan or list(PLANS)
    pool = Pool(RANKS)
    try:
        start_ranks(pool)
        for number, name in enumerate(names, 1):
            known = results.known(name)
            if options.again:
                trained = [c for c in results.cells if c.outcome is Outcome.TRAINED]
                known = {c.plan for c in trained if c.architecture == name}
            wanted = [c for c in columns if c not in known and "*" not in known]
            if not wanted:
                continue
            start = time.monotonic()
            answer = cells_of(name, wanted, pool)
            if not isinstance(answer, str):
                answer = list(answer)
            results = results.with_class(name, answer)
            results.save(options.out)
            shown = answer if isinstance(answer, str) else [_mark(c) for c in answer]
            shown = f"not counted: {shown[:150]}" if isinstance(shown, str) else "; ".join(shown)
            seconds = time.monotonic() - start
            print(f"[{number}/{len(names)}] {name} ({seconds:.0f} s): {shown}", flush=True)
    finally:
        pool.close()
    return results


def _mark(cell: Cell) -> str:
    text = f"{cell.plan} {cell.outcome.value}"
    if cell.outcome is not Outcome.TRAINED:
        text += f" {cell.rule} {(cell.text.strip().splitlines() or [''])[-1][-150:]}"
        if cell.gradient_error is not None:
            text += f" loss {cell.loss_error} gradient {cell.gradient_error} {cell.worst_gradient}"
    return text


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m tests.zoo_classes")
    parser.add_argument("--only", action="append", metavar="CLASS")
    parser.add_argument("--plan", action="append", choices=list(PLANS), metavar="PLAN")
    parser.add_argument("--sample", type=int, metavar="N")
    parser.add_argument("--seed", type=int, default=0, metavar="S")
    parser.add_argument("--again", action="store_true")
    parser.add_argument("--counts", action="store_true")
    parser.add_argument("--out", type=Path, default=RESULTS, metavar="FILE")
    return parser


if __name__ == "__main__":
    logging.disable(logging.WARNING)
    sys.exit(main(sys.argv[1:]))
