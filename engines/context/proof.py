"""Prove that a model over a part of the tokens computes what it computes over all of them.

A small copy with random numbers runs once over a short sequence, and every call of attention is
recorded. Then it runs over each rank's tokens: each call of attention must have the rank's part of
the recorded arguments, and returns the rank's part of the recorded result. If all arguments and
outputs are right, then by induction over the calls the ranks together compute the same: the ring is
exact. Numbers are random, so two different functions agree with probability zero; and values that
the sample happens not to have (no target, masked) are put in.

Dependence on the length itself (a sliding window, a mask) shows in a run on fake tensors over the
sample as it is.
"""

from __future__ import annotations

import functools
import inspect
import warnings
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import product

import torch
import torch.nn.functional as F
from pydantic import PositiveInt
from torch import Tensor, nn

from engines.context.attention import Counting, OwnTokens, require_plain
from engines.context.input_sharding import InputSharding, length_of
from engines.context.model_copy import copied, short
from engines.context.tokens import part
from engines.data.batch_variants import ComparedNumbers, Variant, ran_variants
from engines.data.loss_rule import CutBatch, LossParts, TriedBatch, possible_terms, rule_of
from profiles.capture.batch.call import Batch, LossFn, call_model, find_loss, loss_of
from profiles.capture.batch.tree import describe, map_batch
from profiles.capture.fakes.mode import FakeRunMode
from profiles.capture.fakes.tensors import preserved_random_state, stand_ins
from profiles.capture.frames import summary
from profiles.capture.loss_watch import LossWatch
from profiles.errors import AdvisorError, BatchError, ModelError, PlanError
from profiles.model.loss_terms import LossTerms
from profiles.record import Record
from profiles.torch_compat import tensors_in, without_onednn

TOLERANCE = 1e-4
"""Relative; rounding of float32 stays far below, mistakes are of the order of 1."""


LOSS = -1
"""In place of a dimension: the output is the loss."""


class SequenceProof(Record):
    """A proof that a model may run over a part of the tokens, and how; a value that ranks may send
    to each other.

    Attributes:
        size: ranks of the cp axis.
        outputs: of every tensor that it returns, the dimension that is tokens; None where it has
            all of it, or `LOSS`.
        counts: numbers of other things that it counts to, where it counts tokens itself.
        loss: the rule by which the losses of the ranks make up that over all tokens.
    """

    size: PositiveInt
    way: InputSharding
    outputs: tuple[int | None, ...]
    counts: frozenset[int] = frozenset()
    loss: LossParts = LossParts()

    def require_places(self, length: int, size: int) -> None:
        """Require that a model which counts tokens itself counts nothing else to the same number.

        Raises:
            BatchError: its numbers would be taken for the positions of a rank's tokens.
        """
        if length // size in self.counts:
            raise BatchError(
                f"a rank of {size} has {length // size} of {length} tokens, and the model counts to"
                f" {length // size} for something else too: their positions are ambiguous",
                hints=["give sequences of another length, or set cp=1"],
            )


def prove(model: nn.Module, sample: Batch, loss_fn: LossFn | None, *, size: int) -> SequenceProof:
    """Prove that `model` runs over a part of the tokens on each of `size` ranks.

    Raises:
        PlanError: no input sharding computes what the whole model computes, it does not run over
            few tokens, attention is masked, or tokens cannot be cut into 2 * `size` equal chunks.
    """
    require_equal_chunks(sample, size)
    require_unmasked(sample)
    counts = _require_plain_attention(model, sample, has_target=loss_fn is not None)
    length = length_of(sample)
    why_not = "it makes no call of scaled_dot_product_attention"
    small = short(sample, size)
    with torch.inference_mode(False), preserved_random_state(), torch.no_grad():
        copy = copied(model)
        with ComparedNumbers() as compared:
            try:
                whole = _whole(copy, small, loss_fn)
            except Exception as error:  # of the user's code
                raise PlanError(
                    f"the model does not run over a shorter sequence: {summary(error)}",
                    where=f"cp={size}, tried on a short sample: {describe(small)}",
                    hints=["a table or a mask has the length of the whole sequence", "or set cp=1"],
                ) from error
        wholes = [whole, *_variants(copy, small, loss_fn, compared.numbers)]
        for way in _input_shardings(model, small, has_target=loss_fn is not None):
            try:
                outputs, rule = _require_same(copy, wholes, way, loss_fn, size, compared.numbers)
                others = frozenset() if way.gives_positions else counts - {length}
                proof = SequenceProof(size=size, way=way, outputs=outputs, counts=others, loss=rule)
                proof.require_places(length, size)
                return proof
            except _SequenceDiffers as difference:
                why_not = str(difference)
            except AdvisorError as error:
                why_not = error.what
            except Exception as error:  # of the user's code, which may assert a length say
                why_not = summary(error)
    raise PlanError(
        f"the model over a part of the tokens is not what it is over all of them: {why_not}",
        where=f"cp={size}, attention calls seen: {len(whole.calls)}",
        hints=[
            "tokens may mix in scaled_dot_product_attention alone"
            " (transformers: attn_implementation='sdpa')",
            "a model that counts tokens in a way of its own takes `position_ids` in its forward",
            "or set cp=1",
        ],
    )


def require_equal_chunks(batch: Batch, size: int) -> None:
    """Every rank has two chunks of equal length.

    Raises:
        BatchError: they would not be equal.
    """
    length = length_of(batch)
    if length % (2 * size):
        raise BatchError(
            f"{length} tokens cannot be cut into {2 * size} equal chunks, two for each of"
            f" {size} ranks: {length} % {2 * size} = {length % (2 * size)}",
            hints=[
                f"cut or pad sequences to {length - length % (2 * size) or 2 * size} or"
                f" {length + 2 * size - length % (2 * size)} tokens"
            ],
        )


def require_unmasked(batch: Batch) -> None:
    """No row has padding.

    Raises:
        BatchError: an attention_mask hides something.
    """
    mask = batch.get("attention_mask") if isinstance(batch, Mapping) else None
    if mask is not None and not mask.is_meta and not bool(mask.all()):
        raise BatchError(
            "the attention_mask hides tokens: a rank has a part of the tokens, and the mask of the"
            " others is unknown to it",
            hints=[
                "leave the mask out where padding comes after the tokens: causal attention does not"
                " see it, and labels of -100 keep it out of the loss",
                "or set cp=1",
            ],
        )


class _SequenceDiffers(Exception):
    """A difference from the whole model."""


@dataclass(frozen=True, slots=True)
class _Call:
    """One call of attention: query, key, value and result."""

    given: tuple[Tensor, Tensor, Tensor]
    is_causal: bool
    scale: float
    out: Tensor


@dataclass(frozen=True, slots=True)
class _Whole:
    """A run over all tokens.

    Attributes:
        variant: what was changed of the sample.
        terms: the targets that its cross-entropies took.
    """

    batch: Batch
    variant: Variant | None
    calls: list[_Call]
    outputs: list[Tensor]
    loss: Tensor | None
    terms: LossTerms | None


class _Recorder:
    """Attention as it is, recorded."""

    def __init__(self) -> None:
        self.calls: list[_Call] = []

    def __call__(
        self, query: Tensor, key: Tensor, value: Tensor, *, is_causal: bool, scale: float
    ) -> Tensor:
        out = F.scaled_dot_product_attention(
            query,
            key,
            value,
            is_causal=is_causal,
            scale=scale,
            enable_gqa=query.shape[1] != key.shape[1],
        )
        self.calls.append(_Call((query, key, value), is_causal, scale, out))
        return out


class _SimulatedRing:
    """The ring's answers to one rank, if every rank asks for its part of the recorded calls."""

    def __init__(self, calls: list[_Call], *, rank: int, size: int) -> None:
        self._calls = iter(calls)
        self._part = functools.partial(part, rank=rank, size=size, dim=2)

    def __call__(
        self, query: Tensor, key: Tensor, value: Tensor, *, is_causal: bool, scale: float
    ) -> Tensor:
        call = next(self._calls, None)
        if call is None or call.is_causal is not is_causal or call.scale != scale:
            raise _SequenceDiffers("it calls attention in another way than over all tokens")
        for name, own, whole in zip(
            ("query", "key", "value"), (query, key, value), call.given, strict=True
        ):
            if not _close(own, self._part(whole)):
                raise _SequenceDiffers(f"the {name} of its tokens differs (positions, or inputs)")
        return self._part(call.out)

    def require_end(self) -> None:
        if next(self._calls, None) is not None:
            raise _SequenceDiffers("it calls attention less often than over all tokens")


def _whole(
    copy: nn.Module, batch: Batch, loss_fn: LossFn | None, variant: Variant | None = None
) -> _Whole:
    recorder = _Recorder()
    with LossWatch(batch) as watch, OwnTokens(recorder, places=None, model=copy):
        output = call_model(copy, batch, has_target=loss_fn is not None)
        loss = loss_of(output, batch, loss_fn) if loss_fn is not None else find_loss(output)
    return _Whole(batch, variant, recorder.calls, tensors_in(output), loss, watch.terms)


def _variants(
    copy: nn.Module, small: Batch, loss_fn: LossFn | None, compared: Sequence[int]
) -> Iterator[_Whole]:
    """Runs over the sample with other values in it; an attention_mask that hides something is
    refused in each step.

    Raises:
        ModelError: attention is masked with some values.
    """

    def run(variant: Variant) -> _Whole | None:
        try:
            with warnings.catch_warnings(action="ignore"):
                whole = _whole(copy, variant.batch, loss_fn, variant)
        except ModelError:
            raise
        except Exception:  # of the user's code: no values that a batch may have
            return None
        is_number = whole.loss is None or bool(whole.loss.isfinite())
        return whole if is_number and all(_is_finite(t) for t in whole.outputs) else None

    fixed = ["attention_mask"]
    yield from ran_variants(small, {}, run, numbers=compared, fixed=fixed, one_by_one=True)


def _require_same(
    copy: nn.Module,
    wholes: Sequence[_Whole],
    way: InputSharding,
    loss_fn: LossFn | None,
    size: int,
    compared: Sequence[int],
) -> tuple[tuple[int | None, ...], LossParts]:
    """Run it over every rank's tokens; the dimensions of its outputs that are tokens, and the rule
    by which the losses of the ranks make up that over all tokens."""
    trials: list[TriedBatch] = []
    outputs: list[tuple[int | None, ...]] = []
    for whole in wholes:
        losses: list[float] = []
        for rank in range(size):
            dims, loss = _run_part(copy, whole, way, loss_fn, rank=rank, size=size)
            losses += [] if loss is None else [float(loss)]
        outputs.append(dims)
        if whole.loss is not None:
            cut = CutBatch(way.counted(whole.batch, size=size), [1] * size, losses)
            trials.append(TriedBatch(float(whole.loss), [cut], whole.terms, whole.variant))
    if not trials:
        return outputs[0], LossParts()
    first, *variants = trials
    possible = possible_terms(first.cuts[0].pieces[0], first.terms, compared)
    terms = [each for each in possible if not each.skipped]  # each token has its target beside it
    of_parts = f"of the tokens of {size} ranks"
    rule = rule_of(first, variants, [None, *terms], of_parts=of_parts, tolerance=TOLERANCE)
    if rule is None:
        raise _SequenceDiffers(first.said(of_parts))
    return outputs[0], rule


def _run_part(
    copy: nn.Module,
    whole: _Whole,
    way: InputSharding,
    loss_fn: LossFn | None,
    *,
    rank: int,
    size: int,
) -> tuple[tuple[int | None, ...], Tensor | None]:
    """Run it over one rank's tokens; the dimensions of its outputs that are tokens, and its
    loss."""
    own, keywords, where = way.part(whole.batch, rank=rank, size=size)
    ring = _SimulatedRing(whole.calls, rank=rank, size=size)
    with OwnTokens(ring, places=where, model=copy):
        called = functools.partial(copy, **keywords)
        output = call_model(called, own, has_target=loss_fn is not None, forward=copy.forward)
    ring.require_end()
    loss = loss_of(output, own, loss_fn) if loss_fn is not None else find_loss(output)
    return _require_parts(tensors_in(output), whole, loss, rank=rank, size=size), loss


def _require_parts(
    outputs: list[Tensor], whole: _Whole, loss: Tensor | None, *, rank: int, size: int
) -> tuple[int | None, ...]:
    token_dims: list[int | None] = []
    if len(outputs) != len(whole.outputs):
        raise _SequenceDiffers("it returns another number of tensors than over all tokens")
    for own, wanted in zip(outputs, whole.outputs, strict=True):
        if wanted is whole.loss and own is loss:
            token_dims.append(LOSS)
            continue
        dims = [
            dim for dim, (a, b) in enumerate(zip(own.shape, wanted.shape, strict=False)) if a != b
        ]
        if own.dim() != wanted.dim() or len(dims) > 1:
            raise _SequenceDiffers(
                f"an output is {tuple(own.shape)}, over all tokens {tuple(wanted.shape)}"
            )
        mine = part(wanted, rank=rank, size=size, dim=dims[0]) if dims else wanted
        if not _close(own, mine):
            raise _SequenceDiffers("an output differs from that over all tokens")
        token_dims.append(dims[0] if dims else None)
    return tuple(token_dims)


def _input_shardings(
    model: nn.Module, batch: Batch, *, has_target: bool
) -> Iterator[InputSharding]:
    """Input shardings that the signature of the forward allows, the most explicit first."""
    taken = inspect.signature(model.forward).parameters
    given = set(batch) if isinstance(batch, Mapping) else set()
    is_open = any(p.kind is p.VAR_KEYWORD for p in taken.values())
    positions = "position_ids" in taken and "position_ids" not in given
    mask = "attention_mask" in taken and "attention_mask" not in given
    own_loss = not has_target and "labels" in given
    shift = own_loss and (is_open or "shift_labels" in taken) and "shift_labels" not in given
    for choice in product(_both(positions), _both(mask), _both(shift)):
        gives_positions, gives_mask, shifts_labels = choice
        yield InputSharding(
            gives_positions=gives_positions,
            gives_mask=gives_mask,
            shifts_labels=shifts_labels,
            has_target=has_target,
        )


def _both(possible: bool) -> tuple[bool, ...]:
    return (True, False) if possible else (False,)


def _require_plain_attention(
    model: nn.Module, sample: Batch, *, has_target: bool
) -> frozenset[int]:
    """Over all tokens of the sample no call of attention has a mask; shapes alone are run.

    An attention_mask is left out: it hides nothing, which cannot be seen of a shape. Returns to
    what the model counts.
    """
    if isinstance(sample, Mapping):
        sample = {name: value for name, value in sample.items() if name != "attention_mask"}

    def look(query: Tensor, key: Tensor, value: Tensor, *, is_causal: bool, scale: float) -> Tensor:
        require_plain(query, key, attn_mask=None, dropout_p=0.0)
        return query.new_empty(*query.shape[:3], value.shape[3])

    with (
        torch.inference_mode(False),
        torch.enable_grad(),
        stand_ins([model]) as fakes,
    ):
        fake = map_batch(lambda tensor: fakes.of(tensor.detach()), sample)
        answers, counting = OwnTokens(look, places=None, model=model), Counting(model)
        with FakeRunMode().on(fake), without_onednn(), answers, counting:
            call_model(model, fake, has_target=has_target)
    return frozenset(counting.counts)


def _close(got: Tensor, wanted: Tensor) -> bool:
    """Equal up to rounding, whose size goes with the largest number."""
    if got.shape != wanted.shape:
        return False
    if not got.is_floating_point() or not got.numel():
        return torch.equal(got, wanted)
    bound = TOLERANCE * max(wanted.abs().max().item(), 1e-6)
    return bool((got - wanted).abs().max().item() <= bound)


def _is_finite(tensor: Tensor) -> bool:
    return not tensor.is_floating_point() or bool(tensor.isfinite().all())
