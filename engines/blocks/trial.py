"""Trial of blocks that are to be recomputed: each runs twice on a copy of the model, as it would in
a step, the second time when the whole forward is over. What it keeps where no module leads to (in a
global, on a class, in a closure) is another one then, as is what code around it has written into,
and gradients would be those of other activations."""

from __future__ import annotations

import contextlib
import functools
import math
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from engines.blocks.arguments import Arguments
from engines.blocks.forward_state import ForwardState
from engines.blocks.recompute import without_caches
from engines.blocks.wrap import wrap_forward
from profiles.capture.batch.call import Batch, LossFn, call_model
from profiles.capture.batch.tree import map_batch
from profiles.capture.fakes.tensors import stand_ins
from profiles.capture.traces.saved_tensors import SavedTensors
from profiles.model.profile import ModelProfile
from profiles.torch_compat import is_batch_norm, tensors_in, version_of

TOLERANCE = 1e-5


class BlockTrial(NamedTuple):
    """Blocks that ran twice.

    Attributes:
        unlike: the first that computed something else when it ran again; "" where all repeated, or
            where the model cannot be run here.
        draws: one drew from Python's or numpy's generators, or might.
    """

    unlike: str = ""
    draws: bool = True


def run_twice(
    model: nn.Module,
    batch: Batch,
    loss_fn: LossFn | None,
    *,
    profile: ModelProfile,
    compiled: bool = False,
    overlaps: bool = False,
) -> BlockTrial:
    """Run each block twice on these rows.

    Args:
        compiled: put nothing back for the second time, as torch's own checkpoint does where
            torch.compile leaves one to it.
        overlaps: another microbatch, of the same rows in another order, comes before the backward.
    """
    unlike: list[str] = []
    drew: list[str] = []
    seconds: list[Callable[[], None]] = []
    sums = _SavedSums()
    with torch.inference_mode(False), torch.enable_grad(), stand_ins([model], copies=True) as fakes:
        for module in model.modules():
            module.training &= not is_batch_norm(module)
        for unit in profile.blocks():
            run = functools.partial(
                _first,
                compiled,
                sums,
                seconds,
                functools.partial(unlike.append, unit.name),
                functools.partial(drew.append, unit.name),
            )
            wrap_forward(model.get_submodule(unit.name), run)
        try:
            call_model(model, map_batch(fakes.of, batch), has_target=loss_fn is not None)
            if overlaps:
                turned = map_batch(lambda t: fakes.of(t.flip(0) if t.dim() else t), batch)
                with contextlib.suppress(Exception):  # of code that wants its rows in order
                    call_model(model, turned, has_target=loss_fn is not None)
            for second in reversed(seconds):  # as in a backward
                second()
        except Exception:  # of the user's code: the training says so
            return BlockTrial()
        finally:
            sums.release()
    return BlockTrial(unlike[-1] if unlike else "", bool(drew))


def _first(
    compiled: bool,
    sums: _SavedSums,
    seconds: list[Callable[[], None]],
    note: Callable[[], object],
    note_draws: Callable[[], object],
    forward: Callable[..., object],
    block: nn.Module,
    *args: Any,
    **kwargs: Any,
) -> object:
    args, kwargs = without_caches(args, kwargs)
    given = Arguments(args, kwargs)
    tensors, versions = given.tensors, list(map(version_of, given.tensors))
    state = ForwardState(list(block.modules()), given=given.others)
    drawn_from = torch.get_rng_state()
    with state.first(), sums.noted() as saved:
        output = given.call(forward)
    if state.has_drawn:
        note_draws()
    ones = [tensor.detach().clone() for tensor in tensors_in(output)]

    def second() -> None:
        if list(map(version_of, tensors)) != versions:  # autograd would say so in the backward
            note()
            return
        torch.set_rng_state(drawn_from)
        try:
            with contextlib.nullcontext() if compiled else state.second(), sums.noted() as again:
                made = forward(*args, **kwargs) if compiled else given.call(forward, *tensors)
        except Exception:  # where the first run raised none
            note()
            return
        others = tensors_in(made)
        is_alike = len(ones) == len(others) and all(map(_is_alike, ones, others))
        if not is_alike or len(saved) != len(again) or not all(map(_is_close, saved, again)):
            note()

    seconds.append(second)
    return output


class _Sums(NamedTuple):
    """Of the elements of a tensor that autograd saves."""

    plain: float
    absolute: float


class _SavedSums:
    """Notes what the backward reads: a norm's output is that of an input of any scale, for example,
    its gradient is not. The tensors themselves would be the memory that recompute saves."""

    def __init__(self) -> None:
        self._sums: list[_Sums] = []
        self._saved = SavedTensors(self._note)

    @contextlib.contextmanager
    def noted(self) -> Iterator[list[_Sums]]:
        """Inside, what autograd saves goes to a list of its own."""
        sums: list[_Sums] = []
        self._sums = sums
        with self._saved.hooks():
            yield sums

    def release(self) -> None:
        """Let go of the graphs: none of them has a backward."""
        self._saved.release()

    def _note(self, tensor: Tensor) -> None:
        is_parameter = tensor.is_leaf and tensor.requires_grad
        if not is_parameter and (tensor.is_floating_point() or tensor.is_complex()):
            values = tensor.detach().abs() if tensor.is_complex() else tensor.detach()
            plain, absolute = values.sum(dtype=torch.float64), values.abs().sum(dtype=torch.float64)
            self._sums.append(_Sums(float(plain), float(absolute)))


def _is_close(one: _Sums, other: _Sums) -> bool:
    if math.isnan(one.plain) or math.isnan(other.plain):
        return math.isnan(one.plain) == math.isnan(other.plain)
    allowed = TOLERANCE * (1 + max(one.absolute, other.absolute))
    return one == other or max(abs(a - b) for a, b in zip(one, other, strict=True)) <= allowed


def _is_alike(one: Tensor, other: Tensor) -> bool:
    if one.shape != other.shape or one.dtype != other.dtype:
        return False
    return torch.allclose(
        one.detach(), other.detach(), rtol=TOLERANCE, atol=TOLERANCE, equal_nan=True
    )
