"""The cases that need a GPU run here on the CPU at small size; the loop around them on made-up
ones."""

from __future__ import annotations

import math
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from profiles.machine.clusters import cluster_from_name, load_cluster
from tests.gpu import __main__ as command
from tests.gpu import again, curve, readme, run
from tests.gpu.case import Case
from tests.gpu.exactness import PLANS
from tests.gpu.ranks import collectives, run_pair
from tests.gpu.results import RESULTS, CaseResult, Outcome, Results, Row, Unit
from tests.gpu.run import PARTS, Run, cases_of
from tests.gpu.setting import LeftOutError, Setting
from tests.gpu.subjects import SUBJECTS
from tests.gpu.table import table
from tests.gpu.worker import Worker, WorkerError
from tests.workers import Pool


def test_every_case_that_a_cpu_can_try_works(tmp_path: Path) -> None:
    out = tmp_path / "gpu.json"
    results = small_run(list(PARTS), out).results()
    wrong = [c for c in results.cases if c.outcome in (Outcome.FAILED, Outcome.DIFFERED)]
    assert not wrong
    assert {case.part for case in results.cases} == set(PARTS)
    assert Results.load(out) == results
    by_name = {case.name: case for case in results.of_part("d")}
    for case in by_name.values():
        states = next(row for row in case.rows if row.term == "states")
        assert states.measured == pytest.approx(states.from_sheet, rel=0.01)
    # The curve is a cluster file: it is read back with the rates that were measured.
    (path,) = tmp_path.glob("gpu_*.toml")
    efficiency = load_cluster(path).device.matmul_efficiency
    rates = {int(row.term): row.measured for row in results.of_part("f")[0].rows}
    assert max(share.value for share in efficiency.values()) == 1.0
    for edge, rate in rates.items():
        assert efficiency[edge].value == pytest.approx(rate / max(rates.values()), rel=1e-3)
    shown = table(results)
    assert all(f"({part})" in shown for part in PARTS)


def small_run(parts: list[str], out: Path | None, **options: object) -> Run:
    return Run(parts, minutes=1.0, out=out, says=lambda _: None, in_process=True, **options)  # type: ignore[arg-type]


# The loop


@pytest.fixture
def made_up(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Part c has three cases: one is right, one raises, one needs something. Who ran, in order."""
    ran: list[str] = []

    def case(name: str, error: Exception | None = None) -> Case:
        def work(setting: Setting) -> Iterator[Row]:
            ran.append(name)
            yield row(measured=2.0, from_sheet=1.0)
            if error is not None:
                raise error

        return Case(name, work)

    cases = {
        "b": [case(run.BENCH)],
        "c": [
            case("wrong", RuntimeError("CUDA error: no luck")),
            case("right"),
            case("not here", LeftOutError("nothing is installed")),
        ],
    }
    monkeypatch.setattr(run, "cases_of", lambda part, is_small: cases[part])
    monkeypatch.setattr(run, "timed_here", lambda: None)
    return ran


def row(**changes: object) -> Row:
    return Row.model_validate({"term": "step", "unit": Unit.SECONDS, "measured": 1.0, **changes})


def test_a_case_that_fails_is_kept_with_its_error_and_the_next_runs(made_up: list[str]) -> None:
    results = small_run(["c"], None).results()
    outcomes = {case.name: case.outcome for case in results.of_part("c")}
    assert outcomes == {
        "wrong": Outcome.FAILED,
        "right": Outcome.MEASURED,
        "not here": Outcome.LEFT_OUT,
    }
    wrong = next(case for case in results.cases if case.name == "wrong")
    assert wrong.text == "RuntimeError: CUDA error: no luck"
    assert wrong.rows == (row(measured=2.0, from_sheet=1.0),)  # what it found before


def test_a_second_run_goes_on_with_what_is_left(made_up: list[str], tmp_path: Path) -> None:
    out = tmp_path / "gpu.json"
    small_run(["c"], out).results()
    made_up.clear()
    small_run(["c"], out).results()
    assert made_up == ["wrong", "not here"]
    made_up.clear()
    small_run(["c"], out, again=True).results()
    assert sorted(made_up) == sorted([run.BENCH, "wrong", "right", "not here"])


def test_cases_of_a_later_run_keep_the_launches_of_its_host(
    made_up: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    timed = cluster_from_name("1xH200-SXM")
    monkeypatch.setattr(run, "timed_here", lambda: timed)
    monkeypatch.setattr(run, "launches_here", lambda: 5e-5)
    out = tmp_path / "gpu.json"
    first = small_run(["c"], out).results()
    assert {case.launch_s for case in first.cases} == {None}
    second = small_run(["c"], out).results()
    launches = {case.name: case.launch_s for case in second.cases}
    assert (launches["wrong"], launches["right"]) == (5e-5, None)
    setting = Setting(torch.device("cpu"), timed, timed).with_launches(5e-5)
    assert setting.bench is not None
    assert setting.bench.device.launch_s.value == 5e-5
    assert setting.sheet == timed
    # Timed anew, a bench is of another host than those before.
    third = {case.name: case.launch_s for case in second.with_bench(timed).cases}
    assert (third["wrong"], third["right"]) == (5e-5, timed.device.launch_s.value)


def test_new_cases_come_before_those_that_failed(made_up: list[str], tmp_path: Path) -> None:
    out = tmp_path / "gpu.json"
    first = small_run(["c"], out).results()
    failed = next(case for case in first.cases if case.name == "wrong")
    first.model_copy(update={"cases": (failed,)}).save(out)
    made_up.clear()
    small_run(["c"], out).results()
    assert made_up[-1] == "wrong"


def test_no_case_begins_when_the_time_is_up(
    made_up: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(run, "device_here", lambda: ("a GPU", "2.13", False))
    said: list[str] = []
    results = Run(["c"], minutes=0.0, out=None, says=said.append, in_process=True).results()
    assert made_up == []
    assert results.cases == ()
    assert said == [f"(c) the time is up before `{run.BENCH}`"]


def test_what_a_part_leaves_of_the_time_is_there_for_the_next() -> None:
    shares = [Run(list(PARTS), 9.0, None)._share_until(n) for n in range(len(PARTS))]
    assert shares == sorted(shares)
    assert shares[-1] == pytest.approx(1.0)
    assert Run(["c"], 9.0, None)._share_until(0) == 1.0


def test_results_of_another_device_are_not_gone_on_with(made_up: list[str], tmp_path: Path) -> None:
    out = tmp_path / "gpu.json"
    small_run(["c"], out).results().model_copy(update={"device": "another"}).save(out)
    made_up.clear()
    results = small_run(["c"], out).results()
    assert len(made_up) == 4
    assert results.device != "another"


# The process


@pytest.fixture
def worker() -> Iterator[Worker]:
    actual = Worker()
    yield actual
    actual.close()


def test_a_task_that_raises_hangs_or_dies_leaves_a_worker_that_works(worker: Worker) -> None:
    assert worker.call(math.sqrt, 16.0, timeout_s=30) == 4.0
    with pytest.raises(WorkerError, match="ValueError"):
        worker.call(math.sqrt, -1.0, timeout_s=30)
    with pytest.raises(WorkerError, match="exit code 3"):
        worker.call(os._exit, 3, timeout_s=30)
    with pytest.raises(WorkerError, match="did not end within 0 s"):
        worker.call(time.sleep, 60, timeout_s=0.2)
    assert worker.call(math.sqrt, 9.0, timeout_s=30) == 3.0


# Ranks


@pytest.mark.nightly
@pytest.mark.dist
def test_two_ranks_train_as_plain_torch(pool: Pool) -> None:
    rows = run_pair(pool, 2, "gpt, small", "dp_replicate=2")
    assert {row.term for row in rows} == {"loss", "gradients", "parameters after 3 steps"}
    assert not any(row.is_beyond for row in rows)


@pytest.mark.dist
def test_collectives_of_two_ranks_are_those_by_hand(pool: Pool) -> None:
    for results in pool.run(collectives, world_size=2):
        assert set(results.values()) == {""}, results


# What is shown


def test_a_ratio_is_of_the_bench_where_there_is_one() -> None:
    assert row(measured=3.0, from_sheet=1.0).ratio == 3.0
    assert row(measured=3.0, from_sheet=1.0, from_bench=2.0).ratio == 1.5
    assert row(measured=3.0).ratio is None


def test_the_table_has_a_row_for_each_thing_and_a_line_for_each_part() -> None:
    cases = (
        CaseResult(
            part="a",
            name="gpt",
            outcome=Outcome.DIFFERED,
            rows=(
                Row(term="loss", unit=Unit.ERROR, measured=1e-5, limit=1e-4),
                Row(term="gradients", unit=Unit.ERROR, measured=1e-3, limit=1e-4),
            ),
        ),
        CaseResult(
            part="c",
            name="gpt",
            outcome=Outcome.MEASURED,
            rows=(row(measured=0.5, from_sheet=0.4, from_bench=0.25),),
        ),
        CaseResult(part="c", name="t5", outcome=Outcome.FAILED, text="RuntimeError: no\nmore"),
    )
    lines = table(Results(device="a GPU", torch="2.13", cases=cases)).splitlines()
    assert lines[0] == "a GPU, torch 2.13"
    assert next(line for line in lines if "gradients" in line).endswith("!")
    assert next(line for line in lines if line.startswith("gpt, step")).split() == (
        ["gpt,", "step", "400", "ms", "250", "ms", "500", "ms", "2.00"]
    )
    assert "t5: failed: RuntimeError: no" in lines
    assert "(c) step: measured over predicted 2.00 at the median, 2.00 to 2.00, of 1" in lines
    assert "(a) 1 of 2 beyond their limit; the nearest is 1.0e-03 of 1e-04" in lines


def test_nothing_is_refitted_before_the_curve_was_measured() -> None:
    assert curve.refitted(Results(device="a GPU", torch="2.13")) is None


def test_without_results_the_table_says_so(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert command.main(["--show", "--out", str(tmp_path / "gpu.json")]) == 0
    assert "nothing was measured yet" in capsys.readouterr().out


def test_all_parts_have_cases_of_their_own_names() -> None:
    for part in PARTS:
        names = [case.name for case in cases_of(part, is_small=False)]
        assert len(names) == len(set(names)) > 2
    assert len(SUBJECTS) == 25
    assert len(set(PLANS)) == len(PLANS)


@pytest.mark.nightly
def test_the_cases_are_imported_where_only_what_torch_needs_is_installed() -> None:
    absent = ("transformers", "click", "rich", "jinja2", "matplotlib", "psutil", "hypothesis")
    code = (
        f"import sys\nfor name in {absent!r}: sys.modules[name] = None\n"
        "import tests.gpu.run, tests.gpu.table"
    )
    root = Path(__file__).resolve().parents[2]
    subprocess.run([sys.executable, "-c", code], cwd=root, check=True, timeout=120)


def test_the_readme_shows_what_was_measured() -> None:
    shown = readme.BLOCK.search(readme.README.read_text())
    assert shown is not None
    assert shown[2] == readme.text()


def test_predictions_of_what_was_measured_are_those_of_today() -> None:
    """Of a case of each part; `python -m tests.gpu --predict` makes all of them anew. Those of
    transformers' models are by the release that was measured (5.17)."""
    results = Results.load(RESULTS)
    names = {
        "c": "gpt-50m: precision=bf16, adamw",
        "d": "gpt-1.3b: dp_replicate=8 precision=bf16",
        "e": "gpt-350m: loss in 8 chunks",
    }
    cases = [
        next(c for c in results.of_part(part) if c.name == name) for part, name in names.items()
    ]
    some = results.model_copy(update={"cases": tuple(cases)})
    assert again.predicted_again(some) == some
