"""What one training step is asked to do."""

from __future__ import annotations

from pydantic import NonNegativeFloat, PositiveInt

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


# State: PyTorch documentation of each optimizer (exp_avg and exp_avg_sq for Adam, momentum_buffer
# for SGD), fp32. Moved: parameter and states read and written once, gradient read, fp32.
OPTIMIZERS = {
    "sgd": OptimizerProfile(name="sgd", state_bytes_per_element=0, moved_bytes_per_element=12),
    "sgd-momentum": OptimizerProfile(
        name="sgd-momentum", state_bytes_per_element=4, moved_bytes_per_element=20
    ),
    "adam": OptimizerProfile(name="adam", state_bytes_per_element=8, moved_bytes_per_element=28),
    "adamw": OptimizerProfile(name="adamw", state_bytes_per_element=8, moved_bytes_per_element=28),
}


class Workload(Record):
    """One optimizer step.

    Attributes:
        global_batch_size: samples per optimizer step, over all replicas.
        tokens_per_sample: for tokens/s in the report; None where samples are not token ids.
        optimizer: bytes it keeps and moves.
        precision: "fp32" or "bf16" as in `Plan.precision`; numerics are the user's choice, the
            advisor never changes them.
    """

    global_batch_size: PositiveInt
    tokens_per_sample: PositiveInt | None = None
    optimizer: OptimizerProfile = OPTIMIZERS["adamw"]
    precision: str = "fp32"


def optimizer_profile(name: str) -> OptimizerProfile:
    """Look an optimizer up by name.

    Raises:
        UnknownNameError: not in the table; the near miss is named.
    """
    try:
        return OPTIMIZERS[name.lower()]
    except KeyError:
        raise UnknownNameError("optimizer", name, OPTIMIZERS) from None
