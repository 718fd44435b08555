"""Sources of a profile: the rungs of a ladder of ways to look at a model."""

from __future__ import annotations

from enum import StrEnum

from profiles.record import Record


class CaptureSource(StrEnum):
    """Way in which costs were counted. Each is taken where the one before it cannot follow."""

    FAKE = "fake tensors"  # shapes alone; closed forms count as much
    KNOWN_VALUES = "fake tensors with known values"  # of the batch, and of what follows from it
    RUN = "a run on the CPU"  # over few rows, under a bound of memory and time
    PARAMETERS = "parameters alone"  # states are exact, activations and FLOP a guess


RANDOM = "random"
"""The operation of a `ValueRead` that is a draw of random numbers."""
ATTRIBUTE = "attribute"
"""That of one that is a number or a word in a module, which the forward changes: a counter."""
BACKWARD = "gradient"
"""That of a gradient which the forward or the loss asks for itself: a penalty on it, an inner step.
No path varies with it."""


class ValueRead(Record):
    """Code that acts on values of tensors or draws: another batch may take another path.

    Attributes:
        unit: that was being called.
        line: file:line of the code; empty where it is not known.
        operation: "item", "nonzero", `RANDOM`, `ATTRIBUTE`, `BACKWARD` ...
    """

    unit: str
    line: str = ""
    operation: str = ""

    def __str__(self) -> str:
        return f"{self.line or f'`{self.unit}`'} ({self.operation})"
