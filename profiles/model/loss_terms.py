"""Targets that a mean loss is a mean over."""

from __future__ import annotations

from pydantic import NonNegativeInt

from profiles.record import Record


class LossTerms(Record):
    """A loss that is the mean over the targets that are not `ignored`, or over what is added up.

    Attributes:
        name: of the targets in the batch.
        skipped: first elements of their second dimension that are compared with nothing: one where
            a token's target is the label after it.
        ignored: value of the targets that do not count, `ignore_index` of torch's cross-entropy;
            None: those that are no number (nan).
        weights: of the classes, where a target counts as much as its class.
        least: the smallest target that counts, in place of `ignored`: 0 where all negative ones
            stand for none.
        is_added: the values themselves count: those of a mask, or lengths.
    """

    name: str
    skipped: NonNegativeInt = 0
    ignored: int | None = -100
    weights: tuple[float, ...] = ()
    least: int | None = None
    is_added: bool = False
