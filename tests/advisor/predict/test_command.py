"""`python -m advisor.predict`: tables in, tables out, reasons where there is no answer."""

from __future__ import annotations

import csv
from pathlib import Path

import pytest

from advisor.predict.__main__ import main
from tests.advisor.predict.test_resolve import CELLS
from tests.scorecard.published import MEASURED_COLUMNS

COLUMNS = [
    "row_id",
    "predicted_step_time_s",
    "time_low_s",
    "time_high_s",
    "predicted_peak_mem_gib",
    "predicted_reserved_gib",
    "mem_low_gib",
    "mem_high_gib",
    "predicted_fits",
    "note",
]


def predicted(folder: Path, *rows: dict[str, str]) -> list[dict[str, str]]:
    source, target = folder / "rows.csv", folder / "out.csv"
    columns = list(dict.fromkeys(name for row in rows for name in row))
    with source.open("w", newline="") as file:
        writer = csv.DictWriter(file, columns)
        writer.writeheader()
        writer.writerows(rows)
    assert main([str(source), str(target)]) == 0
    with target.open(newline="") as file:
        return list(csv.DictReader(file))


def test_every_row_gets_figures_in_the_agreed_columns(tmp_path: Path) -> None:
    (answer,) = predicted(tmp_path, CELLS)
    assert list(answer) == COLUMNS
    low, value, high = (
        float(answer[name]) for name in ("time_low_s", "predicted_step_time_s", "time_high_s")
    )
    assert 0 < low < value < high
    assert float(answer["predicted_peak_mem_gib"]) < float(answer["predicted_reserved_gib"])
    assert answer["predicted_fits"] in ("y", "n")
    assert "recompute full" in answer["note"]


@pytest.mark.parametrize("column", ["hidden", "n_gpus", "tp", "seq_len", "microbatch"])
@pytest.mark.parametrize("cell", ["0", "-8", "many", "1.5", "nan", "inf", "1e300"])
def test_an_unusable_cell_fails_its_row_only(tmp_path: Path, column: str, cell: str) -> None:
    broken = {**CELLS, "row_id": "broken", column: cell}
    bad, good = predicted(tmp_path, broken, CELLS)
    assert f"`{column}` is `{cell}`; `{column}` " in bad["note"]
    assert bad["predicted_step_time_s"] == ""
    assert good["predicted_step_time_s"] != ""


def test_an_impossible_layout_is_explained(tmp_path: Path) -> None:
    (answer,) = predicted(tmp_path, {**CELLS, "dp": "3"})
    assert "dp=3 * tp=8 * pp=8 * cp=1 is 192, not the 512 devices" in answer["note"]


def test_measured_columns_are_never_read(tmp_path: Path) -> None:
    with_figures = {**CELLS, **dict.fromkeys(MEASURED_COLUMNS, "1"), "oom": "y"}
    plain, marked = predicted(tmp_path, CELLS, with_figures)
    assert plain == marked


def test_a_blank_table_has_a_blank_answer(tmp_path: Path) -> None:
    (tmp_path / "rows.csv").write_text("row_id,hidden\n")
    assert main([str(tmp_path / "rows.csv"), str(tmp_path / "out.csv")]) == 0
    assert (tmp_path / "out.csv").read_text() == ",".join(COLUMNS) + "\n"


@pytest.mark.parametrize("content", [None, "", "a,b\n1,2\n", "\xff\xfe"])
def test_an_unusable_table_exits_with_2_and_leaves_the_old_output(
    tmp_path: Path, content: str | None, capsys: pytest.CaptureFixture[str]
) -> None:
    source, target = tmp_path / "rows.csv", tmp_path / "out.csv"
    if content is not None:
        source.write_bytes(content.encode("latin-1"))
    target.write_text("old")
    assert main([str(source), str(target)]) == 2
    message = capsys.readouterr().err
    assert str(source) in message
    assert "Traceback" not in message
    assert target.read_text() == "old"


def test_an_output_that_cannot_be_written_exits_with_2(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "rows.csv").write_text("row_id\nx\n")
    assert main([str(tmp_path / "rows.csv"), str(tmp_path / "nowhere" / "out.csv")]) == 2
    assert "nowhere" in capsys.readouterr().err


def test_without_two_names_the_usage_is_shown(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["one"]) == 2
    assert "ROWS.csv OUT.csv" in capsys.readouterr().err
