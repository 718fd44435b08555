"""The rule by which the losses of parts of a batch make up the loss of the batch.

A mean over rows, over the targets that count, over a mask, over lengths, with weights of classes;
or a sum. Which one it is cannot be told from shapes, so a copy of the model runs on some rows of
the sample and on parts of them: numbers are generic, so that a wrong rule does not agree.
"""

from __future__ import annotations

import logging
import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from math import isfinite

import numpy as np
import torch
from torch import Tensor, nn

from profiles.capture.batch import Batch, LossFn, call_model, loss_of
from profiles.capture.batch_rows import batch_size, split_rows
from profiles.capture.batch_tree import batch_items, batch_tensors, describe, map_batch
from profiles.capture.fake_tensors import stand_ins
from profiles.capture.frames import summary
from profiles.capture.loss_watch import LossWatch
from profiles.errors import BatchError
from profiles.machine.host import machine_memory_bytes
from profiles.model.profile import LossTerms, ModelProfile
from profiles.record import Record
from profiles.torch_compat import is_batch_norm

log = logging.getLogger(__name__)

LossWeight = Callable[[Batch], float | Tensor]

MOST_ROWS = 8
MOST_FLOP = 2e11  # of forward and backward over them: some seconds of a processor
MOST_OF_MEMORY = 1 / 8  # of the machine's, for a copy of the model
TOLERANCE = 1e-5
"""Relative; a mean in float32 rounds by a tenth of it."""
NO_TARGETS = (-100, 0, -1, 255)
"""Values that stand for no target, no token or masked."""


class LossParts(Record):
    """The rule that a sample showed; a value that ranks may send to each other.

    Attributes:
        is_sum: the loss of a batch is the sum of those of its parts.
        terms: what it is a mean over; None: what the profile saw, or rows.
        doubt: why the parts do not make up the whole by any rule.
        refusal: why the model cannot run on a part of the rows.
    """

    is_sum: bool = False
    terms: LossTerms | None = None
    doubt: str = ""
    refusal: str = ""


def seen_on(
    model: nn.Module,
    sample: Batch,
    loss_fn: LossFn | None,
    *,
    profile: ModelProfile,
    said: LossWeight | None,
) -> LossParts:
    """The rule that the sample follows; that of `said`, the profile's targets or rows where nothing
    can be seen: too large a model, one row, random numbers, 16-bit parameters, a sample without
    values.
    """
    batch = _few_rows(model, sample, profile)
    if batch is None:
        return LossParts()
    dims = profile.batch_dims or None
    rows = batch_size(batch, dims)
    try:
        seen = _run(model, batch, loss_fn) or _run(model, batch, loss_fn, is_training=False)
    except Exception as error:  # of the user's code: not on a CPU, or no loss in eval mode
        every = batch_size(sample, dims)
        if rows < every and _runs(model, sample, loss_fn):
            return _refused(f"{rows} of {every}", error)
        log.info("the loss of parts is not compared: %s", summary(error))
        return LossParts()
    if seen is None or not isfinite(seen.loss):
        return LossParts()
    few = max(1, rows * 3 // 8)
    cuts: list[_Cut] = []
    for sizes in dict.fromkeys([(few, rows - few), (rows - few, few)]):
        pieces = split_rows(batch, sizes, dims)
        try:
            parts = [_run(model, p, loss_fn, is_training=seen.is_training) for p in pieces]
        except Exception as error:  # of the user's code
            return _refused(f"{sizes[0]} or {sizes[1]} of {rows}", error)
        losses = [part.loss for part in parts if part is not None]
        if len(losses) < len(parts):
            return LossParts()
        cuts.append(_Cut(pieces, sizes, losses))
    return _rule(cuts, seen, batch, profile=profile, said=said)


@dataclass(frozen=True, slots=True)
class _Seen:
    """A run: its loss, the targets that its cross-entropies took, and the mode."""

    loss: float
    terms: LossTerms | None
    is_training: bool


@dataclass(frozen=True, slots=True)
class _Cut:
    pieces: Sequence[Batch]
    rows: Sequence[int]
    losses: Sequence[float]

    def fits(self, whole: float, counts: Sequence[float]) -> bool:
        if any(not isfinite(count) or count < 0 for count in counts) or not sum(counts):
            return False
        terms = [loss * count for loss, count in zip(self.losses, counts, strict=True) if count]
        return _close(sum(terms) / sum(counts), whole)


def _rule(
    cuts: Sequence[_Cut],
    whole: _Seen,
    batch: Batch,
    *,
    profile: ModelProfile,
    said: LossWeight | None,
) -> LossParts:
    def fits(weight: LossWeight | None) -> bool:
        return all(
            cut.fits(whole.loss, [float(weight(p)) for p in cut.pieces] if weight else cut.rows)
            for cut in cuts
        )

    usual = said or (weight_of(profile.loss_terms) if profile.loss_terms else None)
    if fits(usual):
        return LossParts()
    if said is None:
        if all(_close(sum(cut.losses), whole.loss) for cut in cuts):
            return LossParts(is_sum=True)
        for terms in _candidates(batch, whole.terms, profile):
            if fits(weight_of(terms)):
                return LossParts(terms=terms)
    cut = cuts[0]
    counts = [float(usual(p)) for p in cut.pieces] if usual else cut.rows
    shares = " and ".join(map(str, cut.rows))
    words = " and ".join(f"{loss:.6g}" for loss in cut.losses)
    return LossParts(
        doubt=f"the loss of {sum(cut.rows)} rows of the sample is {whole.loss:.6g}, that of"
        f" {shares} of them {words}: with weights {' to '.join(f'{n:g}' for n in counts)} or any"
        " other no mean of these, and no sum"
    )


def _candidates(
    batch: Batch, seen: LossTerms | None, profile: ModelProfile
) -> Iterator[LossTerms | None]:
    """Other targets, masks and lengths that a loss may be a mean over."""
    if seen is not None:
        yield seen
    yield None
    for name, value in batch_items(batch):
        if not isinstance(value, Tensor) or not isinstance(profile.batch_dims.get(name, 0), int):
            continue
        for skipped in range(2 if value.ndim == 2 else 1):
            if not value.is_floating_point():
                for ignored in NO_TARGETS:
                    yield LossTerms(name=name, skipped=skipped, ignored=ignored)
            yield LossTerms(name=name, skipped=skipped, is_added=True)


def weight_of(terms: LossTerms | None) -> LossWeight | None:
    """The number of terms that the loss of a microbatch is a mean over; None: that of its rows."""
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
        is_counted = counted != terms.ignored
        if terms.weights:
            weights = torch.tensor(terms.weights, dtype=torch.float64, device=counted.device)
            return (weights[torch.where(is_counted, counted, 0)] * is_counted).sum()
        return is_counted.sum()

    return weight


def _few_rows(model: nn.Module, sample: Batch, profile: ModelProfile) -> Batch | None:
    """The rows to run; None where nothing can be run, or seen of it."""
    parameters = list(model.parameters())
    dims = profile.batch_dims or None
    rows = batch_size(sample, dims)
    few = min(rows, MOST_ROWS)
    is_low = any(p.is_floating_point() and p.element_size() < 4 for p in parameters)
    is_large = sum(p.nbytes for p in parameters) > MOST_OF_MEMORY * machine_memory_bytes()
    if rows < 2 or is_low or is_large or profile.flop(few) > MOST_FLOP or profile.devices:
        return None
    if any(tensor.is_meta for tensor in batch_tensors(sample)):
        return None
    return split_rows(sample, [few, rows - few], dims)[0]


def _refused(rows: str, error: Exception) -> LossParts:
    what = f"the model does not run on {rows} rows of the sample"
    return LossParts(refusal=f"{what}: {summary(error)}")


def _runs(model: nn.Module, batch: Batch, loss_fn: LossFn | None) -> bool:
    try:
        _run(model, batch, loss_fn)
    except Exception:  # of the user's code
        return False
    return True


def _run(
    model: nn.Module, batch: Batch, loss_fn: LossFn | None, *, is_training: bool = True
) -> _Seen | None:
    """The loss of copies on the CPU; None where random numbers are drawn.

    Batch norms use their running statistics: that they see parts of a batch is known, and said.
    """
    modules = [model, loss_fn] if isinstance(loss_fn, nn.Module) else [model]
    with torch.inference_mode(False), torch.enable_grad(), stand_ins(modules, copies=True) as fakes:
        for module in model.modules():
            module.training &= is_training and not is_batch_norm(module)
        _fill_zeros(model)
        given = map_batch(fakes.of, batch)
        before = _random_state()
        with LossWatch(given) as watch:
            output = call_model(model, given, has_target=loss_fn is not None)
            loss = float(loss_of(output, given, loss_fn).detach())
        drew = before != _random_state()
        return None if drew else _Seen(loss, watch.terms, is_training)


def _fill_zeros(model: nn.Module) -> None:
    """Give weights that begin as zeros some numbers: nothing else would reach the loss."""
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim > 1 and parameter.is_floating_point() and not parameter.any():
                parameter.normal_(std=0.02, generator=generator)


def _random_state() -> tuple[object, ...]:
    array = tuple(np.random.get_state())[2]  # its place; the rest changes with it
    return torch.get_rng_state().numpy().tobytes(), random.getstate(), array


def _close(got: float, wanted: float) -> bool:
    return abs(got - wanted) <= TOLERANCE * abs(wanted) + 1e-12
