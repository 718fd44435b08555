"""The model that is scored: what turns a row and constants into a prediction, and nothing else."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from statistics import fmean
from typing import Any

from advisor.cost.calibration import CALIBRATION
from advisor.predict.case import case_of
from advisor.predict.filled import used_bytes
from advisor.predict.prediction import GIB, Prediction, predict, predict_setup
from advisor.predict.resolve import resolve
from advisor.predict.rows import TableRow
from advisor.predict.setup import Refusal, Setup
from profiles.errors import AdvisorError
from profiles.record import Record
from tests.scorecard.published import Published

# Stage and counter that a `mem_metric` means (`rules.Rules.read`).
Reading = Callable[[str], tuple[str, str]]
# GiB allocated and reserved of each pipeline stage, first to last; empty where only the fullest
# is predicted.
Stages = Sequence[tuple[float, float]]


@dataclass(frozen=True, slots=True)
class Model:
    """Predictions as functions of a row and a record of constants.

    Attributes:
        stack: name of the preset whose kernels a row is predicted with, and whether that is a guess
            because the row names no program.
        most_settings: of one file that take part in a fit.
        stages: memory by stage, for figures that were published of one stage or of their sum.
    """

    predict: Callable[[TableRow, Any], Prediction]
    calibration: Record
    stack: Callable[[TableRow], tuple[str, bool]]
    stages: Callable[[TableRow, Any], Stages] = lambda row, calibration: ()
    most_settings: int = 40

    def remembering(self) -> Model:
        """The same, with each prediction made once: fits without one publisher share most."""
        return replace(
            self,
            predict=cache(self.predict),
            stack=cache(self.stack),
            stages=cache(self.stages),
        )

    def peak_gib(
        self, run: Published, predicted: Prediction, constants: Any, reading: Reading
    ) -> float | None:
        """Published memory figure: of its stage, by its counter."""
        stage, counter = reading(run.memory_metric)
        index = 0 if counter == "allocated" else 1
        fullest = (predicted.predicted_peak_mem_gib, predicted.predicted_reserved_gib)[index]
        if stage == "fullest" or fullest is None:
            return fullest
        stages = [sizes[index] for sizes in self.stages(run.row, constants)] or [fullest]
        if stage == "mean":
            return fmean(stages)
        return stages[{"first": 0, "middle": len(stages) // 2, "last": -1}[stage]]


def with_values(calibration: Record, values: Mapping[str, float]) -> Any:
    """The same constants but for `values`."""
    return calibration.model_copy(update=dict(values))


@cache
def _setup(row: TableRow) -> Setup | Refusal:
    """Setup that a row resolves to, whatever the constants; a refusal for every reason."""
    try:
        return resolve(row)
    except AdvisorError as error:
        return Refusal(row_id=row.row_id, reason=error.what)


def _predict(row: TableRow, constants: Any) -> Prediction:
    setup = _setup(row)
    try:
        return (
            predict(row, constants)
            if isinstance(setup, Refusal)
            else predict_setup(setup, constants)
        )
    except AdvisorError as error:
        return Prediction(row_id=row.row_id, note=f"no prediction: {error.what}")


def _stack(row: TableRow) -> tuple[str, bool]:
    setup = _setup(row)
    if isinstance(setup, Refusal):
        return "none", True
    stack = setup.software.stack
    # Of a preset with other flags, the name goes on in brackets.
    return stack.name.split(" (")[0], stack.is_generic


def _stages(row: TableRow, constants: Any) -> Stages:
    setup = _setup(row)
    assert isinstance(setup, Setup)
    cost = case_of(setup).estimate(constants)
    return [
        (
            (stage.peak_bytes - cost.memory.context) / GIB,
            used_bytes(stage.reserved_bytes, stage.peak_bytes, setup.cluster.device) / GIB,
        )
        for stage in sorted(cost.stages, key=lambda stage: stage.rank)
    ]


# Six settings of each of fifteen files: 36 fits without publishers take minutes, not an hour.
MODEL = Model(_predict, CALIBRATION, _stack, _stages, most_settings=12)
