"""`python -m tests.mutants`: change the library in 200 places, and see that a test fails in each.

    --count N      mutants (200)
    --seed N       of the places (0)
    --workers N    trees that are tested side by side (2)
    --show         print the table of what was kept

Every mutant stands alone in a copy of the tree. Tests of its file are run first, then those of its
folder, then the contracts; a test elsewhere may kill a survivor yet. What is kept in
tests/validation/mutants.json is not tested again. Needs `cosmic-ray` (`make mutants` installs it).
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import os
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor, as_completed
from pathlib import Path
from queue import Queue

from profiles.record import Document, Record

ROOT = Path(__file__).resolve().parents[2]
REPORT = ROOT / "tests/validation/mutants.json"
MOST_S = 1200.0
"""Of a stage of tests; a mutant whose tests do not end is killed by that."""


class Result(Record):
    """The end of a mutant.

    Attributes:
        killed_by: "file", "folder" or "contract", for the tests that failed; empty if none did.
    """

    number: int
    path: str
    operator: str
    diff: str
    killed_by: str


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
    given = parser.parse_args()
    report = Report.load(REPORT) if REPORT.exists() else Report()
    if not given.show:
        report = _measured(report, given.seed, given.count, given.workers)
    survived = [each for each in report.results if not each.killed_by]
    for each in survived:
        sys.stdout.write(f"{each.number} {each.path} {each.operator}\n{each.diff}\n")
    total = len(report.results)
    sys.stdout.write(f"{len(survived)} of {total} mutants survived (seed {report.seed})\n")
    return 0


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
                killed_by = next(
                    (stage for stage, tests in _stages(mutant.path) if _fails(tree, tests)), ""
                )
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

        mutants = enumerate(itertools.islice(sampled(ROOT, seed=seed), count))
        with ThreadPoolExecutor(workers) as threads:
            tasks = [threads.submit(test, n, mutant) for n, mutant in mutants if n not in done]
            for task in as_completed(tasks):
                result = task.result()
                results = sorted([*report.results, result], key=lambda each: each.number)
                report = report.model_copy(update={"results": tuple(results)})
                report.save(REPORT)
                by = result.killed_by or "SURVIVED"
                sys.stdout.write(f"{result.number} {result.path} {result.operator}: {by}\n")
                sys.stdout.flush()
    return report


def _copy(tree: Path) -> Path:
    skipped = shutil.ignore_patterns(".git", ".venv", "*_cache", "__pycache__", "runs")
    return Path(shutil.copytree(ROOT, tree, ignore=skipped))


def _stages(path: str) -> Iterator[tuple[str, list[str]]]:
    """Yield the tests of the file, of its folder, and the contracts."""
    file = Path("tests") / path
    own = [str(one) for one in sorted(ROOT.glob(f"{file.parent}/test_{file.stem}*.py"))]
    if own:
        yield "file", own
    package = Path(*file.parts[:3])
    folder = file.parent if (ROOT / file.parent).is_dir() else package
    others = [str(one) for one in sorted((ROOT / folder).rglob("test_*.py")) if str(one) not in own]
    yield "folder", others
    yield "contract", [str(one) for one in sorted(ROOT.glob("tests/contract/test_*.py"))]


def _fails(tree: Path, tests: list[str]) -> bool:
    """True if one of `tests` fails in `tree`, or they do not end."""
    if not tests:
        return False
    tests = [str(Path(test).relative_to(ROOT)) for test in tests]
    command = [sys.executable, "-m", "pytest", "-x", "-q", "-p", "no:cacheprovider", *tests]
    process = subprocess.Popen(
        command,
        cwd=tree,
        env={**os.environ, "PYTHONPATH": str(tree), "OMP_NUM_THREADS": "1"},
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
    )
    try:
        return process.wait(timeout=MOST_S) == 1
    except subprocess.TimeoutExpired:
        return True
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()


if __name__ == "__main__":
    sys.exit(main())
