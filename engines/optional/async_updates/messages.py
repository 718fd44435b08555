"""Messages between workers and servers, as numbers in a fixed order. No torch here.

A worker begins: (kind, turn, count, loss), then one flag for each tensor that follows. The turn is
the version that gradients were computed at, or the number of a meeting. The server answers:
(version, staleness, loss, missing rank), and its parameters but where one is missing.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import IntEnum


class Request(IntEnum):
    """A worker's request."""

    PUSH = 0  # a step: gradients for the server, parameters for the worker
    REDUCE = 1  # the mean of a loss over all workers
    PULL = 2  # the same, and parameters


@dataclass(frozen=True, slots=True)
class WorkerMessage:
    """A worker's message; `flags`: for each of the server's tensors, if a gradient is sent."""

    kind: Request
    turn: int
    count: float
    loss: float
    flags: tuple[bool, ...]

    LENGTH = 4  # and one for each tensor

    def numbers(self) -> list[float]:
        return [self.kind, self.turn, self.count, self.loss, *map(float, self.flags)]

    @classmethod
    def read(cls, numbers: Sequence[float]) -> WorkerMessage:
        kind, turn, count, loss, *flags = numbers
        return cls(Request(int(kind)), int(turn), count, loss, tuple(map(bool, flags)))


@dataclass(frozen=True, slots=True)
class ServerMessage:
    """A server's message.

    Attributes:
        staleness: of the gradients; None where they were dropped.
        loss: the mean over the samples of the update, or of the reduction.
        missing: the rank whose loss makes an update impossible; None where there is one.
    """

    version: int
    staleness: int | None
    loss: float
    missing: int | None = None

    LENGTH = 4

    def numbers(self) -> list[float]:
        staleness = -1 if self.staleness is None else self.staleness
        missing = -1 if self.missing is None else self.missing
        return [self.version, staleness, self.loss, missing]

    @classmethod
    def read(cls, numbers: Sequence[float]) -> ServerMessage:
        version, staleness, loss, missing = numbers
        return cls(
            int(version),
            None if staleness < 0 else int(staleness),
            loss,
            None if missing < 0 else int(missing),
        )
