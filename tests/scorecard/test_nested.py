"""A nested run scores what was out of view, once, and names the commit."""

from __future__ import annotations

import csv
import json
import subprocess
from dataclasses import fields
from pathlib import Path

import pytest

from advisor.predict.rows import TableRow
from profiles.errors import InputError
from tests.scorecard import nested, table
from tests.scorecard.published import MEASURED_COLUMNS
from tests.scorecard.rules import load

DRAWN = ["BigScience", "MosaicML", "NVIDIA", "vision_dp"]
COLUMNS = [*(one.name for one in fields(TableRow)), *sorted(MEASURED_COLUMNS)]


def made_up_file(folder: Path, name: str, *, hidden: int = 2048) -> None:
    """Three made-up runs of a small GPT, which took a second each."""
    with (folder / f"{name}.csv").open("w", newline="") as file:
        writer = csv.DictWriter(file, COLUMNS, restval="")
        writer.writeheader()
        for number in (1, 2, 3):
            writer.writerow(
                {
                    "row_id": f"{name}-{number}", "source": "made-up", "model_name": "gpt",
                    "arch": "dense_gpt", "n_layers": 24, "hidden": hidden, "n_heads": 16,
                    "vocab": 50304, "seq_len": 2048, "gpu_type": "A100-SXM-80GB",
                    "gpu_mem_gb": 80, "gpus_per_node": 8, "n_gpus": 8, "dp": 8, "tp": 1, "pp": 1,
                    "microbatch": number, "global_batch": 8 * number, "dtype": "bf16",
                    "measured_step_time_s": 1.0, "oom": "n", "reliability": "high",
                }
            )  # fmt: skip


def test_half_of_the_publishers_are_drawn_by_the_seed() -> None:
    assert nested.drawn(load()) == DRAWN
    assert nested.drawn(load(), seed=15) != DRAWN


def test_missing_files_are_named(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    target = tmp_path / "nested.json"
    assert nested.main([], target) == 2
    said = capsys.readouterr().err
    assert (
        "no folder of held-out files (publishers BigScience, MosaicML, NVIDIA, vision_dp)" in said
    )
    assert "llm_foundry_fsdp.csv" in said
    assert not target.exists()


def test_a_file_used_for_tuning_is_refused(tmp_path: Path) -> None:
    visible, away = tmp_path / "visible", tmp_path / "away"
    for folder in (visible, away):
        folder.mkdir()
        made_up_file(folder, "vision_dp")
    with pytest.raises(InputError, match="vision_dp: in view while rules were chosen"):
        nested.held_out_runs(load(), away, visible)


def test_files_that_were_not_drawn_are_not_scored(tmp_path: Path) -> None:
    made_up_file(tmp_path, "amp_t4_layouts")
    with pytest.raises(InputError, match="none of the drawn files"):
        nested.held_out_runs(load(), tmp_path, tmp_path / "nothing")
    made_up_file(tmp_path, "bigscience_a100")
    actual = nested.held_out_runs(load(), tmp_path, tmp_path / "nothing")
    assert {run.file for run in actual} == {"bigscience_a100"}


def test_the_held_out_score_is_computed_once_and_shown_first(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    target, readme, away = tmp_path / "nested.json", tmp_path / "README.md", tmp_path / "away"
    readme.write_text("<!-- scorecard: here -->\nold\n<!-- end of scorecard -->\n")
    monkeypatch.setattr(table, "README", readme)
    monkeypatch.setattr(table, "NESTED", target)
    monkeypatch.setattr(nested, "FOLDER", tmp_path)
    monkeypatch.setattr(nested, "clean_commit", lambda: "0123456789abcdef")
    away.mkdir()
    made_up_file(away, "bigscience_a100")
    made_up_file(away, "llm_foundry_fsdp", hidden=1024)
    assert nested.main(["--held-out", str(away)], target) == 0
    document = json.loads(target.read_text())
    assert document["drawn"] == DRAWN
    assert (document["seed"], document["commit"]) == (14, "0123456789abcdef")
    assert document["files"] == {"bigscience_a100": 3, "llm_foundry_fsdp": 3}
    assert "vision_dp" in document["absent"]
    assert document["card"]["all"]["high"]["time"]["rows"] == 6
    shown = readme.read_text()
    assert shown.index("Nested run of ") < shown.index("constants as they are")
    assert "old" not in shown
    capsys.readouterr()
    first_run = target.read_text()
    assert nested.main(["--held-out", str(away)], target) == 2
    assert "scored once" in capsys.readouterr().err
    assert target.read_text() == first_run


def test_a_tree_that_differs_from_its_commit_is_refused(tmp_path: Path) -> None:
    def git(*arguments: str) -> None:
        who = ["-c", "user.name=n", "-c", "user.email=e@example.com"]
        subprocess.run(["git", "-C", str(tmp_path), *who, *arguments], check=True,
                       capture_output=True)  # fmt: skip

    with pytest.raises(InputError, match="failed"):
        nested.clean_commit(tmp_path)
    git("init")
    (tmp_path / "rule.txt").write_text("one")
    git("add", ".")
    git("commit", "-m", "one")
    assert len(nested.clean_commit(tmp_path)) == 40
    (tmp_path / "rule.txt").write_text("two")
    with pytest.raises(InputError, match="differ from the commit"):
        nested.clean_commit(tmp_path)
