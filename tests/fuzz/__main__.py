"""`python -m tests.fuzz`: hostile files for every reader; the exit status is 1 for any finding.

--reader NAME      this one (may be given again); else all, each in a process of its own
--cases N          of each reader (100,000)
--seconds N        of each reader, at most
--seed N           of all cases (0)
--keep FOLDER      leave the first input of each finding here
--out FILE         where results are kept; tests/validation/fuzz.json for all cases of all readers
--show             print the table of FILE
--list             print the names of the readers
"""

from __future__ import annotations

import argparse
import json
import math
import os
import platform
import resource
import subprocess
import sys
import tempfile
from datetime import UTC, datetime
from pathlib import Path

from profiles.units import GIB, MIB
from tests.fuzz.readers import readers
from tests.fuzz.runner import REPORT, Report, Result, fuzzed
from tests.fuzz.saves import clean

FULL = 100_000
ROOM_BYTES = 24 * GIB
"""Of addresses: a case that wants more ends in a MemoryError, not in the machine's swap."""


def main() -> int:
    given = _parser().parse_args()
    if given.show:
        _say(_table(Report.load(given.out or REPORT)))
        return 0
    names = [reader.name for reader in readers()]
    if given.list:
        _say("\n".join(names))
        return 0
    if given.one:
        return _one(given)
    results = []
    for name in given.reader or names:
        results.append(_in_process_of_its_own(name, given))
        _say(_line(results[-1]))
    import torch

    report = Report(
        measured_at=datetime.now(UTC).isoformat(timespec="minutes"),
        machine=f"{platform.machine()}, {len(os.sched_getaffinity(0))} cores",
        python=platform.python_version(),
        torch=torch.__version__,
        seed=given.seed,
        results=tuple(results),
    )
    if given.out is not None or (not given.reader and given.cases >= FULL):
        report.save(given.out or REPORT)
    _say(_table(report).splitlines()[-1])
    return 1 if any(result.findings for result in results) else 0


def _in_process_of_its_own(name: str, given: argparse.Namespace) -> Result:
    command = [sys.executable, "-m", "tests.fuzz", "--one", "--reader", name]
    command += ["--cases", str(given.cases), "--seed", str(given.seed)]
    command += ["--seconds", str(given.seconds)]
    command += ["--keep", str(given.keep)] if given.keep else []
    ended = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=False)
    if ended.returncode:
        what = f"the process ended with {ended.returncode}"
        return Result(
            reader=name,
            cases=given.cases,
            accepted=0,
            refused=0,
            slowest_s=0.0,
            largest_bytes=0,
            findings={what: 1},
        )
    return Result.build(_last_object(ended.stdout))


def _last_object(text: str) -> object:
    return json.loads(text.strip().splitlines()[-1])


def _one(given: argparse.Namespace) -> int:
    (name,) = given.reader
    resource.setrlimit(resource.RLIMIT_AS, (ROOM_BYTES, resource.RLIM_INFINITY))
    reader = next(reader for reader in readers() if reader.name == name)
    with tempfile.TemporaryDirectory(prefix="fuzz-") as folder:
        result = fuzzed(
            reader,
            cases=given.cases,
            seed=given.seed,
            folder=Path(folder),
            keep=given.keep,
            seconds=given.seconds,
        )
    clean()
    _say(result.model_dump_json())
    return 0


def _table(report: Report) -> str:
    cases = sum(result.cases for result in report.results)
    findings = sum(sum(result.findings.values()) for result in report.results)
    head = f"{report.machine}, Python {report.python}, torch {report.torch}, {report.measured_at}"
    total = f"{cases:,} cases, seed {report.seed}: {findings} findings"
    return "\n".join([head, *map(_line, report.results), total])


def _line(result: Result) -> str:
    said = (
        f"{result.reader:18} {result.cases:7,} cases: {result.accepted:7,} read,"
        f" {result.refused:7,} refused; at most {result.slowest_s:.2f} s and"
        f" {result.largest_bytes / MIB:.0f} MiB"
    )
    return "\n".join([said, *(f"    {n} x {what}" for what, n in result.findings.items())])


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--reader", action="append")
    parser.add_argument("--cases", type=int, default=FULL)
    parser.add_argument("--seconds", type=float, default=math.inf)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--keep", type=Path)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--show", action="store_true")
    parser.add_argument("--list", action="store_true")
    parser.add_argument("--one", action="store_true", help=argparse.SUPPRESS)
    return parser


def _say(text: str) -> None:
    sys.stdout.write(f"{text}\n")
    sys.stdout.flush()


if __name__ == "__main__":
    sys.exit(main())
