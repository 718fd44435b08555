"""`python -m tests.fuzz_modules`: random modules under plans; the exit status is 1 if any fails.

--seed N              of the first program (0); each takes the next
--programs K          as many (2,000)
--plan PLAN           this one (may be given again); else data parallel, ZeRO-3, tensor, pipeline
--only SEED           this program, with its model; --without N,M leaves out blocks of it
--block NAME          blocks in place of those that are drawn (may be given again)
--shrink              make programs that fail smaller before they are printed
--out FILE            where counts are kept; tests/validation/fuzz_modules.json for the long run.
                      A run that was stopped goes on there, after what went wrong in it
--show                print the counts of FILE
"""

from __future__ import annotations

import argparse
import sys
import time
from pathlib import Path

import torch

from engines.plan import Plan
from tests.fuzz_modules.program import BLOCKS, Program
from tests.fuzz_modules.results import REPORT, Case, FuzzedModules
from tests.fuzz_modules.run import PLANS, cases_of, is_right, shrunk, start
from tests.workers import Pool

FULL = 2000
SAVED_EVERY = 50
"""Programs: a run that is broken off leaves the counts of those before."""


def main(arguments: list[str]) -> int:
    given = _parser().parse_args(arguments)
    if given.show:
        _say(_table(FuzzedModules.load(given.out or REPORT)))
        return 0
    plans, without = given.plan or list(PLANS), frozenset(given.without)
    is_long = given.programs >= FULL and given.only is None and not (given.block or given.plan)
    out = given.out or (REPORT if is_long else None)
    before = FuzzedModules(torch=torch.__version__, seed=given.seed, programs=0, plans=())
    if given.only is not None:
        runs = [(Program(given.only, without, tuple(given.block)), plans)]
        _say(f"{runs[0][0]}\n{runs[0][0].build()}")
    else:
        if out is not None and out.exists():
            known = FuzzedModules.load(out)
            is_same = (known.torch, known.seed) == (before.torch, before.seed)
            is_same &= [counts.plan for counts in known.plans] == plans and not given.block
            before = known if is_same else before
        blocks = tuple(given.block)
        runs = [(Program(case.seed, only=blocks), [case.plan]) for case in before.wrong]
        seeds = range(given.seed + before.programs, given.seed + given.programs)
        runs += [(Program(seed, only=blocks), plans) for seed in seeds]
    report, cases = before, list[Case]()
    pool = Pool(max(Plan.parse(plan).world_size for plan in plans))
    began = time.monotonic()
    try:
        start(pool)
        for number, (program, columns) in enumerate(runs, 1):
            for case in cases_of(program, columns, pool):
                cases.append(case)
                if not is_right(case) or given.only is not None:
                    _say(_said(case, program, pool if given.shrink else None))
            if number % SAVED_EVERY == 0 or number == len(runs):
                done = before.programs + max(0, number - len(before.wrong))
                _say(f"-- {done} programs, {time.monotonic() - began:.0f} s")
                report = before.with_cases(cases, programs=done)
                if out is not None:
                    report.save(out)
    finally:
        pool.close()
    _say(_table(report))
    return 1 if report.wrong else 0


def _said(case: Case, program: Program, pool: Pool | None) -> str:
    if pool is not None and not is_right(case):
        program = shrunk(program, case, pool)
    return f"{case.outcome} under {case.plan} ({program.again})\n  {program}\n  {case.text}"


def _table(report: FuzzedModules) -> str:
    lines = [f"{report.programs} programs from seed {report.seed}, torch {report.torch}"]
    for counts in report.plans:
        said = ", ".join(f"{n} {outcome}" for outcome, n in counts.outcomes.items())
        lines.append(f"{counts.plan}: {said}")
        lines += [f"    {n} x {cause}" for cause, n in counts.refusals.items()]
    return "\n".join(lines)


def _numbers(text: str) -> list[int]:
    return [int(part) for part in text.split(",")]


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--programs", type=int, default=FULL)
    parser.add_argument("--plan", action="append")
    parser.add_argument("--only", type=int)
    parser.add_argument("--without", type=_numbers, default=[])
    parser.add_argument("--block", action="append", default=[], choices=sorted(BLOCKS))
    parser.add_argument("--shrink", action="store_true")
    parser.add_argument("--out", type=Path)
    parser.add_argument("--show", action="store_true")
    return parser


def _say(text: str) -> None:
    sys.stdout.write(f"{text}\n")
    sys.stdout.flush()


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
