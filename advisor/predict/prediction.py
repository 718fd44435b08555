"""Predictions: what is written for a row, from its setup."""

from __future__ import annotations

import csv
import os
from collections.abc import Iterable
from dataclasses import dataclass, fields
from pathlib import Path
from tempfile import NamedTemporaryFile

from advisor.predict.constants import CONSTANTS, Constants
from advisor.predict.convnet_constants import FITTED, ConvnetConstants
from advisor.predict.convnet_memory import convnet_memory, least_allocated
from advisor.predict.convnet_step import convnet_step, layered
from advisor.predict.memory import predict_memory
from advisor.predict.ranges import memory_range, time_range
from advisor.predict.resolve import resolve
from advisor.predict.rows import Row
from advisor.predict.setup import Refusal, Setup
from advisor.predict.time import time_of
from profiles.errors import FileError

GIB = 2.0**30


@dataclass(frozen=True, slots=True, kw_only=True)
class Prediction:
    """One line of the answer; the figures are None where `note` says why there are none.

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


def predict(
    row: Row | Refusal, *, constants: Constants = CONSTANTS, layers: ConvnetConstants = FITTED
) -> Prediction:
    """Time and memory of a row, or the reason why there is none."""
    setup = resolve(row) if isinstance(row, Row) else row
    if isinstance(setup, Refusal):
        return Prediction(row_id=row.row_id, note=f"no prediction: {setup.reason}")
    return predict_setup(setup, constants=constants, layers=layers)


def predict_setup(
    setup: Setup, *, constants: Constants = CONSTANTS, layers: ConvnetConstants = FITTED
) -> Prediction:
    """Time and memory of a setup; `layers` are the constants of what is counted layer by layer."""
    if layered(setup) is not None:
        time = time_range(setup, convnet_step(setup, layers).step_s)
    else:
        step = time_of(setup, constants)
        time = time_range(setup, step.step_s, host_share=step.host_s / step.step_s)
    if setup.network is not None:
        memory = convnet_memory(setup, layers)
        allocated, reserved = memory.allocated_bytes, memory.reserved_bytes
        fits = memory.fits
        span = memory_range(allocated, least=least_allocated(setup, layers))
    else:
        found = predict_memory(setup)
        allocated, reserved = found.allocated.value, found.reserved.value
        fits, span = found.fits, found.allocated
    return Prediction(
        row_id=setup.row_id,
        predicted_step_time_s=time.value,
        time_low_s=time.low,
        time_high_s=time.high,
        predicted_peak_mem_gib=allocated / GIB,
        predicted_reserved_gib=reserved / GIB,
        mem_low_gib=span.low / GIB,
        mem_high_gib=span.high / GIB,
        predicted_fits=fits,
        note="assumed: " + "; ".join(setup.assumed) if setup.assumed else "",
    )


def write_predictions(predictions: Iterable[Prediction], path: str | os.PathLike[str]) -> None:
    """A CSV file with a column for each field; whole or not at all.

    Raises:
        FileError: it cannot be written.
    """
    target = Path(path)
    names = [field.name for field in fields(Prediction)]
    try:
        with NamedTemporaryFile(
            "w", newline="", encoding="utf-8", dir=target.parent, suffix=".part", delete=False
        ) as file:
            part = Path(file.name)
            writer = csv.writer(file, lineterminator="\n")
            writer.writerow(names)
            for prediction in predictions:
                writer.writerow([_cell(getattr(prediction, name)) for name in names])
        part.chmod(0o644)
        part.replace(target)
    except OSError as error:
        raise FileError(f"cannot write {path}: {error.strerror}", where=str(path)) from None


def _cell(value: object) -> str:
    if value is None:
        return ""
    if isinstance(value, bool):
        return "y" if value else "n"
    return f"{value:.6g}" if isinstance(value, float) else str(value)
