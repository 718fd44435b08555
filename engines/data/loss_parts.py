"""Losses of parts of a batch beside that of the whole, to find the rule that they follow.

Which one it is cannot be told from shapes, so a copy of the model runs on some rows of the sample
and on parts of them, as they are and with values that the sample happens not to have: numbers are
generic, so that a wrong rule does not agree.
"""

from __future__ import annotations

import logging
import pickle
import random
import warnings
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from math import isfinite, sqrt

import numpy as np
import torch
from torch import Tensor, nn

from engines.data.batch_variants import ComparedNumbers, Variant, ran_variants, with_rows
from engines.data.drawn_alike import DrawnAlike
from engines.data.loss_rule import (
    TOLERANCE,
    CutBatch,
    LossParts,
    LossWeight,
    TriedBatch,
    is_close,
    possible_terms,
    rule_of,
    weight_of,
)
from engines.data.state_between import StateBetween
from profiles.capture.batch.call import Batch, LossFn, call_model, loss_of
from profiles.capture.batch.dims import Dims
from profiles.capture.batch.rows import batch_size, split_rows
from profiles.capture.batch.tree import batch_tensors, map_batch
from profiles.capture.fakes.code_states import generators_of
from profiles.capture.fakes.object_states import ObjectState
from profiles.capture.fakes.tensors import stand_ins
from profiles.capture.frames import summary
from profiles.capture.loss_watch import LossWatch
from profiles.machine.host import machine_memory_bytes
from profiles.model.flow import GLUE, LOSS
from profiles.model.profile import LossTerms, ModelProfile
from profiles.torch_compat import is_batch_norm, version_of
from profiles.units import format_percent

log = logging.getLogger(__name__)

MOST_ROWS = 8
SLOPE_TOLERANCE = 1e-2
"""Of gradients: kernels round by the number of rows, and at a kink that turns into another one."""
MOST_FLOP = 2e11  # of forward and backward over them: some seconds of a processor
MOST_OF_MEMORY = 1 / 8  # of the machine's, for a copy of the model


def seen_on(
    model: nn.Module,
    sample: Batch,
    loss_fn: LossFn | None,
    *,
    profile: ModelProfile,
    said: LossWeight | None,
) -> LossParts:
    """The rule that the sample follows, and batches like it; that of `said`, the profile's targets
    or rows where nothing can be seen: too large a model, one row, random numbers of a kind that
    `DrawnAlike` does not know, 16-bit parameters, a sample without values.
    """
    unseen = LossParts(terms=profile.loss_terms)
    batch = few_rows(model, sample, profile)
    if batch is None:
        return unseen
    dims = profile.batch_dims or None
    rows = batch_size(batch, dims)
    try:
        runs = (_run(model, batch, loss_fn, how=how, times=2) for how in _WAYS)
        seen = next(filter(None, runs), None)
    except Exception as error:  # of the user's code: not on a CPU, or no loss in eval mode
        every = batch_size(sample, dims)
        if rows < every and _runs(model, sample, loss_fn):
            return _refused(f"{rows} of {every}", error)
        log.info("the loss of parts is not compared: %s", summary(error))
        return unseen
    if seen is None or not isfinite(seen.loss):
        return unseen
    few = max(1, rows * 3 // 8)
    cuts: list[CutBatch] = []
    by_rows: dict[str, None] = {}
    for sizes in dict.fromkeys([(few, rows - few), (rows - few, few)]):
        try:
            cut = _cut(model, batch, sizes, loss_fn, dims, seen, by_rows)
        except Exception as error:  # of the user's code
            return _refused(f"{sizes[0]} or {sizes[1]} of {rows}", error)
        if cut is None:
            return unseen
        cuts.append(cut)
    state_of_rows = _state_of_rows(by_rows)
    of_rows = {name for name, _ in model.named_parameters()} & by_rows.keys()
    parameter_of_rows = min(of_rows, default="")

    spent = profile.flop(rows)

    def tried(variant: Variant) -> TriedBatch | None:
        nonlocal spent
        spent += profile.flop(rows)
        if spent > MOST_FLOP:
            return None
        try:
            with warnings.catch_warnings(action="ignore"):
                whole = _run(model, variant.batch, loss_fn, how=seen.how)
                if whole is None or not isfinite(whole.loss):
                    return None
                cut = _cut(model, variant.batch, cuts[0].rows, loss_fn, dims, whole, {})
        except Exception:  # of the user's code: no values that a batch may have
            return None
        return TriedBatch(whole.loss, [cut], whole.terms, variant) if cut is not None else None

    first = TriedBatch(seen.loss, cuts, seen.terms)
    of_parts = f"of {' and '.join(map(str, cuts[0].rows))} of {rows} rows"
    if said is not None:
        is_known = first.fits(said) or seen.how.is_drawn_alike
        doubt = "" if is_known else first.said(of_parts)
        return LossParts(
            doubt=doubt, state_of_rows=state_of_rows, parameter_of_rows=parameter_of_rows
        )
    named = with_rows(batch, profile.batch_dims)
    possible = [profile.loss_terms, None, *possible_terms(named, seen.terms, seen.compared)]
    rule: LossParts | None = None
    for one_by_one in (False, True):
        variants = ran_variants(
            batch, dims or {}, tried, numbers=seen.compared, one_by_one=one_by_one
        )
        rule = rule_of(first, list(variants), possible, of_parts=of_parts)
        if rule is None or not rule.unless:
            break
    rule = rule or LossParts(doubt=first.said(of_parts))
    if seen.how.is_drawn_alike and (rule.doubt or rule.unless):
        return unseen  # rows may differ by what they draw alone
    if not rule.doubt:
        doubt = _doubt_of_slopes(model, batch, loss_fn, first, rule, seen.how)
        rule = rule.model_copy(update={"doubt": doubt})
    known: dict[str, object] = {
        "state": _state(seen),
        "state_of_rows": state_of_rows,
        "parameter_of_rows": parameter_of_rows,
    }
    if known["state"]:
        units = {call.unit for call in profile.flow.calls} - {GLUE, LOSS}
        watch = StateBetween(model, units)
        _run(model, batch, loss_fn, how=seen.how, around=watch.watching)
        known["state_between"] = watch.changed
    return rule.model_copy(update=known)


@dataclass(frozen=True, slots=True)
class _How:
    """A way to run a copy: in training mode, with random numbers that all rows share."""

    is_training: bool
    is_drawn_alike: bool


# The first in which no random numbers are drawn, as a dropout's are not in an evaluation.
_WAYS = (_How(True, False), _How(False, False), _How(True, True))


@dataclass(frozen=True, slots=True)
class _Seen:
    """A run: its loss, the targets that its cross-entropies took, the numbers that tensors were
    compared with, and how it ran; `again`: the loss of the last run over the same rows, and
    `changed`: buffers, attributes and parameters that the first one changed, as it left them."""

    loss: float
    again: float
    changed: Mapping[str, Tensor]
    terms: LossTerms | None
    compared: tuple[int, ...]
    how: _How
    slopes: Sequence[Tensor] = ()


def _doubt_of_slopes(
    model: nn.Module,
    batch: Batch,
    loss_fn: LossFn | None,
    whole: TriedBatch,
    rule: LossParts,
    how: _How,
) -> str:
    """The reason why gradients of parts make up that of the whole by no rule that losses follow:
    one is divided by itself, detached, say. Empty where they do, or cannot be compared."""
    cut, weight = whole.cuts[0], weight_of(rule.terms)
    counts = [1.0 for _ in cut.rows] if rule.is_sum else cut.counts(weight)
    total = 1.0 if rule.is_sum else sum(counts)
    try:
        slopes, *of_parts = (
            seen.slopes
            for part in (batch, *cut.pieces)
            if (seen := _run(model, part, loss_fn, how=how, has_slopes=True)) is not None
        )
    except Exception:  # of the user's code: no gradient, or none on a CPU
        return ""
    size = error = 0.0
    for slope, *parts in zip(slopes, *of_parts, strict=True):
        terms = [part * (count / total) for part, count in zip(parts, counts, strict=True)]
        error += float((slope - sum(terms)).abs().square().sum())
        size += sum(float(term.abs().square().sum()) for term in terms)
    difference = sqrt(error / size) if size else 0.0
    if not difference > SLOPE_TOLERANCE:
        return ""
    words = " and ".join(map(str, cut.rows))
    return (
        f"the losses of {words} rows of the sample make up that of all of them, their gradients do"
        f" not: they differ by {format_percent(difference)}, as where a factor of all rows is"
        " detached"
    )


def _state(seen: _Seen) -> str:
    """See `LossParts.state`."""
    if is_close(seen.again, seen.loss) or not isfinite(seen.again):
        return ""
    names = _some(seen.changed)
    return (
        f"over the same rows the loss of the sample is {seen.loss:.6g}, and {seen.again:.6g} when"
        f" the forward runs again: it changes {names or 'a parameter or an attribute'}"
    )


def _state_of_rows(names: Iterable[str]) -> str:
    """See `LossParts.state_of_rows`."""
    return f"the forward changes {_some(names)} by the rows that it sees" if names else ""


def _some(names: Iterable[str]) -> str:
    return ", ".join(f"`{name}`" for name in list(names)[:3])


def _cut(
    model: nn.Module,
    batch: Batch,
    sizes: Sequence[int],
    loss_fn: LossFn | None,
    dims: Dims | None,
    seen: _Seen,
    by_rows: dict[str, None],
) -> CutBatch | None:
    """The losses of parts of the batch; None where random numbers are drawn. `by_rows` gets the
    buffers and attributes that a part leaves otherwise than the whole does."""
    pieces = split_rows(batch, sizes, dims)
    parts = [_run(model, piece, loss_fn, how=seen.how) for piece in pieces]
    ran = [part for part in parts if part is not None]
    for part in ran:
        for name in seen.changed.keys() | part.changed.keys():
            if not _is_alike(seen.changed.get(name), part.changed.get(name)):
                by_rows[name] = None
    return CutBatch(pieces, sizes, [part.loss for part in ran]) if len(ran) == len(parts) else None


def _is_alike(one: Tensor | None, other: Tensor | None) -> bool:
    """True if two runs left a buffer equal, but for rounding."""
    if one is None or other is None or one.shape != other.shape:
        return False
    return torch.allclose(one, other, rtol=TOLERANCE, equal_nan=True)


def few_rows(model: nn.Module, sample: Batch, profile: ModelProfile) -> Batch | None:
    """The rows to run; None where nothing can be run, or seen of it."""
    parameters = list(model.parameters())
    dims = profile.batch_dims or None
    rows = batch_size(sample, dims)
    few = min(rows, MOST_ROWS)
    while few > 2 and profile.flop(few) > MOST_FLOP:
        few //= 2
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
    model: nn.Module,
    batch: Batch,
    loss_fn: LossFn | None,
    *,
    how: _How = _WAYS[0],
    times: int = 1,
    has_slopes: bool = False,
    around: Callable[[], AbstractContextManager[None]] = nullcontext,
) -> _Seen | None:
    """The loss of copies on the CPU; None where random numbers are drawn.

    Batch norms use their running statistics: that they see parts of a batch is known, and said.
    """
    runs = [model] if loss_fn is None else [model, loss_fn]
    with torch.inference_mode(False), torch.enable_grad(), stand_ins(runs, copies=True) as fakes:
        for module in model.modules():
            module.training &= how.is_training and not is_batch_norm(module)
        fill_zeros(model)
        _set_copies_apart(model)
        given = map_batch(fakes.of, batch)
        drawn_from = generators_of(runs)
        before = random_state(drawn_from)
        before_it = {name: tensor.clone() for name, tensor in _state_tensors(model).items()}
        versions = {name: version_of(p) for name, p in model.named_parameters()}
        losses: list[float] = []
        changed: dict[str, Tensor] = {}
        alike = DrawnAlike() if how.is_drawn_alike else nullcontext()
        with LossWatch(given) as watch, ComparedNumbers() as compared, alike:
            for _ in range(times):
                with around():
                    output = call_model(model, given, has_target=loss_fn is not None)
                loss = loss_of(output, given, loss_fn)
                losses.append(float(loss.detach()))
                if len(losses) == 1:
                    changed = _changed(model, before_it) | {
                        name: parameter.detach().clone()
                        for name, parameter in model.named_parameters()
                        if version_of(parameter) != versions[name]
                    }
        if before != random_state(drawn_from):
            return None
        slopes = _slopes(model, loss) if has_slopes else ()
        return _Seen(losses[0], losses[-1], changed, watch.terms, compared.numbers, how, slopes)


def _slopes(model: nn.Module, loss: Tensor) -> Sequence[Tensor]:
    """Gradients of what learns, dense ones, zeros where the loss does not depend on it."""
    learns = [parameter for parameter in model.parameters() if parameter.requires_grad]
    slopes = torch.autograd.grad(loss, learns, allow_unused=True, materialize_grads=True)
    return [slope.to_dense() if slope.is_sparse else slope for slope in slopes]


def _state_tensors(model: nn.Module) -> dict[str, Tensor]:
    """Buffers, and tensors that modules have as plain attributes."""
    tensors = dict(model.named_buffers())
    for path, module in model.named_modules():
        for name, value in vars(module).items():
            if isinstance(value, Tensor) and not value.requires_grad:
                tensors[f"{path}.{name}".lstrip(".")] = value
    return tensors


def _changed(model: nn.Module, before: Mapping[str, Tensor]) -> dict[str, Tensor]:
    after = _state_tensors(model)
    return {
        name: after[name].clone()
        for name, old in before.items()
        if name in after and (old.dtype != after[name].dtype or not torch.equal(old, after[name]))
    }


def fill_zeros(model: nn.Module) -> None:
    """Give weights that begin as zeros some numbers: nothing else would reach the loss."""
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim > 1 and parameter.is_floating_point() and not parameter.any():
                parameter.normal_(std=0.02, generator=generator)


def _set_copies_apart(model: nn.Module) -> None:
    """Give frozen parameters that begin as copies of others, as a teacher's, other numbers: a
    forward that brings them nearer would not show."""
    generator = torch.Generator().manual_seed(0)
    alike: dict[tuple[object, ...], list[nn.Parameter]] = defaultdict(list)
    for parameter in model.parameters():
        if parameter.is_floating_point():
            first = parameter.detach().flatten()[:8].tolist()  # few are compared as a whole
            alike[parameter.shape, *first].append(parameter)
    with torch.no_grad():
        for copies in alike.values():
            for copy in copies:
                others = (p for p in copies if p is not copy)
                if not copy.requires_grad and any(torch.equal(copy, p) for p in others):
                    copy.mul_(1 + 0.1 * torch.randn(copy.shape, generator=generator))


def random_state(drawn_from: Sequence[ObjectState]) -> tuple[object, ...]:
    """Of the global generators and of these, by now; two are compared."""
    array = tuple(np.random.get_state())[2]  # its place; the rest changes with it
    others = (pickle.dumps(state.now().part) for state in drawn_from)
    return torch.get_rng_state().numpy().tobytes(), random.getstate(), array, *others
