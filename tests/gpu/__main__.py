"""`python -m tests.gpu`: all that needs a GPU, within a time; what is left goes on next time.

    --minutes 9            for all of it, the set-up too
    --part a               this part (may be given again); else all, in order
    --only REGEX           cases whose name it is found in
    --again                what was measured before, too
    --out FILE             tests/validation/gpu.json unless named; the device's curve beside it
    --show                 the table of FILE, and run nothing
    --predict              predict what FILE has measured by today's code; no device is needed

Without a GPU the same cases are tried on the CPU at small size, and nothing is kept. The exit
status is 1 if a case failed there; on a GPU failures are results.
"""

from __future__ import annotations

import argparse
import re
import sys
from pathlib import Path

from profiles.errors import AdvisorError
from tests.gpu import again, readme
from tests.gpu.results import RESULTS, Outcome, Results
from tests.gpu.run import PARTS, Run
from tests.gpu.table import table

NO_GPU = (
    "there is no CUDA device: nothing is measured here. The cases are tried on the CPU at small"
    " size, so that they work when there is one; none of the figures below means anything."
)


def main(arguments: list[str]) -> int:
    options = _parser().parse_args(arguments)
    if options.show:
        if not options.out.exists():
            _say(f"nothing was measured yet: there is no {options.out}")
            return 0
        _say(table(Results.load(options.out)))
        return 0
    if options.predict:
        results = again.predicted_again(Results.load(options.out))
        results.save(options.out)
        if options.out == RESULTS:
            readme.write()
        _say(table(results))
        return 0
    import torch

    has_gpu = torch.cuda.device_count() > 0
    if not has_gpu:
        _say(NO_GPU)
    run = Run(
        parts=options.part or list(PARTS),
        minutes=options.minutes,
        out=options.out if has_gpu else None,
        again=options.again,
        only=options.only.pattern,
        says=_say,
        in_process=not has_gpu,
    )
    results = run.results()
    _say(table(results))
    wrong = (Outcome.FAILED, Outcome.DIFFERED)
    return int(results.is_small and any(case.outcome in wrong for case in results.cases))


def _regex(text: str) -> re.Pattern[str]:
    try:
        return re.compile(text)
    except re.error as error:
        raise argparse.ArgumentTypeError(f"`{text}` is no regular expression: {error}") from None


def _say(text: str) -> None:
    print(text, flush=True)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m tests.gpu")
    parser.add_argument("--minutes", type=float, default=9.0)
    parser.add_argument("--part", action="append", choices=list(PARTS))
    parser.add_argument("--only", type=_regex, default="")
    parser.add_argument("--again", action="store_true")
    parser.add_argument("--out", type=Path, default=RESULTS)
    parser.add_argument("--show", action="store_true")
    parser.add_argument("--predict", action="store_true")
    return parser


if __name__ == "__main__":
    try:
        sys.exit(main(sys.argv[1:]))
    except AdvisorError as error:
        sys.stderr.write(f"error: {error}\n")
        sys.exit(2)
