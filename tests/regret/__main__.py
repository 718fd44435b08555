"""`python -m tests.regret`: time every legal plan of some cases, and our choice among them.

    --quick            four cases of different kinds, under ten minutes
    --only NAME        these cases (may be given again), as `--list` names them
    --minutes N        begin no case that would not end within N minutes
    --plans N          run at most so many plans of a case (40)
    --again            run cases anew that FILE has; else they are left out
    --list             name the cases
    --show             print the table of FILE, as predicted and measured then
    --repriced         the same, as predicted by today's code from the benches of then
    --out FILE         tests/validation/regret.json unless named; other cases of it stay

Cases across nodes want root, `ip` and `tc` (tests/namespaces.py); without them they are left out,
with the reason. Clocks are compared: let nothing else run.
"""

from __future__ import annotations

import argparse
import os
import platform
import sys
import time
from pathlib import Path

import torch

from tests.namespaces import why_not
from tests.regret.cases import CASES, MACHINES, QUICK
from tests.regret.launch import run_case
from tests.regret.picked import MOST
from tests.regret.report import REPORT, Report, table
from tests.regret.repriced import repriced

CASE_S, QUICK_S = 170.0, 70.0
"""For the plans of a case."""
START_S = 50.0
"""Imports, bench and decision."""
QUICK_PLANS = 16


def main() -> int:
    given = _parser().parse_args()
    if given.list:
        _say("\n".join(CASES))
        return 0
    report = Report.load(given.out) if given.out.exists() else Report()
    if not (given.show or given.repriced):
        report = _run(report, given)
    _say(table(repriced(report) if given.repriced else report))
    return 0 if report.results else 1


def _run(report: Report, given: argparse.Namespace) -> Report:
    names = given.only or (QUICK if given.quick else tuple(CASES))
    seconds = QUICK_S if given.quick else CASE_S
    began, lacked = time.monotonic(), why_not()
    machine = f"{len(os.sched_getaffinity(0))} cores {platform.machine()}"
    report = report.model_copy(update={"machine": machine, "torch": torch.__version__})
    for number, name in enumerate(names, 1):
        case = CASES[name]
        head = f"[{number}/{len(names)}] {name}"
        if report.result(name) and not given.again:
            _say(f"{head}: known")
            continue
        if MACHINES[case.machines].nodes > 1 and lacked:
            _say(f"{head}: left out: {lacked}")
            continue
        passed = time.monotonic() - began
        if given.minutes and passed + seconds + START_S > 60 * given.minutes:
            _say(f"{head}: left for another run, {passed / 60:.0f} minutes have passed")
            continue
        _say(f"{head} ({passed / 60:.0f} minutes have passed)")
        most = given.plans or (QUICK_PLANS if given.quick else MOST)
        try:
            result = run_case(case, seconds=seconds, most=most)
            report = report.having(result, list(CASES))
            _say(f"{head}: regret {result.regret:.1%}, noise {result.noise:.1%}")
        except RuntimeError as error:
            report = report.broke(name, str(error))
            _say(f"{head}: not run: {error}")
        report.save(given.out)
    return report


def _say(text: str) -> None:
    sys.stdout.write(f"{text}\n")
    sys.stdout.flush()


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m tests.regret",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--only", action="append", choices=list(CASES), metavar="NAME")
    parser.add_argument("--minutes", type=float)
    parser.add_argument("--plans", type=int)
    parser.add_argument("--again", action="store_true")
    parser.add_argument("--list", action="store_true")
    parser.add_argument("--show", action="store_true")
    parser.add_argument("--repriced", action="store_true")
    parser.add_argument("--out", type=Path, default=REPORT)
    return parser


if __name__ == "__main__":
    sys.exit(main())
