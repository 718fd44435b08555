"""`python -m tests.benchmarks.growth`: measure, write `tests/validation/growth.json`, and print.

    --only WORDS      curves and models whose name has these words (may be given again)
    --again           measure what the report knows, too
    --minutes N       begin nothing new after so many (60)
    --show            print the report, and measure nothing
    --out FILE        tests/validation/growth.json unless named

What the report knows is left out, so that a run that was stopped goes on; it is written after each
size. Each size is a process of its own, which may take five minutes; larger sizes of a curve that
failed or took longer are left out too. The picture beside the report is drawn from it. The exit
status is 1 if a mark is missed.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import resource
import subprocess
import sys
import time
from collections.abc import Iterator
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path

from tests.benchmarks.growth.curves import CURVES, Curve
from tests.benchmarks.growth.picture import draw
from tests.benchmarks.growth.results import REPORT, Point, Report, exponent
from tests.benchmarks.planning_time import HELP, PROCESSES, Process, used_by

LIMIT_S = 300.0
MOST_HELP_S = 0.3
"""Of `advise --help`, by the clock: a person waits."""
SMALL_MIB = 100.0
"""Memory whose growth nobody would feel."""
_LEFT_OUT = "a smaller size failed or took too long"


def main(arguments: list[str]) -> int:
    options = _parser().parse_args(arguments)
    if options.point:
        print(measured(*options.point).model_dump_json())
        return 0
    if not options.show:
        _measure(options)
        draw(Report.load(options.out), options.out.with_suffix(".svg"))
    report = Report.load(options.out)
    lines = missed(report)
    print("\n".join([*_table(report), "", *(lines or ["every mark is met"])]))
    return 1 if lines else 0


def _measure(options: argparse.Namespace) -> None:
    report = Report(measured_at="", machine="", torch="")
    if options.out.exists():
        report = Report.load(options.out)
    end = time.monotonic() + 60 * options.minutes
    for job in _jobs(options.only):
        key, at = (job[0].key, job[1]) if isinstance(job, tuple) else (job.name, 1.0)
        if report.knows(key, at) and not options.again:
            continue
        if time.monotonic() > end:
            print(f"{options.minutes:g} minutes are over; started again, the rest is measured")
            return
        if any(p.left_out for p in report.of(key) if p.at < at):
            point = Point(curve=key, at=at, left_out=_LEFT_OUT)
        else:
            point = _apart(*job) if isinstance(job, tuple) else _process(job)
        others = tuple(p for p in report.points if (p.curve, p.at) != (key, at))
        report = Report(
            measured_at=datetime.now(UTC).isoformat(timespec="minutes"),
            machine=f"{platform.machine()}, {len(os.sched_getaffinity(0))} cores",
            torch=version("torch"),
            points=(*others, point),
        )
        report.save(options.out)
        print(f"{key} {at:,.0f}: {_line(point)}", flush=True)


def _jobs(only: list[str] | None) -> Iterator[tuple[Curve, float] | Process]:
    """Sizes of curves, smallest first, and whole processes."""

    def is_wanted(name: str) -> bool:
        return not only or any(words in name for words in only)

    for curve in CURVES:
        if is_wanted(curve.key):
            yield from ((curve, size) for size in curve.sizes)
    yield from (process for process in PROCESSES if is_wanted(process.name))


def _apart(curve: Curve, at: float) -> Point:
    """One size, in a process of its own."""
    command = [sys.executable, "-m", "tests.benchmarks.growth", "--point", curve.key, str(at)]
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    try:
        run = subprocess.run(
            command, capture_output=True, text=True, timeout=LIMIT_S, env=environment
        )
    except subprocess.TimeoutExpired:
        return Point(curve=curve.key, at=at, left_out=f"more than {LIMIT_S:.0f} s")
    if run.returncode:
        said = (run.stderr.strip().splitlines() or [f"exit code {run.returncode}"])[-1]
        return Point(curve=curve.key, at=at, left_out=said[:200])
    return Point.build(json.loads(run.stdout.splitlines()[-1]))


def measured(key: str, size: str) -> Point:
    """In this process; memory is that of this process, or of the largest that it started."""
    curve = next(curve for curve in CURVES if curve.key == key)
    piece = curve.prepare(round(float(size)))
    Path("/proc/self/clear_refs").write_text("5")  # a new maximum from here on
    held_kib = _status_kib("VmRSS")
    began, cpu_s = time.perf_counter(), _cpu_s()
    about = piece()
    seconds, cpu_s = time.perf_counter() - began, _cpu_s() - cpu_s
    children_kib = resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss
    return Point(
        curve=key,
        at=float(size),
        cpu_s=round(cpu_s, 4),
        seconds=round(seconds, 4),
        host_mib=round((children_kib or _status_kib("VmHWM") - held_kib) / 1024, 2),
        about=about,
    )


def _status_kib(name: str) -> int:
    text = Path("/proc/self/status").read_text()
    return next(int(line.split()[1]) for line in text.splitlines() if line.startswith(f"{name}:"))


def _cpu_s() -> float:
    of_children = resource.getrusage(resource.RUSAGE_CHILDREN)
    return time.process_time() + of_children.ru_utime + of_children.ru_stime


def _process(process: Process) -> Point:
    try:
        used = used_by(process, limit_s=LIMIT_S)
    except RuntimeError as error:
        return Point(curve=process.name, at=1, left_out=str(error)[:200])
    return Point(
        curve=process.name,
        at=1,
        cpu_s=round(used.cpu_s, 3),
        seconds=round(used.seconds, 3),
        host_mib=round(used.peak_mib, 1),
        about=f"first line after {used.first_line_s:.2f} s",
    )


def _line(point: Point) -> str:
    if point.left_out:
        return f"left out: {point.left_out}"
    return (
        f"{point.cpu_s:8.3f} s of processor {point.seconds:8.3f} s {point.host_mib:8.1f} MiB"
        f"  {point.about}"
    )


def _table(report: Report) -> Iterator[str]:
    yield f"{report.machine}, torch {report.torch}, {report.measured_at}"
    for curve in CURVES:
        points = report.of(curve.key)
        if not points:
            continue
        grows = [_grows(name, exponent(points, name)) for name in ("cpu_s", "host_mib")]
        yield f"\n{curve.key}: {'; '.join(grows)}" if curve.against else f"\n{curve.key}"
        yield from (f"{point.at:15,.0f} {_line(point)}" for point in points)
    yield "\nadvise, whole processes"
    for process in PROCESSES:
        yield from (f"{point.curve:18} {_line(point)}" for point in report.of(process.name))


def _grows(name: str, slope: float | None) -> str:
    what = {"cpu_s": "time", "host_mib": "memory"}[name]
    return f"{what} grows by power {slope:.2f}" if slope is not None else f"{what}: too few sizes"


def missed(report: Report) -> list[str]:
    """The marks that the report misses, in words."""
    lines = []
    for curve in CURVES:
        points = report.of(curve.key)
        for point in points:
            if point.left_out:
                lines.append(f"{curve.key} {point.at:,.0f}: {point.left_out}")
            elif point.at == curve.marked and point.cpu_s > curve.most_s:
                lines.append(f"{curve.key} {point.at:,.0f}: {point.cpu_s} s > {curve.most_s} s")
            elif point.at == curve.marked and point.host_mib > curve.most_mib:
                lines.append(f"{curve.key}: {point.host_mib} MiB > {curve.most_mib} MiB")
        for name in ("cpu_s", "host_mib"):
            slope = exponent(points, name)
            is_felt = name == "cpu_s" or any(point.host_mib > SMALL_MIB for point in points)
            if slope is not None and slope > curve.most_exponent and is_felt:
                lines.append(f"{curve.key}: {_grows(name, slope)} > {curve.most_exponent}")
    for process in PROCESSES:
        for point in report.of(process.name):
            if point.left_out:
                lines.append(f"advise {point.curve}: {point.left_out}")
            elif process.name == HELP and point.seconds > MOST_HELP_S:
                lines.append(f"advise --help: {point.seconds} s > {MOST_HELP_S} s")
    return [f"missed: {line}" for line in lines]


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m tests.benchmarks.growth")
    parser.add_argument("--only", action="append", metavar="WORDS")
    parser.add_argument("--again", action="store_true")
    parser.add_argument("--minutes", type=float, default=60.0, metavar="N")
    parser.add_argument("--show", action="store_true")
    parser.add_argument("--out", type=Path, default=REPORT, metavar="FILE")
    parser.add_argument("--point", nargs=2, help=argparse.SUPPRESS)
    return parser


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
