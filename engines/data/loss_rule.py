"""The rule by which the losses of parts of a batch make up the loss of the batch.

A mean over parts of equal weight, over the targets that count, over a mask, over lengths, with
weights of classes; or a sum. Parts are rows, or the tokens of a rank.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import isfinite

import torch
from pydantic import Field
from torch import Tensor

from engines.data.batch_variants import Change, Variant
from profiles.capture.batch.call import Batch
from profiles.capture.batch.tree import batch_items, describe
from profiles.errors import BatchError
from profiles.model.loss_terms import LossTerms
from profiles.record import Record

LossWeight = Callable[[Batch], float | Tensor]

TOLERANCE = 1e-5
"""Relative; a mean in float32 rounds by a tenth of it."""


class Unless(Record):
    """A value that the rule does not hold for: `change` in the tensor `name`; `words`: what was
    seen with it."""

    name: str
    change: Change
    words: str


class LossParts(Record):
    """The rule that a sample showed; a value that ranks may send to each other.

    Attributes:
        is_sum: the loss of a batch is the sum of those of its parts.
        terms: what it is a mean over; None: rows, or parts of equal weight.
        unless: values in a batch for which there is no rule; the sample has none of them.
        doubt: why the parts do not make up the whole by any rule.
        refusal: why the model cannot run on a part of the rows.
        state: words for what a forward changes that the next one computes with.
        state_of_rows: words for buffers and attributes that a forward changes by its rows.
        state_between: where there is a `state`, names of what code between units changes, with the
            units that the forward calls before it does so last.
        parameter_of_rows: a parameter that a forward changes by its rows.
        stepped_by_hook, bent_by_hook: see `engines.data.gradient_hooks`.
        unlike: a block that is to be recomputed, and computes something else when it runs again.
        draws: blocks that are to be recomputed drew from Python's or numpy's generators, or might.
    """

    is_sum: bool = False
    terms: LossTerms | None = None
    unless: tuple[Unless, ...] = ()
    doubt: str = ""
    refusal: str = ""
    state: str = ""
    state_of_rows: str = ""
    state_between: dict[str, tuple[str, ...]] = Field(default_factory=dict)
    parameter_of_rows: str = ""
    stepped_by_hook: str = ""
    bent_by_hook: str = ""
    unlike: str = ""
    draws: bool = True

    def doubt_of(self, batch: Batch) -> str:
        """Say why the parts of this batch make up the whole by no rule; "" if they do."""
        named = dict(batch_items(batch)) if self.unless else {}
        for each in self.unless:
            value = named.get(each.name)
            if isinstance(value, Tensor) and each.change.is_in(value):
                return each.words
        return self.doubt


@dataclass(frozen=True, slots=True)
class CutBatch:
    """A batch in parts: each with its rows (or another plain weight) and its loss."""

    pieces: Sequence[Batch]
    rows: Sequence[int]
    losses: Sequence[float]

    def counts(self, weight: LossWeight | None) -> Sequence[float]:
        return [float(weight(piece)) for piece in self.pieces] if weight else self.rows


@dataclass(frozen=True, slots=True)
class TriedBatch:
    """A batch that was run whole and in parts.

    Attributes:
        terms: the targets that cross-entropies over the whole batch took.
        variant: what was changed of the sample; None: nothing.
    """

    loss: float
    cuts: Sequence[CutBatch]
    terms: LossTerms | None = None
    variant: Variant | None = None

    def fits(self, weight: LossWeight | None, tolerance: float = TOLERANCE) -> bool:
        return all(self._makes_up(cut, cut.counts(weight), tolerance) for cut in self.cuts)

    def is_sum(self, tolerance: float) -> bool:
        return all(is_close(sum(cut.losses), self.loss, tolerance) for cut in self.cuts)

    def said(self, of_parts: str) -> str:
        """Its losses; `of_parts`: "of 3 and 5 of 8 rows"."""
        words = " and ".join(f"{loss:.6g}" for loss in self.cuts[0].losses)
        changed = ""
        if self.variant is not None:
            names = ", ".join(f"`{name}`" for name in self.variant.names)
            changed = f"with {self.variant.change} in {names} "
        return (
            f"{changed}the loss of the sample is {self.loss:.6g}, the losses {of_parts} are"
            f" {words}: no mean of these over rows, targets, a mask or lengths, and no sum"
        )

    def _makes_up(self, cut: CutBatch, counts: Sequence[float], tolerance: float) -> bool:
        if any(not isfinite(count) or count < 0 for count in counts) or not sum(counts):
            return False
        terms = [loss * count for loss, count in zip(cut.losses, counts, strict=True) if count]
        return is_close(sum(terms) / sum(counts), self.loss, tolerance)


def rule_of(
    sample: TriedBatch,
    variants: Sequence[TriedBatch],
    possible: Iterable[LossTerms | None],
    *,
    of_parts: str,
    tolerance: float = TOLERANCE,
) -> LossParts | None:
    """The rule that the sample follows and the most of its variants: a mean over the first that
    fits of what is `possible`, or a sum, which is tried second; None if there is none."""

    def fits(rule: LossParts, trial: TriedBatch) -> bool:
        if rule.is_sum:
            return trial.is_sum(tolerance)
        try:
            return trial.fits(weight_of(rule.terms), tolerance)
        except (BatchError, IndexError, RuntimeError, TypeError):
            return False  # not in all parts; no numbers of classes, or complex ones

    first, *means = [LossParts(terms=terms) for terms in possible]
    best: LossParts | None = None
    for rule in (first, LossParts(is_sum=True), *means):
        if not fits(rule, sample):
            continue
        broken = [trial for trial in variants if not fits(rule, trial)]
        if best is None or len(broken) < len(best.unless):
            best = rule.model_copy(update={"unless": tuple(_unless(broken, of_parts))})
        if not broken:
            break
    return best


def _unless(broken: Iterable[TriedBatch], of_parts: str) -> Iterator[Unless]:
    for trial in broken:
        assert trial.variant is not None
        name, change = trial.variant.names[0], trial.variant.change
        yield Unless(name=name, change=change, words=trial.said(of_parts))


def possible_terms(
    named: Mapping[str, Tensor], seen: LossTerms | None, compared: Sequence[int]
) -> Iterator[LossTerms]:
    """Targets, masks and lengths that a loss may be a mean over.

    Args:
        named: the tensors of a batch that have rows.
        seen: what its cross-entropies took.
        compared: numbers that stand for no target, perhaps.
    """
    if seen is not None:
        yield seen
    for name, value in named.items():
        for skipped in range(2 if value.ndim == 2 else 1):
            of_value = LossTerms(name=name, skipped=skipped)
            if seen is not None and not value.is_floating_point():
                yield of_value.model_copy(update={"ignored": seen.ignored, "weights": seen.weights})
            for number in (*compared, None):
                yield of_value.model_copy(update={"ignored": number})
            for least in dict.fromkeys([0, 1, *(number + 1 for number in compared)]):
                yield of_value.model_copy(update={"least": least})
            yield of_value.model_copy(update={"is_added": True})


def weight_of(terms: LossTerms | None) -> LossWeight | None:
    """The number of terms that the loss of a part is a mean over; None: that of its rows."""
    if terms is None:
        return None

    def weight(piece: Batch) -> Tensor:
        targets = dict(batch_items(piece)).get(terms.name)
        if not isinstance(targets, Tensor) or targets.ndim <= (terms.skipped > 0):
            raise BatchError(
                f"`{terms.name}` is missing, the loss of the sample was a mean over it",
                where=describe(piece),
                hints=["give it, or say what the loss is a mean over: `loss_weight=`"],
            )
        counted = targets[:, terms.skipped :] if terms.skipped else targets
        if terms.is_added:
            return counted.double().sum()
        if terms.ignored is None:
            is_counted = ~counted.isnan()
        elif terms.least is not None:
            is_counted = counted >= terms.least
        else:
            is_counted = counted != terms.ignored
        if terms.weights:
            weights = torch.tensor(terms.weights, dtype=torch.float64, device=counted.device)
            return (weights[torch.where(is_counted, counted, 0)] * is_counted).sum()
        return is_counted.sum()

    return weight


def is_close(got: float, wanted: float, tolerance: float = TOLERANCE) -> bool:
    return abs(got - wanted) <= tolerance * abs(wanted) + 1e-12
