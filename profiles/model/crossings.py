"""Traffic between the devices of a manually placed module."""

from __future__ import annotations

from pydantic import NonNegativeInt, PositiveInt

from profiles.model.affine import Affine
from profiles.record import Record


class DeviceCrossing(Record):
    """All that one forward copies from a device to another, and what comes back for it.

    Attributes:
        bytes, copies: of the forward.
        back_bytes, back_copies: gradients, in the backward.
    """

    source: str
    target: str
    bytes: Affine
    copies: PositiveInt
    back_bytes: Affine = Affine()
    back_copies: NonNegativeInt = 0
