"""The loop: cases by part within a time, each result saved as soon as it is there."""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import torch

from engines.runtime.world import leave_world
from profiles.machine.bench import bench, launch_time
from profiles.machine.cluster import ClusterProfile
from profiles.timing.stopwatch import processor_name
from profiles.torch_compat import forget_groups
from tests.gpu import (
    branches,
    curve,
    eight_bits,
    exactness,
    gains,
    host_work,
    kernels,
    one_rank,
    ranks,
    step_kernels,
    training,
)
from tests.gpu.case import Case
from tests.gpu.results import CaseResult, Outcome, Results, Row
from tests.gpu.setting import LeftOutError, Setting, setting_here
from tests.gpu.worker import Worker, WorkerError

PARTS = {
    "a": "exactness",
    "b": "bench",
    "c": "training",
    "d": "one rank",
    "e": "gains",
    "f": "kernels",
}
SHARES = {"a": 0.25, "b": 0.12, "c": 0.25, "d": 0.16, "e": 0.14, "f": 0.08}
"""Of the time, where all parts are run; what one leaves is there for the next."""
BENCH = "the bench that predictions rest on"
BENCH_S, SMALL_BENCH_S = 12.0, 0.2
LAUNCHES_S = 0.5
LEFT_BYTES = 2**30  # that a case may leave on the device; else the next begins in a new process
MOST_TEXT = 1500
SLOWEST_START_S = 90.0  # of a process: torch, a context
_SPOILED = (
    "CUDA error",
    "device-side assert",
    "cudaError",
    "NCCL",
    "CUBLAS_STATUS",
    "out of memory",
)
"""In the text of an error after which a process may be of no use."""


def cases_of(part: str, *, is_small: bool) -> list[Case]:
    """Most telling first."""
    match part:
        case "a":
            exact = exactness.cases(is_small=is_small)
            further = branches.cases(is_small=is_small)
            fp8 = eight_bits.exactness_cases(is_small=is_small)
            return [*exact, *fp8, *further, *ranks.cases(is_small=is_small)]
        case "b":
            timed = Case(BENCH, _bench, is_small=True)
            alone = kernels.bench_cases(is_small=is_small)
            return [timed, *alone, *host_work.cases(is_small=is_small)]
        case "c":
            return training.cases(is_small=is_small)
        case "d":
            return one_rank.cases(is_small=is_small)
        case "e":
            return [*gains.cases(is_small=is_small), *eight_bits.gain_cases(is_small=is_small)]
        case "f":
            return [
                *kernels.curve_cases(is_small=is_small),
                *step_kernels.cases(is_small=is_small),
            ]
    raise ValueError(part)


def _bench(setting: Setting) -> Sequence[Row]:
    """Rows are those of the device; the whole of it is kept with the results."""
    timed = bench(setting.sheet, budget_s=SMALL_BENCH_S if setting.is_small else BENCH_S * 5)
    _TIMED.append(timed)
    return list(kernels.device_rows(setting.with_bench(timed)))


_TIMED: list[ClusterProfile] = []


def run_case(
    part: str, name: str, timed: ClusterProfile | None, launch_s: float | None = None
) -> tuple[CaseResult, bool]:
    """One case, in this process; and True if another one is better taken for the next.

    `launch_s`: of this host, where the bench is of another one.

    Nothing that it raises comes through.
    """
    if not name.startswith(ranks.POOLED):
        ranks.close_pools()
    setting = setting_here(bench=timed).with_launches(launch_s)
    case = next(c for c in cases_of(part, is_small=setting.is_small) if c.name == name)
    began, rows = time.monotonic(), []
    outcome, text, spoiled = Outcome.MEASURED, "", False
    try:
        for row in case.run(setting):
            rows.append(row)
        if any(row.is_beyond for row in rows):
            outcome = Outcome.DIFFERED
    except LeftOutError as error:
        outcome, text = Outcome.LEFT_OUT, str(error)
    except Exception as error:
        outcome, text = Outcome.FAILED, f"{type(error).__name__}: {error}".strip()[:MOST_TEXT]
        spoiled = any(word in text for word in _SPOILED)
    try:
        leave_world()
        forget_groups()
        setting.release()
    except RuntimeError as error:  # of a device that an earlier kernel spoilt
        text, spoiled = text or f"after it: {error}"[:MOST_TEXT], True
    if setting.is_cuda and not spoiled:
        spoiled = torch.cuda.memory_allocated(setting.device) > LEFT_BYTES
    seconds = round(time.monotonic() - began, 2)
    result = CaseResult(
        part=part,
        name=name,
        outcome=outcome,
        rows=tuple(rows),
        seconds=seconds,
        text=text,
        launch_s=launch_s,
    )
    return result, spoiled


def launches_here() -> float:
    """Seconds of a kernel's launch on this host."""
    return launch_time(setting_here().device, seconds=LAUNCHES_S)


def timed_here() -> ClusterProfile | None:
    """The machine as the case `BENCH` timed it in this process."""
    return _TIMED.pop() if _TIMED else None


def device_here() -> tuple[str, str, bool]:
    """Name of the device, version of torch, and whether there is no GPU."""
    setting = setting_here()
    return processor_name(setting.device), torch.__version__, setting.is_small


@dataclass(slots=True)
class Run:
    """Cases that are left, within a time.

    Attributes:
        parts: in their order.
        minutes: for all of it.
        out: None keeps nothing.
        again: run what was measured before, too.
        only: a regular expression; cases whose name it is not found in are left for another run.
        says: called with a line for each case.
    """

    parts: Sequence[str]
    minutes: float
    out: Path | None
    again: bool = False
    only: str = ""
    says: Callable[[str], None] = print
    in_process: bool = False
    worker: Worker = field(default_factory=Worker)
    _launch_s: float | None = None  # where the bench is of an earlier run, on another host

    def results(self) -> Results:
        """Run, and give what there is then; an interrupt leaves what was saved."""
        began = time.monotonic()
        device, version, is_small = self._call(device_here, timeout_s=SLOWEST_START_S)
        results = Results(device=device, torch=version, is_small=is_small)
        if self.out is not None and self.out.exists():
            before = Results.load(self.out)
            if (before.device, before.is_small) == (device, is_small):
                results = before.model_copy(update={"torch": version})
        done = set() if self.again else results.done()
        if results.bench is not None:
            self._launch_s = self._call(launches_here, timeout_s=SLOWEST_START_S)
        try:
            for number, part in enumerate(self.parts):
                ends = began + 60 * self.minutes * self._share_until(number)
                results = self._part(part, results, ends, done)
        finally:
            self.worker.close()
        return results

    def _share_until(self, number: int) -> float:
        shares = [SHARES[part] for part in self.parts]
        return sum(shares[: number + 1]) / sum(shares)

    def _part(
        self, part: str, results: Results, ends: float, done: set[tuple[str, str]]
    ) -> Results:
        every = cases_of(part, is_small=results.is_small)
        every = [case for case in every if re.search(self.only, case.name)]
        if part != "b" and results.bench is None:
            every = [*cases_of("b", is_small=results.is_small)[:1], *every]
        tried = {(result.part, result.name) for result in results.cases}
        places = {case.name: ("b" if case.name == BENCH else part, case.name) for case in every}
        # Those that failed before come last.
        for case in sorted(every, key=lambda case: places[case.name] in tried):
            place, left_s = places[case.name], ends - time.monotonic()
            if place in done:
                continue
            done.add(place)
            if left_s < 2 and not results.is_small:
                self.says(f"({part}) the time is up before `{case.name}`")
                break
            results = self._case(case, place, results, left_s)
            self._save(results)
        return results

    def _case(self, case: Case, place: tuple[str, str], results: Results, left_s: float) -> Results:
        limit_s = case.limit_s if results.is_small else min(case.limit_s, left_s + 5)
        part, name = place
        try:
            result, spoiled = self._call(
                run_case, part, name, results.bench, self._launch_s, timeout_s=limit_s + 10
            )
            if name == BENCH and result.outcome is Outcome.MEASURED:
                timed, self._launch_s = self._call(timed_here, timeout_s=10), None
                results = results.with_bench(timed)
            if spoiled:
                self.worker.close()
        except WorkerError as error:
            result = CaseResult(part=part, name=name, outcome=Outcome.FAILED, text=str(error))
            self.worker.close()
        self.says(f"({part}) {name}: {said(result)}")
        return results.with_case(result)

    def _call(self, function: Callable[..., object], *args: object, timeout_s: float) -> object:
        if self.in_process:
            return function(*args)
        return self.worker.call(function, *args, timeout_s=timeout_s)

    def _save(self, results: Results) -> None:
        if self.out is not None:
            self.out.parent.mkdir(parents=True, exist_ok=True)
            results.save(self.out)
            curve.write(results, self.out.parent)


def said(result: CaseResult) -> str:
    """Outcome, and the first line of its text."""
    words = f"{result.outcome}, {len(result.rows)} rows, {result.seconds:.1f} s"
    return f"{words}: {result.text.splitlines()[0]}" if result.text else words
