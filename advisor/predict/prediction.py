"""Predictions: one output line per row, from the cost model's estimate."""

from __future__ import annotations

import csv
import io
import os
from collections.abc import Iterable
from dataclasses import dataclass, fields

from advisor.cost import CALIBRATION, Calibration
from advisor.predict.case import case_of
from advisor.predict.filled import fits, used_bytes
from advisor.predict.ranges import ranges
from advisor.predict.resolve import resolve
from advisor.predict.rows import TableRow
from advisor.predict.setup import Refusal, Setup
from profiles.errors import AdvisorError
from profiles.record import write_text

GIB = 2.0**30


@dataclass(frozen=True, slots=True, kw_only=True)
class Prediction:
    """One output line; figures are None if `note` gives a reason.

    `predicted_peak_mem_gib` is what tensors take at the fullest moment on the fullest device,
    `predicted_reserved_gib` what the device reports as used; the range is of the former. Nine of
    ten true values should lie in a range.
    """

    row_id: str
    predicted_step_time_s: float | None = None
    time_low_s: float | None = None
    time_high_s: float | None = None
    predicted_peak_mem_gib: float | None = None
    predicted_reserved_gib: float | None = None
    mem_low_gib: float | None = None
    mem_high_gib: float | None = None
    predicted_fits: bool | None = None
    note: str = ""


def predict(row: TableRow | Refusal, calibration: Calibration = CALIBRATION) -> Prediction:
    """Predict time and memory of a row, or note the reason why not."""
    try:
        setup = resolve(row) if isinstance(row, TableRow) else row
        if isinstance(setup, Refusal):
            return Prediction(row_id=row.row_id, note=f"no prediction: {setup.reason}")
        return predict_setup(setup, calibration)
    except AdvisorError as error:
        reason = "; ".join([error.what, *error.hints])
        return Prediction(row_id=row.row_id, note=f"no prediction: {reason}")


def predict_setup(setup: Setup, calibration: Calibration = CALIBRATION) -> Prediction:
    """Predict time and memory of a setup with `advisor.cost.estimate`."""
    estimate = case_of(setup).estimate(calibration)
    allocated = estimate.peak_bytes - estimate.memory.context
    time, memory = ranges(setup, estimate)
    device = setup.cluster.device
    return Prediction(
        row_id=setup.row_id,
        predicted_step_time_s=estimate.step_s,
        time_low_s=estimate.step_s * time[0],
        time_high_s=estimate.step_s * time[1],
        predicted_peak_mem_gib=allocated / GIB,
        predicted_reserved_gib=used_bytes(estimate.reserved_bytes, estimate.peak_bytes, device)
        / GIB,
        mem_low_gib=allocated * memory[0] / GIB,
        mem_high_gib=allocated * memory[1] / GIB,
        predicted_fits=fits(estimate, device),
        note="assumed: " + "; ".join(setup.assumed) if setup.assumed else "",
    )


def write_predictions(predictions: Iterable[Prediction], path: str | os.PathLike[str]) -> None:
    """Write a CSV file with a column per field, atomically.

    Raises:
        FileError: it cannot be written.
    """
    names = [field.name for field in fields(Prediction)]
    text = io.StringIO(newline="")
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(names)
    for prediction in predictions:
        writer.writerow([_cell(getattr(prediction, name)) for name in names])
    write_text(path, text.getvalue())


def _cell(value: object) -> str:
    if value is None:
        return ""
    if isinstance(value, bool):
        return "y" if value else "n"
    return f"{value:.6g}" if isinstance(value, float) else str(value)
