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
from tests.contract.hybrids import PLANS

ROOT = Path(__file__).resolve().parents[1]
README = ROOT / "README.md"
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
