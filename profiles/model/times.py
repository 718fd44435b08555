"""Measured times of a model's units on one device: what `profiles.timing.stopwatch` finds."""

from __future__ import annotations

from pydantic import Field, NonNegativeFloat, PositiveInt

from profiles.provenance import Timing
from profiles.record import Document, Record


class UnitTiming(Record):
    """All calls of a unit in one microbatch, forward and backward.

    Attributes:
        forward_flop, backward_flop: of the same, as captured.
    """

    forward: Timing
    backward: Timing
    forward_flop: NonNegativeFloat = 0.0
    backward_flop: NonNegativeFloat = 0.0

    @property
    def flop_per_s(self) -> float:
        """FLOP/s that were reached, forward and backward together; 0 where nothing is multiplied.

        The captured count takes attention to be computed in full where a mask leaves half of it
        out, as MFU does.
        """
        seconds = self.forward.median_s + self.backward.median_s
        return (self.forward_flop + self.backward_flop) / seconds if seconds else 0.0


class BlockTimes(Document):
    """Units of one model on one device at one microbatch size.

    Attributes:
        device: as a cluster's device is named ("H100-SXM-80GB", "cpu").
        processor, threads: what computed; threads of a CPU rank, 1 on accelerators.
        numerics: how numbers were held, as `profiles.model.profile.Numerics`.
        samples: of the microbatch.
        torch: its version.
        units: by name; equal units were timed once.
        left_out: units that could not be run by themselves, and why.
    """

    device: str
    processor: str
    threads: PositiveInt
    numerics: str
    samples: PositiveInt
    torch: str
    units: dict[str, UnitTiming]
    left_out: dict[str, str] = Field(default_factory=dict)

    def is_of(self, *, device: str, kind: str, ranks: int, cores: int | None) -> bool:
        """True if a rank computes under the conditions of the measurement.

        CPU ranks do where `ranks` of a node find as many cores as they have threads.
        """
        if device != self.device:
            return False
        return kind != "cpu" or cores is None or ranks * self.threads <= cores
