"""Rows of a table of runs. Columns with measurements are never read."""

from __future__ import annotations

import csv
import io
import os
from collections.abc import Mapping
from dataclasses import dataclass, fields

from advisor.predict.setup import Refusal
from profiles.errors import FileError, InputError
from profiles.record import read_text
from profiles.record.bounds import MOST_LAYERS, MOST_TOKENS
from profiles.units import MIB


@dataclass(frozen=True, slots=True, kw_only=True)
class TableRow:
    """One run; None where the cell is blank. Columns as in the table's README.

    `params_b` counts 1e9 parameters, `gpu_mem_gb` is as printed on the card, `inter_gbps_per_node`
    is Gbit/s per node and direction; `microbatch` and `global_batch` count sequences or images.
    """

    row_id: str
    source: str | None = None
    source_date: str | None = None
    source_ref: str | None = None
    model_name: str | None = None
    arch: str | None = None
    params_b: float | None = None
    n_layers: int | None = None
    hidden: int | None = None
    n_heads: int | None = None
    n_kv_heads: int | None = None
    ffn_hidden: int | None = None
    vocab: int | None = None
    n_experts: int | None = None
    moe_topk: int | None = None
    moe_ffn_hidden: int | None = None
    seq_len: int | None = None
    gpu_type: str | None = None
    gpu_mem_gb: float | None = None
    gpus_per_node: int | None = None
    n_gpus: int | None = None
    intra_link: str | None = None
    inter_link: str | None = None
    inter_gbps_per_node: float | None = None
    dtype: str | None = None
    dp: int | None = None
    tp: int | None = None
    pp: int | None = None
    cp: int | None = None
    ep: int | None = None
    zero_stage: str | None = None
    shard_group: int | None = None
    microbatch: int | None = None
    global_batch: int | None = None
    grad_accum: int | None = None
    pp_schedule: str | None = None
    virtual_stages: int | None = None
    recompute: str | None = None
    compile: str | None = None
    offload: str | None = None
    sequence_parallel: str | None = None
    attention: str | None = None
    optimizer: str | None = None
    stack: str | None = None
    framework: str | None = None


MOST_TABLE_BYTES, MOST_ROWS = 16 * MIB, 100_000
# Upper bound of any number in a row: larger ones are typing errors and slow to factorize.
MOST = 10**9
_LIMITS = {
    "n_gpus": 10**6,
    "gpus_per_node": 1024,
    "n_layers": MOST_LAYERS,
    "global_batch": 10**8,
    "seq_len": MOST_TOKENS,
}
_KINDS = {f.name: str(f.type) for f in fields(TableRow)}


def read_rows(path: str | os.PathLike[str]) -> list[TableRow | Refusal]:
    """Read a CSV file's rows in order; a row with an unusable cell becomes a refusal.

    Raises:
        FileError: the file is missing, is not CSV, or lacks `row_id`.
    """
    text = read_text(path, most=MOST_TABLE_BYTES, encoding="utf-8-sig")
    reader = csv.DictReader(io.StringIO(text))
    rows = []
    try:
        if "row_id" not in (reader.fieldnames or ()):
            raise FileError(
                "no column `row_id`", where=str(path), hints=["name the columns in line 1"]
            )
        for number, cells in enumerate(reader, 1):
            if number > MOST_ROWS:
                raise FileError(f"more than {MOST_ROWS:,} rows, the most allowed", where=str(path))
            rows.append(_row_or_reason(cells, number))
    except csv.Error as error:
        raise FileError(f"cannot read {path}: {error}", where=str(path)) from None
    return rows


def _row_or_reason(cells: Mapping[str, str | None], number: int) -> TableRow | Refusal:
    row_id = (cells.get("row_id") or "").strip() or f"row {number}"
    try:
        return row_of({**cells, "row_id": row_id})
    except InputError as error:
        return Refusal(row_id=row_id, reason="; ".join([error.what, *error.hints]))


def row_of(cells: Mapping[str, str | None]) -> TableRow:
    """Parse `cells` (column name to text) to a row; unknown columns are ignored.

    Raises:
        InputError: a cell that must hold a positive number does not.
    """
    values: dict[str, object] = {}
    for name, kind in _KINDS.items():
        text = (cells.get(name) or "").strip()
        if text:
            values[name] = _parse(name, text, kind)
    return TableRow(**values)  # type: ignore[arg-type]


def _parse(name: str, text: str, kind: str) -> object:
    if kind.startswith("str"):
        return text
    try:
        number = float(text)
    except ValueError:
        number = float("nan")
    most = _LIMITS.get(name, MOST)
    if not 0 < number <= most:
        raise InputError(
            f"`{name}` is `{text}`",
            hints=[f"`{name}` is a positive number up to {most}, or blank"],
        )
    if kind.startswith("int"):
        if number != int(number):
            raise InputError(f"`{name}` is `{text}`", hints=[f"`{name}` counts, so it is whole"])
        return int(number)
    return number
