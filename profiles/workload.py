"""What one training step is asked to do."""

from __future__ import annotations

from typing import Any

from pydantic import NonNegativeFloat, PositiveInt, model_validator

from profiles.errors import UnknownNameError
from profiles.record import Record


class OptimizerProfile(Record):
    """Bytes of state an optimizer keeps per trainable parameter element.

    `state_bytes_per_element` counts what is kept beside the parameter and its gradient. AdamW on
    fp32 parameters keeps two fp32 moments: 8.
    """

    name: str
    state_bytes_per_element: NonNegativeFloat
    moved_bytes_per_element: NonNegativeFloat
    """Bytes read and written in device memory per element by one step."""


# State: fp32 moments as torch documents them (exp_avg and exp_avg_sq, momentum_buffer). Moved: what
# torch's default implementations read and write, pass by pass, nothing fused; counted by
# `engines.footprint` (a test compares). `fused=True` moves 32 for AdamW.
OPTIMIZERS = {
    name: OptimizerProfile(name=name, state_bytes_per_element=state, moved_bytes_per_element=moved)
    for name, state, moved in (
        ("sgd", 0, 12),
        ("sgd-momentum", 4, 32),
        ("adam", 8, 76),
        ("adamw", 8, 84),
    )
}


class Workload(Record):
    """One optimizer step.

    Attributes:
        global_batch_size: samples per optimizer step, over all replicas.
        tokens_per_sample: for tokens/s in the report; None where samples are not token ids.
        optimizer: bytes it keeps and moves.
        precision: "fp32" or "bf16" as in `Plan.precision`; numerics are the user's choice, the
            advisor never changes them.
        given: the fields that somebody named; the others are defaults. What the record is built
            with, unless said.
    """

    global_batch_size: PositiveInt
    tokens_per_sample: PositiveInt | None = None
    optimizer: OptimizerProfile = OPTIMIZERS["adamw"]
    precision: str = "fp32"
    given: tuple[str, ...] = ()

    @model_validator(mode="before")
    @classmethod
    def _note_what_is_given(cls, data: Any) -> Any:
        if isinstance(data, dict) and "given" not in data:
            return {**data, "given": tuple(name for name in cls.model_fields if name in data)}
        return data


def optimizer_profile(name: str) -> OptimizerProfile:
    """Look an optimizer up by name.

    Raises:
        UnknownNameError: not in the table; the near miss is named.
    """
    try:
        return OPTIMIZERS[name.lower()]
    except KeyError:
        raise UnknownNameError("optimizer", name, OPTIMIZERS) from None
