"""Cells that fail, as the runner of the matrix reports them."""

from __future__ import annotations

import math
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

pytest.importorskip("transformers")

from engines.parallel.parity import relative_errors
from engines.plan import Plan
from profiles.model.profile import ModelProfile
from tests.engines.cases import cpu_ranks
from tests.matrix import __main__ as command
from tests.matrix import run
from tests.matrix.architectures import ARCHITECTURES
from tests.matrix.cell import Difference, Find
from tests.matrix.plans import PLANS
from tests.matrix.results import Cell, Outcome, Results
from tests.workers import Pool


def crash(name: str, plan: Plan, profile: ModelProfile, find: Find) -> Difference:
    raise RuntimeError("a gradient of the wrong shape")


def hang(name: str, plan: Plan, profile: ModelProfile, find: Find) -> Difference:
    time.sleep(60)
    raise AssertionError


def disagree(name: str, plan: Plan, profile: ModelProfile, find: Find) -> Difference:
    """Right on rank 0."""
    return Difference(0.0, 2e-5 * torch.distributed.get_rank(), "head.weight")


def lose(name: str, plan: Plan, profile: ModelProfile, find: Find) -> Difference:
    return Difference(math.nan, 0.0, "head.weight")


@pytest.mark.dist
@pytest.mark.parametrize(
    ("instead", "outcome", "text"),
    [
        (disagree, Outcome.DIFFERED, ""),
        (lose, Outcome.DIFFERED, "loss nan"),
        (crash, Outcome.FAILED, "a gradient of the wrong shape"),
        (hang, Outcome.FAILED, "did not finish"),
    ],
)
def test_a_failed_cell_is_saved_as_failed(
    pool: Pool, monkeypatch: pytest.MonkeyPatch, instead: object, outcome: Outcome, text: str
) -> None:
    monkeypatch.setattr(run, "difference", instead)
    if instead is hang:
        pool.run(torch.distributed.get_rank, world_size=2)  # the start is not what is bounded
        monkeypatch.setattr(run, "LIMIT_S", 2.0)
    (cell,) = run.cells_of("MLP", ["ddp2"], pool)
    assert cell.outcome is outcome
    assert text in cell.text


def test_a_refused_cell_needs_no_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(run, "cpu_ranks", lambda _: cpu_ranks(2))
    nobody = Pool(0)  # any run would fail
    (cell,) = run.cells_of("MLP", ["zero3"], nobody)
    assert cell.outcome is Outcome.REFUSED
    assert (cell.rule, cell.settings) == ("world-size", "dp_shard=4")


def test_errors_are_relative_to_the_larger_gradients() -> None:
    wanted = {"large": torch.tensor([4.0, -2.0]), "rounding": torch.tensor([1e-8])}
    got = {"large": torch.tensor([4.0, -2.4]), "rounding": torch.tensor([-3e-8])}
    errors = relative_errors(got, wanted)
    assert errors["large"] == pytest.approx(0.4 / 4.0)
    assert errors["rounding"] == pytest.approx(4e-8 / 4e-3)  # a thousandth of the largest


def test_an_interrupted_run_resumes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    ran: list[tuple[str, list[str]]] = []
    ends = {"gpipe": Outcome.FAILED}

    def cells(row: str, columns: list[str], pool: Pool) -> Iterator[Cell]:
        ran.append((row, columns))
        for column in columns:
            outcome = ends.get(column, Outcome.TRAINED)
            yield Cell(architecture=row, plan=column, settings="", outcome=outcome)

    monkeypatch.setattr(command, "cells_of", cells)
    part = ["--only", "T5", "--plan", "gpipe", "--plan", "ddp2", "--out", f"{tmp_path}/some.json"]
    assert command.main(part) == 1
    ends.clear()
    assert command.main([*part, "--resume"]) == 0
    assert ran == [("T5", ["gpipe", "ddp2"]), ("T5", ["gpipe"])]
    assert command.main(["--out", f"{tmp_path}/some.json", "--resume"]) == 0
    assert dict(ran[2:])["T5"] == [name for name in PLANS if name not in ("ddp2", "gpipe")]
    saved = Results.load(tmp_path / "some.json")
    assert list(saved.by_place()) == [(row, column) for row in ARCHITECTURES for column in PLANS]
    assert capsys.readouterr().out.endswith("450 trained\n")
