"""`python -m tests.mutants`: change the library in 200 places, and see that a test fails in each.

    --count N      mutants (200)
    --seed N       of the places (0)
    --workers N    trees that are tested side by side (2)
    --show         print what survived
    --again N ...  survivors to be tried once more, by the tests that follow
    --by TEST ...  a test that was written since, or one of another folder

Every mutant stands alone in a copy of the tree. Tests of its file are run first, then those that
import it and those of its folder, then the contracts; a test elsewhere may kill a survivor yet. A
test kills if it fails twice, and not in an unchanged copy. What is kept in
tests/validation/mutants.json is not tested again; survivors that compute the same have the reason
there, by hand. Needs `cosmic-ray` (`make mutants` installs it).
"""

from __future__ import annotations

import argparse
import contextlib
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from pathlib import Path
from queue import Queue
from typing import IO

from profiles.record import Document, Record

ROOT = Path(__file__).resolve().parents[2]
REPORT = ROOT / "tests/validation/mutants.json"
MOST_S = 300.0
"""Of a test, several times the longest; a mutant whose test does not end is killed by it."""
MOST_USERS = 8
"""Files of tests elsewhere that import the mutated one, to be run too; others are used by all."""


class Result(Record):
    """The end of a mutant.

    Attributes:
        killed_by: the test that failed or did not end; the first file of tests that could not
            begin; empty if all passed.
        why_equal: a reason why it computes the same as the code it was made of, by hand.
    """

    number: int
    path: str
    operator: str
    diff: str
    killed_by: str = ""
    why_equal: str = ""

    def mutated(self, text: str) -> str:
        """`text` of the file of today with the lines of `diff` changed.

        Raises:
            ValueError: they are not there any more, or several times.
        """
        lines = self.diff.splitlines()
        old, new = ("\n".join(x[1:] for x in lines if x.startswith(sign)) for sign in "-+")
        if f"\n{text}".count(f"\n{old}\n") != 1:
            raise ValueError(f"mutant {self.number}: {self.path} has not these lines once: {old}")
        return f"\n{text}".replace(f"\n{old}\n", f"\n{new}\n").removeprefix("\n")


class Report(Document):
    schema_version: int = 1
    seed: int = 0
    results: tuple[Result, ...] = ()


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, add_help=True)
    parser.add_argument("--count", type=int, default=200)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--show", action="store_true")
    parser.add_argument("--again", type=int, nargs="+", default=[])
    parser.add_argument("--by", nargs="+", default=[])
    given = parser.parse_args()
    report = Report.load(REPORT) if REPORT.exists() else Report()
    if bool(given.again) is not bool(given.by):
        parser.error("--again says which mutants, --by the tests: give both")
    if unknown := set(given.again) - {each.number for each in report.results}:
        parser.error(f"{REPORT.name} has no mutant {min(unknown)}")
    if given.again:
        report = _tried_again(report, given.again, given.by)
    elif not given.show:
        report = _measured(report, given.seed, given.count, given.workers)
    survived = [each for each in report.results if not each.killed_by]
    for each in survived:
        sys.stdout.write(f"{each.number} {each.path} {each.operator} {each.why_equal}\n")
        sys.stdout.write(f"{each.diff}\n")
    total, equal = len(report.results), sum(bool(each.why_equal) for each in survived)
    sys.stdout.write(
        f"{len(survived)} of {total} mutants survived (seed {report.seed}), {equal} of them compute"
        " the same\n"
    )
    return 0


def _tried_again(report: Report, numbers: Sequence[int], tests: list[str]) -> Report:
    with tempfile.TemporaryDirectory(prefix="mutants-") as folder:
        tree = _copy(Path(folder) / "0")
        if fails_always := _failed(tree, tests):
            raise SystemExit(f"these fail in an unchanged copy: {fails_always}")
        for each in [one for one in report.results if one.number in numbers]:
            text = (ROOT / each.path).read_text()
            (tree / each.path).write_text(each.mutated(text))
            failed = _failed(tree, ["-x", *tests])
            is_killed = bool(failed and _failed(tree, failed[:1]))
            (tree / each.path).write_text(text)
            if is_killed:
                killed = each.model_copy(update={"killed_by": failed[0]})
                results = tuple(killed if one is each else one for one in report.results)
                report = report.model_copy(update={"results": results})
                report.save(REPORT)
    return report


def _measured(report: Report, seed: int, count: int, workers: int) -> Report:
    from tests.mutants.sample import Mutant, sampled

    if report.seed != seed:
        report = Report(seed=seed)
    done = {each.number for each in report.results}
    trees: Queue[Path] = Queue()
    with tempfile.TemporaryDirectory(prefix="mutants-") as folder:
        for number in range(workers):
            trees.put(_copy(Path(folder) / str(number)))

        def test(number: int, mutant: Mutant) -> Result:
            tree = trees.get()
            try:
                (tree / mutant.path).write_text(mutant.text)
                failed = (_failed(tree, ["-x", *tests]) for tests in _stages(mutant.path) if tests)
                twice = (each[0] for each in failed if each and _failed(tree, each[:1]))
                killed_by = next(twice, "")
                shutil.copy(ROOT / mutant.path, tree / mutant.path)
            finally:
                trees.put(tree)
            return Result(
                number=number,
                path=mutant.path,
                operator=mutant.operator.removeprefix("core/"),
                diff="\n".join(mutant.diff.splitlines()[2:]),
                killed_by=killed_by,
            )

        known = {(each.path, _lines(each.diff)) for each in report.results}
        fresh = (m for m in sampled(ROOT, seed=seed) if (m.path, _lines(m.diff)) not in known)
        missing = (number for number in range(count) if number not in done)
        with ThreadPoolExecutor(workers) as threads:
            tasks = [threads.submit(test, *each) for each in zip(missing, fresh, strict=False)]
            for task in as_completed(tasks):
                result = task.result()
                results = sorted([*report.results, result], key=lambda each: each.number)
                report = report.model_copy(update={"results": tuple(results)})
                report.save(REPORT)
                by = result.killed_by or "SURVIVED"
                sys.stdout.write(f"{result.number} {result.path} {result.operator}: {by}\n")
                sys.stdout.flush()
        killers = {each.killed_by for each in report.results if each.number not in done} - {""}
        fails_always = _failed(trees.get(), sorted(killers)) if killers else []
    sound = tuple(each for each in report.results if each.killed_by not in fails_always)
    report = report.model_copy(update={"results": sound})
    report.save(REPORT)
    return report


def _lines(diff: str) -> tuple[str, ...]:
    """Lines that a diff removes and adds, wherever they are by now."""
    return tuple(
        line
        for line in diff.splitlines()
        if line.startswith(("-", "+")) and not line.startswith(("---", "+++"))
    )


def _copy(tree: Path) -> Path:
    skipped = shutil.ignore_patterns(".git", ".venv", "*_cache", "__pycache__", "runs")
    return Path(shutil.copytree(ROOT, tree, ignore=skipped))


def _stages(path: str) -> Iterator[list[str]]:
    """Yield the tests of the file, then those that import it and of its folder, the contracts."""
    file = ROOT / "tests" / path
    own = sorted(file.parent.glob(f"test_{file.stem}*.py"))
    yield _names(own)
    module = re.escape(path.removesuffix(".py").replace("/", "."))
    imports = re.compile(rf"^\s*(from|import) {module}\b", re.MULTILINE)
    tests = sorted((ROOT / "tests").rglob("test_*.py"))
    users = [test for test in tests if imports.search(test.read_text())]
    if file.parent.is_dir():
        near = [*file.parent.rglob("test_*.py")]
    else:
        near = [*file.parents[1].glob("test_*.py")]
    near += users if len(users) <= MOST_USERS else ()
    yield _names(sorted({*near} - {*own}))
    yield _names(sorted((ROOT / "tests/contract").glob("test_*.py")))


def _names(tests: Iterable[Path]) -> list[str]:
    return [str(test.relative_to(ROOT)) for test in tests]


def _failed(tree: Path, arguments: list[str]) -> list[str]:
    """Return the tests that fail in `tree`; the last that began if it does not end."""
    command = [sys.executable, "-m", "pytest", "-v", "-rfE", "-p", "no:cacheprovider"]
    with tempfile.TemporaryFile("w+") as output:
        process = subprocess.Popen(
            [*command, *arguments],
            cwd=tree,
            env={**os.environ, "PYTHONPATH": str(tree), **_ENV},
            stdout=output,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
        )
        try:
            _wait(process, output)
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            status = process.wait()
        output.seek(0)
        text = output.read()
    if status in (0, _NO_TESTS):
        return []
    failed = re.findall(r"^(?:FAILED|ERROR) (tests/.+?)(?: - |$)", text, re.MULTILINE)
    begun = re.findall(r"^(tests/.+?)(?: [A-Z]+ +\[|$)", text, re.MULTILINE)
    return failed or begun[-1:] or [each for each in arguments if each != "-x"]


def _wait(process: subprocess.Popen[bytes], output: IO[str]) -> None:
    """Return when `process` ends, or has written nothing for as long as a test may take."""
    size, since = 0, time.monotonic()
    while process.poll() is None and time.monotonic() - since < MOST_S:
        time.sleep(0.2)
        if (now := os.fstat(output.fileno()).st_size) != size:
            size, since = now, time.monotonic()


_ENV = {"OMP_NUM_THREADS": "1", "PYTHONDONTWRITEBYTECODE": ""}
_NO_TESTS = 5
"""The exit status of pytest where all tests are of the nightly tier."""


if __name__ == "__main__":
    sys.exit(main())
