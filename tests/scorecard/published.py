"""Published runs with what was measured of them; only tests and the scorecard may read this."""

from __future__ import annotations

import csv
import functools
import tomllib
from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path

from advisor.predict.resolve import resolve
from advisor.predict.rows import TableRow, row_of
from advisor.predict.setup import Setup

ROOT = Path(__file__).resolve().parents[2]
FOLDER = ROOT.parent / "shared" / "data" / "measured"
# Weight of a row in a fit and a median, by what its table says of it.
WEIGHTS = {"high": 1.0, "medium": 0.25, "low": 0.0}
# Measured columns, and columns derived from them: reading these would invalidate a prediction.
MEASURED_COLUMNS = frozenset(
    {
        "measured_step_time_s",
        "tokens_per_s_per_gpu",
        "samples_per_s",
        "tflops_per_gpu",
        "tflops_kind",
        "mfu_pct",
        "hfu_pct",
        "peak_mem_gib_per_gpu",
        "mem_unit_published",
        "mem_metric",
        "oom",
        "step_time_derived_s",
        "reliability",
        "notes",
    }
)


@dataclass(frozen=True, slots=True)
class Published:
    """A row and its measured columns; None where a figure was not published."""

    file: str
    row: TableRow
    reliability: str
    step_s: float | None
    samples_per_s: float | None
    memory_gib: float | None
    memory_metric: str
    oom: bool | None


@functools.cache
def frameworks() -> dict[str, str]:
    """The framework that the rows of a file name, by the file's stem."""
    return tomllib.loads((Path(__file__).parent / "frameworks.toml").read_text("utf-8"))


def published(folder: Path = FOLDER, files: Collection[str] | None = None) -> list[Published]:
    """The runs of a folder, in the order of its files; of `files` alone where they are named."""
    results = []
    for path in sorted(folder.glob("*.csv")):
        if files is not None and path.stem not in files:
            continue
        with path.open(newline="", encoding="utf-8") as file:
            for cells in csv.DictReader(file):
                framework = cells.get("framework") or frameworks().get(path.stem, "")
                row = row_of({**cells, "framework": framework})
                results.append(
                    Published(
                        file=path.stem,
                        row=row,
                        reliability=cells["reliability"] or "low",
                        step_s=_step_s(cells, row),
                        samples_per_s=_number(cells["samples_per_s"]),
                        memory_gib=_number(cells["peak_mem_gib_per_gpu"]),
                        memory_metric=cells["mem_metric"].lower(),
                        oom={"y": True, "n": False}.get(cells["oom"]),
                    )
                )
    return results


def _step_s(cells: dict[str, str], row: TableRow) -> float | None:
    """The published step time, else the derived one, else from a rate.

    Of a row without a batch it is the step of the batch that is assumed: only the rate is compared.
    """
    for column in ("measured_step_time_s", "step_time_derived_s"):
        if (seconds := _number(cells[column])) is not None:
            return seconds
    if (rate := _number(cells["samples_per_s"])) is not None:
        batch = row.global_batch or _assumed_batch(row)
        return batch / rate if batch else None
    rate = _number(cells["tokens_per_s_per_gpu"])
    if rate is None or row.global_batch is None or row.seq_len is None or row.n_gpus is None:
        return None
    return row.global_batch * row.seq_len / (rate * row.n_gpus)


def _assumed_batch(row: TableRow) -> int | None:
    """Batch that a prediction assumes for a row that leaves it out."""
    setup = resolve(row)
    return setup.layout.global_batch if isinstance(setup, Setup) else None


def _number(text: str | None) -> float | None:
    return float(text) if text else None
