"""`python -m tests.soak`: kill trainings and saves, and keep what came of it.

    --plan NAME        these plans (may be given again); else all six
    --kills N          of ranks and launchers in each training (25)
    --steps N          of each training (300)
    --seed N           of the times and the victims (0)
    --quick            one plan on two ranks, 60 steps, 3 kills; nothing is written
    --crash-points     break saves off at every file event instead
    --load             10,000 decisions, 200 saves, 2,000 steps on 8 ranks: is anything left over?
    --pairs            save under each plan, on one rank and two besides, and go on under each other
    --waits            let one rank stop, raise, end ... under each plan: when do the others end?
    --fault NAME       these faults (may be given again); else all
    --again            pairs and faults that FILE has too
    --out FILE         tests/validation/soak.json unless named; other parts of it stay
    --show             print the table of FILE

The exit status is 1 where a training or a load differs from what it should be.
"""

from __future__ import annotations

import argparse
import os
import platform
import shutil
import sys
import tempfile
from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path

import torch

from tests.soak.crash_points import crash_points
from tests.soak.faults import FAULTS
from tests.soak.killing import soaked
from tests.soak.load import PARTS
from tests.soak.pairs import ALL, paired
from tests.soak.report import REPORT, PlanPair, Report, Wait, table
from tests.soak.training import PLANS
from tests.soak.waits import every_wait

QUICK = {"zero3": "dp_shard=2"}


def main() -> int:
    given = _parser().parse_args()
    report = Report.load(given.out) if given.out.exists() and not given.quick else Report()
    if given.show:
        _say(table(report))
        return 0
    report = report.model_copy(
        update={
            "measured_at": datetime.now(UTC).isoformat(timespec="minutes"),
            "machine": f"{platform.machine()}, {len(os.sched_getaffinity(0))} cores",
            "torch": torch.__version__,
            "seed": given.seed,
        }
    )
    folder = Path(tempfile.mkdtemp(prefix="soak-"))
    plans = QUICK if given.quick else {name: PLANS[name] for name in given.plan or PLANS}
    parts = list(plans)
    if given.crash_points or given.load or given.pairs or given.waits:
        parts = ["crash points"] * given.crash_points + ["load"] * given.load
        parts += ["pairs"] * given.pairs + ["waits"] * given.waits
    for part in parts:
        if part == "pairs":
            for pair in _pairs(report, given, folder / "pairs"):
                report = report.with_pair(pair, order=list(ALL))
                if not given.quick:
                    report.save(given.out)
        elif part == "waits":
            for wait in _waits(report, given, plans, folder / "waits"):
                report = report.with_wait(wait, order=[*PLANS])
                if not given.quick:
                    report.save(given.out)
        elif part == "load":
            repeated = tuple(
                each(count // (100 if given.quick else 1), folder / name)
                for name, (each, count) in PARTS.items()
            )
            report = report.model_copy(update={"repeated": repeated})
        elif part == "crash points":
            points = tuple(crash_points(ranks, folder / str(ranks)) for ranks in (1, 2))
            report = report.model_copy(update={"crash_points": points})
        else:
            result = soaked(
                part,
                plans[part],
                folder=folder / part,
                steps=60 if given.quick else given.steps,
                save_every=10,
                kills=3 if given.quick else given.kills,
                seed=given.seed,
            )
            others = [each for each in report.trainings if each.name != part]
            order = [*PLANS]
            every = sorted([*others, result], key=lambda each: order.index(each.name))
            report = report.model_copy(update={"trainings": tuple(every)})
            shutil.rmtree(folder / part)
        if not given.quick:
            report.save(given.out)
    _say(table(report))
    shutil.rmtree(folder)
    return 1 if report.differences else 0


def _pairs(report: Report, given: argparse.Namespace, folder: Path) -> Iterator[PlanPair]:
    saved = ["two"] if given.quick else given.plan or list(ALL)
    loaded = ["one"] if given.quick else list(ALL)
    return paired(saved, loaded, folder, () if given.again else report.pairs)


def _waits(
    report: Report, given: argparse.Namespace, plans: dict[str, str], folder: Path
) -> Iterator[Wait]:
    faults = ["raises"] if given.quick else given.fault or list(FAULTS)
    return every_wait(plans, folder, () if given.again else report.waits, faults=faults)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--plan", action="append", choices=list(PLANS))
    parser.add_argument("--kills", type=int, default=25)
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--crash-points", action="store_true")
    parser.add_argument("--load", action="store_true")
    parser.add_argument("--pairs", action="store_true")
    parser.add_argument("--waits", action="store_true")
    parser.add_argument("--fault", action="append", choices=list(FAULTS))
    parser.add_argument("--again", action="store_true")
    parser.add_argument("--out", type=Path, default=REPORT)
    parser.add_argument("--show", action="store_true")
    return parser


def _say(text: str) -> None:
    sys.stdout.write(f"{text}\n")


if __name__ == "__main__":
    sys.exit(main())
