"""Made-up rows of a device whose rate, launch time and overhead are known exactly."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import date
from typing import Any

from advisor.predict.prediction import Prediction
from advisor.predict.rows import TableRow
from profiles.record import Record
from tests.scorecard.model import Model
from tests.scorecard.published import Published
from tests.scorecard.rules import Prior, Reading, Rule, Rules

# GiB of weights, gradients, masters and moments in fp32: 16 bytes a parameter.
GIB_PER_BILLION = 16e9 / 2**30


class Device(Record):
    """One product after another, each launched: s = 2 m n k / rate + launch."""

    flop_per_s: float = 1e14
    launch_s: float = 1e-3
    context_gib: float = 1.0
    fixed: float = 7.0


PRIORS = {
    "flop_per_s": Prior(prior=2e14, factor=3.0, unit="FLOP/s"),
    "launch_s": Prior(prior=5e-4, factor=3.0, unit="s"),
    "context_gib": Prior(prior=0.7, factor=2.0, unit="GiB"),
}


PUBLISHERS = {"A": frozenset({"a1", "a2"}), "B": frozenset("b"), "C": frozenset("c")}
TODAY = date(2026, 11, 22)


def predict(row: TableRow, device: Device) -> Prediction:
    """An m x k by k x n product: m tokens, k = n = hidden; allocated memory of the weights."""
    assert row.hidden is not None
    assert row.seq_len is not None
    assert row.global_batch is not None
    step_s = 2 * row.global_batch * row.seq_len * row.hidden**2 / device.flop_per_s
    step_s += device.launch_s
    gib = row.hidden**2 / 1e9 * GIB_PER_BILLION
    return Prediction(
        row_id=row.row_id, predicted_step_time_s=step_s, time_low_s=0.5 * step_s,
        time_high_s=2 * step_s, predicted_peak_mem_gib=gib,
        predicted_reserved_gib=gib + device.context_gib, mem_low_gib=0.5 * gib,
        mem_high_gib=2 * gib, predicted_fits=gib < 80,
    )  # fmt: skip


MODEL = Model(predict, Device(), lambda row: (row.attention or "eager", False))


def rule(name: str, *chosen_on: str, kind: str = "preset", **more: Any) -> Rule:
    """Of today, chosen on files."""
    return Rule.build({"name": name, "kind": kind, "date": TODAY, "says": name,
                       "chosen_on": chosen_on, **more})  # fmt: skip


def reading(words: str, *chosen_on: str, **means: str) -> Reading:
    """Of today, chosen on files."""
    return Reading.build(
        {"words": words, "date": TODAY, "says": words, "chosen_on": chosen_on, **means}
    )


def rules(*more: Rule, readings: tuple[Reading, ...] = ()) -> Rules:
    """Of the device above, chosen blind; "eager" has a preset. A published two files."""
    known = (rule("device", kind="rule", constants=PRIORS), rule("eager"), *more)
    return Rules(publishers=PUBLISHERS, rule=known, reading=readings)


def runs(file: str, device: Device, *, slower: Sequence[float] = (1.0,), count: int = 24,
         **cells: Any) -> list[Published]:  # fmt: skip
    """Runs that `device` would measure on products of several sizes; in turn `slower` than that."""
    results = []
    for index in range(count):
        row = TableRow(row_id=f"{file}-{index}", source=file, seq_len=1024, n_gpus=1,
                  hidden=1024 * (1 + index % 5), global_batch=1 + index, **cells)  # fmt: skip
        true = predict(row, device)
        assert true.predicted_step_time_s is not None
        results.append(
            Published(
                file=file, row=row, reliability="high", samples_per_s=None, oom=None,
                step_s=true.predicted_step_time_s * slower[index % len(slower)],
                memory_gib=true.predicted_reserved_gib, memory_metric="nvidia-smi",
            )
        )  # fmt: skip
    return results
