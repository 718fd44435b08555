"""The README's table and picture are what is committed; figures of reports written by hand."""

from __future__ import annotations

import os
import re
import shutil
from math import inf
from pathlib import Path
from xml.etree import ElementTree

import pytest

from profiles.record import Document
from tests.benchmarks import updates
from tests.engines.cases import cpu_ranks
from tests.gpu.results import RESULTS as GPU
from tests.gpu.results import UNSEEN, CaseResult, Outcome, Results, Unit
from tests.gpu.results import Row as Measured
from tests.peers.results import RESULTS as PEERS
from tests.peers.results import Answer, Entry, Peers, Race
from tests.peers.scripts import OURS, PLAIN
from tests.regret.cases import limited
from tests.regret.report import REPORT as REGRET
from tests.regret.report import Report, Result, Row
from tests.trust import marks, page
from tests.trust.claim import VALIDATION, Claim, Files
from tests.trust.picture import LEFT, SIDE, TOP, drawn


def test_the_readme_and_the_picture_are_what_the_reports_say() -> None:
    if os.environ.get("REGEN_GOLDEN") == "1":
        page.write(Files())
    assert page.wrong(Files()) == [], "run `python -m tests.trust`"


def test_a_changed_figure_is_noticed_in_the_readme_and_in_a_report(tmp_path: Path) -> None:
    readme, picture = tmp_path / "README.md", tmp_path / "trust.svg"
    text = page.README.read_text(encoding="utf-8")
    readme.write_text(text.replace("| 0 refused, 0 wrong |", "| 9 refused, 0 wrong |"))
    shutil.copy(page.PICTURE, picture)
    minus, plus = page.wrong(Files(), readme=readme, picture=picture)
    assert "9 refused" in minus
    assert "0 refused" in plus

    files = Files(Path(shutil.copytree(VALIDATION, tmp_path / "reports")))
    report = updates.Report.load(updates.REPORT)
    slow = report.rows[0].model_copy(update={"step_s": 100 * report.rows[0].predicted_s})
    changed = report.model_copy(update={"rows": (slow, *report.rows[1:])})
    changed.save(files.at(updates.REPORT))
    lines = page.wrong(files)
    assert [line for line in lines if line.startswith("+") and "99% at most" in line]
    assert lines[-1] == "trust.svg is another picture"


def test_what_was_not_measured_names_its_command(tmp_path: Path) -> None:
    """Without the reports of `tests/validation`; the others are of their folders."""
    text = page.table(Files(tmp_path))
    assert "| not run on a GPU yet: `make gpu` |" in text
    for claim in page.CLAIMS:
        if claim.path.parent == VALIDATION and claim.lacking == Claim.lacking:
            assert f"| {claim.question} | not measured yet: `{claim.command}` |" in text
    assert drawn(Files(tmp_path)).count("not measured yet") == 4


DDP, ZERO = "dp_replicate=4 microbatch_size=4", "dp_shard=4 microbatch_size=4"


def _case(name: str, chosen_s: float, other_s: float, **more: object) -> Result:
    """A case with two plans, the chosen one first; predictions are of one second and one byte."""
    rows = [
        Row(
            plan=plan,
            seconds=(seconds,),
            is_final=True,
            peak_bytes=1.0,
            predicted_s=1.0,
            predicted_peak_bytes=1.0,
            predicted_high_bytes=1.0,
            in_leaf=True,
        )
        for plan, seconds in ((DDP, chosen_s), (ZERO, other_s))
    ]
    return Result(
        name=name,
        cluster=limited(cpu_ranks(4), 2.0),
        leaf="replicate",
        families=("DDP",),
        dissent=None,
        plans=(DDP, ZERO),
        legal=100,
        rows=tuple(rows),
        **more,
    )


def _line(document: Document, path: Path, folder: Path, *, nth: int = 0) -> tuple[str, str]:
    """The answer to this report's claim, and where it falls short."""
    files = Files(folder)
    document.save(files.at(path))
    answer = [claim for claim in page.CLAIMS if claim.path == path][nth].of(files)
    return answer.result, answer.short


def test_regret_names_its_worst_case_and_the_picks_that_failed(tmp_path: Path) -> None:
    """Of 1.25 s and 1.0 s: a quarter longer; of 1.0 s and 2.0 s: none; half of the plans."""
    cases = (
        _case("good", 1.0, 2.0),
        _case("bad", 1.25, 1.0, again=(1.25,)),
        _case("full", 1.0, 1.0, failed_for_memory=True),
    )
    result, short = _line(Report(results=cases, broken={"dead": "why"}), REGRET, tmp_path)
    assert result.startswith(
        "3 of 24 cases, 6 of 300 legal plans run: the chosen one takes 12% (0% to"
    )
    assert "25%) longer than the best of them" in result
    assert short == (
        "worst: 25% (noise 0%) in bad; picks that failed: full; cases that could not be run: dead"
    )
    ratios = {ratio.row: ratio.value for ratio in marks.regrets(Files(tmp_path))}
    assert ratios == {"good": 1.0, "bad": 1.25, "full": inf}
    assert "FAILED" in drawn(Files(tmp_path))


def test_peers_that_are_faster_are_named(tmp_path: Path) -> None:
    """Ours takes 2 s a turn: DDP's 4 s are 2x, Accelerate's 1 s are 0.5x."""
    turns = {OURS: 2.0, PLAIN: 4.0, "Accelerate": 1.0}
    entries = tuple(Entry(script=s, turns_s=(t,), loss_error=0.0) for s, t in turns.items())
    race = Race(subject="T5", link="local", parameters=9, rows=8, steps=2, entries=entries)
    asked = {"planner": OURS, "subject": "T5", "link": "local", "script": OURS}
    answer = Answer(**asked, answer_s=0.5, step_s=1.5)
    peers = Peers(races=(race,), answers=(answer,))
    result, short = _line(peers, PEERS, tmp_path)
    assert result.endswith("local: 1.25x (0.50x to 2.00x) of 2 runs")
    assert short.startswith("slower in 1: 0.50x of Accelerate on T5, local;")
    assert _line(peers, PEERS, tmp_path, nth=1)[0] == "not measured yet: `make peers`"  # capacities
    assert marks.step_times(Files(tmp_path)) == {"runs of make peers": [(1.5, 1.0)]}


def test_a_gpu_that_was_there_is_shown_with_what_failed_on_it(tmp_path: Path) -> None:
    measured = Measured(term="step", unit=Unit.SECONDS, measured=0.3, from_bench=0.2)
    exact = Measured(term="loss", unit=Unit.ERROR, measured=1e-6, limit=1e-5)
    cases = (
        CaseResult(part="a", name="gpt", outcome=Outcome.MEASURED, rows=(exact,)),
        CaseResult(part="c", name="t5", outcome=Outcome.MEASURED, rows=(measured,)),
        CaseResult(part="c", name="vit", outcome=Outcome.FAILED, text="boom"),
    )
    result, short = _line(Results(device="H200", torch="2.13", cases=cases), GPU, tmp_path)
    assert result == (
        "H200: 1 of 1 results within their bounds of the CPU's; 1 steps from a bench off by 33% at"
        " the median, 33% at most"
    )
    assert short == "1 failed (vit); the worst step, t5: predicted 200 ms, took 300 ms"


def test_steps_that_were_predicted_before_they_ran_are_shown_with_the_worst(tmp_path: Path) -> None:
    rows = (
        Measured(term="step", unit=Unit.SECONDS, measured=0.3, from_bench=0.2, from_sheet=0.3),
        Measured(term="allocated", unit=Unit.BYTES, measured=100.0, from_sheet=110.0),
    )
    case = CaseResult(part="c", name="lstm", outcome=Outcome.MEASURED, rows=rows)
    results = Results(device="H100", torch="2.11", cases=(case,))
    result, short = _line(results, UNSEEN, tmp_path)
    assert result.startswith("H100, predicted before it ran: 1 steps from a bench off by 33%")
    assert "from its data sheet off by 0%" in result
    assert "1 peaks of tensors off by 10%" in result
    assert short == "the worst step, lstm: predicted 200 ms, took 300 ms"


def test_what_was_predicted_exactly_lies_on_the_line(tmp_path: Path) -> None:
    """The line goes from the lower left corner of the square to the upper right one."""
    Report(results=(_case("a", 1.0, 4.0),)).save(Files(tmp_path).at(REGRET))
    picture = drawn(Files(tmp_path))
    assert picture == drawn(Files(tmp_path))
    assert ElementTree.fromstring(picture).tag.endswith("svg")
    path = next(line for line in picture.splitlines() if line.count("h0") == 2)
    exact, late = [tuple(map(float, p)) for p in re.findall(r"M([\d.]+) ([\d.]+)h0", path)]
    assert exact[0] - LEFT == pytest.approx(TOP + SIDE - exact[1], abs=0.2)
    assert late[0] == exact[0]
    assert late[1] < exact[1]  # it took longer: further up
