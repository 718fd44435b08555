"""The demo as users start it, short: decide, train, compare, save; and a plan that is refused."""

from __future__ import annotations

import contextlib
import io
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from unittest import mock

import pytest

from advisor.tutorial.demo import launch
from profiles.errors import InputError
from tests.nightly import nightly
from tests.workers import Pool

ROOT = Path(__file__).resolve().parents[3]


def demo(folder: Path, *options: str) -> subprocess.CompletedProcess[str]:
    with start(folder, *options) as process:
        out, err = process.communicate(timeout=300)
    return subprocess.CompletedProcess(process.args, process.returncode, out, err)


@contextlib.contextmanager
def start(folder: Path, *options: str, **variables: str) -> Iterator[subprocess.Popen[str]]:
    """The command, running; killed at the end where it still does."""
    process = subprocess.Popen(
        [sys.executable, "-c", "from advisor.cli.main import main; main()", "demo", *options],
        cwd=folder,
        env={**os.environ, "PYTHONPATH": str(ROOT), "NO_COLOR": "1", **variables},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        # A job in the background of a shell ignores interrupts, and so would its processes.
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    )
    try:
        yield process
    finally:
        process.kill()
        process.communicate()


@pytest.mark.dist
def test_the_ranks_of_the_demo_decide_train_compare_and_save(pool: Pool, tmp_path: Path) -> None:
    """With less of a bench, fewer rows, and less of the text that it never sees."""
    shown, nothing = pool.run(_rank_of_the_demo, tmp_path, world_size=2, timeout_s=240.0)
    assert nothing == ""
    _has_learnt(shown, tmp_path)


@pytest.mark.dist
@pytest.mark.slow
@pytest.mark.nightly
def test_the_demo_decides_trains_compares_and_saves(tmp_path: Path) -> None:
    run = demo(tmp_path, "--steps", "8")
    assert run.returncode == 0, run.stderr
    _has_learnt(run.stdout, tmp_path)


def _rank_of_the_demo(folder: Path) -> str:
    from advisor.tutorial.demo import train

    shown = io.StringIO()
    with (
        contextlib.chdir(folder),
        contextlib.redirect_stdout(shown),
        mock.patch.multiple(train, BENCH_S=0.5, HELD_OUT_BATCHES=1, GLOBAL_BATCH=4),
        mock.patch("profiles.machine.bench.collectives.COMPUTED_EDGE", 64),
    ):
        train._demo(None, 8, folder / "exit-code")
    return shown.getvalue()


def _has_learnt(shown: str, folder: Path) -> None:
    for words in ("why", "it fits", "step time", "peak memory", "held out"):
        assert words in shown
    first, last = (float(part.split()[0]) for part in _learnt(shown))
    assert last < first - 1  # nats per byte of text it never saw
    assert (folder / "runs" / "demo" / "latest").is_file()


@pytest.mark.dist
@pytest.mark.nightly
def test_the_demo_refuses_an_impossible_plan_with_the_reason_and_no_traceback(
    tmp_path: Path,
) -> None:
    run = demo(tmp_path, "--plan", "ep=2")
    assert run.returncode == 2, run.stderr
    assert "ep=2 shards experts, and no block of" in run.stderr
    assert "Traceback" not in run.stderr


def test_a_plan_for_another_number_of_ranks_is_refused_before_anything_starts(
    tmp_path: Path,
) -> None:
    run = demo(tmp_path, "--plan", "dp_shard=4")
    assert run.returncode == 2
    assert "plan `dp_shard=4` needs 4 ranks, the demo starts 2" in run.stderr
    assert "advise demo --ranks 4 --plan 'dp_shard=4'" in run.stderr


@pytest.mark.parametrize(("gpus", "ranks"), [(0, 2), (1, 1), (8, 2)])
def test_two_ranks_are_started_but_one_where_there_is_one_gpu(
    gpus: int, ranks: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    started: list[int] = []

    def run_local_ranks(*_: object, ranks: int, **__: object) -> int:
        started.append(ranks)
        return 0

    monkeypatch.setattr("profiles.machine.gpus.gpu_count", lambda: gpus)
    monkeypatch.setattr(launch, "run_local_ranks", run_local_ranks)
    assert launch.run(ranks=None, plan="", steps=None) == 0
    assert started == [ranks]


@pytest.mark.parametrize(
    ("ranks", "words"),
    [
        ("3", "the demo's batch of 16 samples does not divide over 3 ranks"),
        ("200", "the demo's batch of 16 samples does not divide over 200 ranks"),
    ],
)
def test_more_ranks_than_the_batch_divides_over_are_refused_with_the_choices(
    tmp_path: Path, ranks: str, words: str
) -> None:
    run = demo(tmp_path, "--ranks", ranks)
    assert run.returncode == 2
    assert words in run.stderr
    assert "hint: take 1, 2" in run.stderr


def test_more_ranks_than_the_memory_holds_are_refused_with_the_numbers(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(launch, "machine_memory_bytes", lambda: 4 * 2**30)
    with pytest.raises(InputError, match=r"16 ranks need 12.8 GiB.* machine has 4.00 GiB") as error:
        launch.run(ranks=16, plan="", steps=None)
    assert error.value.hints == ("take 1, 2, 4",)


@pytest.mark.dist
@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGTERM, *nightly(signal.SIGINT, signal.SIGKILL)])
def test_no_rank_outlives_a_demo_that_is_stopped(tmp_path: Path, number: signal.Signals) -> None:
    mark = f"PARALLEL_ADVISOR_TEST={tmp_path}"
    with start(tmp_path, "--steps", "500", PARALLEL_ADVISOR_TEST=str(tmp_path)) as process:
        wait_until(lambda: len(processes_with(mark)) >= 4)  # the command, torchrun, two ranks
        if number is signal.SIGKILL:
            (torchrun,) = children_of(process.pid)
            os.kill(torchrun, number)
        else:
            process.send_signal(number)
        said = process.communicate(timeout=180)[1]
    assert process.returncode != 0
    assert "Traceback" not in said
    wait_until(lambda: not processes_with(mark))


def wait_until(happened: Callable[[], bool], *, limit_s: float = 60.0) -> None:
    end = time.monotonic() + limit_s
    while not happened():
        assert time.monotonic() < end, "waited in vain"
        time.sleep(0.1)


def processes_with(setting: str) -> list[int]:
    """List processes that were started with an environment variable; dead ones have none."""
    pids = []
    for path in Path("/proc").glob("[0-9]*/environ"):
        with contextlib.suppress(OSError):
            if setting.encode() in path.read_bytes().split(b"\0"):
                pids.append(int(path.parent.name))
    return pids


def children_of(pid: int) -> list[int]:
    pids = []
    for path in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):
            if int(path.read_text().rpartition(")")[2].split()[1]) == pid:
                pids.append(int(path.parent.name))
    return pids


def _learnt(text: str) -> tuple[str, str]:
    line = next(line for line in text.splitlines() if "held out" in line)
    before, after = line.split("held out")[1].split(" at first, ")
    return before.strip(), after.strip()
