"""Workload of one training step: batch size, precision, optimizer."""

from __future__ import annotations

from typing import Any

from pydantic import NonNegativeFloat, NonNegativeInt, PositiveFloat, model_validator

from profiles.record import Record
from profiles.record.bounds import Batch, Count, DevicesOrZero, Scatter, Tokens, WaitSeconds
from profiles.workload.optimizers import OPTIMIZERS, OptimizerProfile


class Workload(Record):
    """One optimizer step.

    Attributes:
        global_batch_size: samples per optimizer step, over all replicas.
        tokens_per_sample: for tokens/s in the report; None where samples are not token ids.
        optimizer: bytes it keeps and moves.
        precision: "fp32", "bf16" or "fp16" as in `Plan.precision`; numerics are the user's
            choice, the advisor never changes them.
        host_overhead_s: of a step in which the devices wait for data or for the host. Nothing of it
            follows from a model or a machine, so none is assumed until somebody says or measures.
        dataset_samples: in the training set, for steps per epoch; None where nobody said.
        critical_batch_size: measured on such a model (`ParallelModel.noise_scale`), in samples.
        imbalance: how much the ranks' times to compute a step scatter, by the machine or by the
            data: their standard deviation over their mean. None is assumed either.
        straggling: what the slowest rank computes longer than the others in every step, over their
            time: 0.5 is half as long again.
        slow_rank: which one that is, where it is known.
        pace_runs: that these were measured in; 0 where somebody said them.
        given: the fields that somebody named; the others are defaults. What the record is built
            with, unless said.
    """

    global_batch_size: Batch
    tokens_per_sample: Tokens | None = None
    optimizer: OptimizerProfile = OPTIMIZERS["adamw"]
    precision: str = "fp32"
    host_overhead_s: WaitSeconds = 0.0
    dataset_samples: Count | None = None
    critical_batch_size: PositiveFloat | None = None
    imbalance: Scatter = 0.0
    straggling: NonNegativeFloat = 0.0
    slow_rank: DevicesOrZero | None = None
    pace_runs: NonNegativeInt = 0
    given: tuple[str, ...] = ()

    @model_validator(mode="before")
    @classmethod
    def _note_what_is_given(cls, data: Any) -> Any:
        if isinstance(data, dict) and "given" not in data:
            return {**data, "given": tuple(name for name in cls.model_fields if name in data)}
        return data
