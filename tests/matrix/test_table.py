"""The table of the matrix, and that the README has it."""

from __future__ import annotations

import os

import pytest

pytest.importorskip("transformers")

from tests.matrix.results import RESULTS, Cell, Outcome, Results
from tests.matrix.table import BLOCK, README, table, write_readme


def test_a_refused_cell_shows_the_number_of_its_reason() -> None:
    def cell(row: str, plan: str, **rest: object) -> Cell:
        return Cell(architecture=row, plan=plan, settings="", **rest)

    refused = {"outcome": Outcome.REFUSED, "rule": "scalar"}
    results = Results(
        torch="2.13",
        transformers="5",
        cells=(
            cell("BERT", "tp2", outcome=Outcome.TRAINED, loss_error=1e-7, gradient_error=3e-7),
            cell("BERT", "tp4", **refused, text="`a.b` has 3"),
            cell("ViT", "tp2", **refused, text="`c` has 4"),
            cell("ViT", "tp4", outcome=Outcome.FAILED, text="a hang"),
        ),
    )
    lines = table(results).splitlines()
    columns = [word.strip() for word in lines[0].split("|")]
    rows = {line.split("|")[1].strip(): line.split("|") for line in lines if line.startswith("|")}
    shown = {
        (row, column): rows[row][columns.index(column)].strip()
        for row in ("BERT", "ViT")
        for column in ("ddp2", "tp2", "tp4")
    }
    assert shown == {
        ("BERT", "ddp2"): "", ("BERT", "tp2"): "✓", ("BERT", "tp4"): "1",
        ("ViT", "ddp2"): "", ("ViT", "tp2"): "1", ("ViT", "tp4"): "**failed**",
    }  # fmt: skip
    assert "1. `scalar`: `a.b` has 3" in lines
    assert lines[-1].startswith("1 of 4 train (✓) with a loss and gradients within 3e-07")


def test_the_readme_shows_the_saved_matrix() -> None:
    results = Results.load(RESULTS)
    if os.environ.get("REGEN_GOLDEN") == "1":
        write_readme(results)
    shown = BLOCK.search(README.read_text())
    assert shown is not None
    assert shown[2] == table(results)
