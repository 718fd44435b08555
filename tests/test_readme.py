"""The README shows what the command prints, and counts what is there."""

from __future__ import annotations

import os
import re
from pathlib import Path

import pytest
import torch
from click.testing import CliRunner

from advisor.cli.main import cli
from profiles.machine import catalogue
from tests.benchmarks.async_save import INTERVAL
from tests.benchmarks.async_save import REPORT as SAVES
from tests.benchmarks.async_save import Report as SaveReport
from tests.contract.hybrids import PLANS
from tests.fuzz.runner import REPORT as FUZZ
from tests.fuzz.runner import Report as FuzzReport
from tests.soak import report as soak_report

ROOT = Path(__file__).resolve().parents[1]
README = ROOT / "README.md"
SURVIVED = re.compile(r"(<!-- survived: .*? -->\n)(.*?)(<!-- end of survived -->)", re.DOTALL)
REPORT = re.compile(r"(<!-- report: .*? -->\n```\n)(.*?)(```\n<!-- end of report -->)", re.DOTALL)


@pytest.mark.slow
def test_the_report_in_the_readme_is_what_the_command_prints() -> None:
    if not torch.__version__.startswith("2.13."):
        pytest.skip(f"the report was captured with torch 2.13, this is {torch.__version__}")
    text = README.read_text()
    command = re.search(r"`advise (gpt-7b .*?)` prints", text)
    assert command is not None
    run = CliRunner().invoke(cli, command[1].split(), env={"COLUMNS": "80", "NO_COLOR": "1"})
    assert run.exit_code == 0, run.output
    if os.environ.get("REGEN_GOLDEN") == "1":
        text = REPORT.sub(lambda match: match[1] + run.stdout + match[3], text)
        README.write_text(text)
    shown = REPORT.search(text)
    assert shown is not None
    assert shown[2] == run.stdout


def test_what_runs_survived_is_what_was_measured() -> None:
    text = README.read_text()
    if os.environ.get("REGEN_GOLDEN") == "1":
        text = SURVIVED.sub(lambda match: match[1] + _survived() + match[3], text)
        README.write_text(text)
    shown = SURVIVED.search(text)
    assert shown is not None
    assert shown[2] == _survived()


def _survived() -> str:
    """A table of what the committed reports of soak, fuzz and saves hold."""
    soak, saves = soak_report.Report.load(soak_report.REPORT), SaveReport.load(SAVES)
    fuzz = FuzzReport.load(FUZZ)
    points = soak.crash_points
    kills = sum(sum(training.kills.values()) for training in soak.trainings)
    plans = ", ".join(f"`{training.plan}`" for training in soak.trainings)
    repeated = "; ".join(
        f"{each.count:,} {each.name}: {each.last_mib - each.first_mib:+.1f} MiB"
        for each in soak.repeated
    )
    stalls = ", ".join(f"{row.stall:.1%}" for row in saves.rows)
    findings = [what for each in fuzz.results for what in each.findings]
    slow = sum(what.startswith("time") for what in findings)
    rows = (
        (
            f"{kills} kills of ranks and launchers, also during saves and starts ({plans})",
            f"{sum(bool(each.differences) for each in soak.trainings)} trainings whose losses or"
            " final state differ by a bit from an undisturbed run",
            "make soak",
        ),
        (
            f"saves broken off at each of {sum(sum(each.points) for each in points)} file events",
            f"{sum(len(each.differences) for each in points)} lost or mixed states",
            'make soak SOAK="--crash-points"',
        ),
        ("a long life", repeated, 'make soak SOAK="--load"'),
        (
            f"{sum(each.cases for each in fuzz.results):,} broken inputs to"
            f" {len(fuzz.results)} readers",
            f"{len(findings) - slow} tracebacks, wrong loads or cases over 500 MiB;"
            f" {slow} cases over 1 s",
            "make fuzz",
        ),
        (
            f"saves in the background, every {INTERVAL} steps",
            f"steps take {stalls} longer (one rank, two ranks)",
            "python -m tests.benchmarks.async_save",
        ),
    )
    lines = ["| what was done | what came of it | command |", "|---|---|---|"]
    lines += [f"| {what} | {result} | `{command}` |" for what, result, command in rows]
    return "\n".join(lines) + "\n"


def test_the_readme_counts_the_catalogue_as_it_is() -> None:
    text = README.read_text()
    assert f"{len(catalogue.accelerators())} accelerators" in text
    assert f"{len(catalogue.links())} links" in text


def test_the_plans_of_the_contract_are_as_many_as_is_said() -> None:
    assert f"of {len(PLANS)} plans with" in (ROOT / "tests" / "README.md").read_text()


@pytest.mark.parametrize("folder", [".", "engines", "tests"])
def test_files_and_commands_that_a_readme_names_exist(folder: str) -> None:
    text = (ROOT / folder / "README.md").read_text()
    for name in re.findall(r"`((?:profiles|engines|advisor|tests)/[\w./]+)`", text):
        assert (ROOT / name).exists(), name
    for link in re.findall(r"\]\((?!http)([^)#]+)\)", text):
        assert (ROOT / folder / link).exists(), link
    for module in re.findall(r"python -m ((?:advisor|tests)[\w.]*)", text):
        path = ROOT / module.replace(".", "/")
        assert path.with_suffix(".py").exists() or (path / "__main__.py").exists(), module
