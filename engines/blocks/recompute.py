"""Activation checkpointing: blocks free activations that their backward computes again.

The word checkpoint means saved weights elsewhere in this project.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import CheckpointError, checkpoint, create_selective_checkpoint_contexts

from engines.blocks.arguments import Arguments
from engines.blocks.forward_state import ForwardState
from engines.blocks.selective import OTHER_PRODUCT, selective_contexts
from engines.blocks.wrap import wrap_forward
from engines.plan import Plan, Recompute
from profiles.capture.frames import summary
from profiles.capture.operators.table import kept_operators
from profiles.errors import ModelError
from profiles.model.profile import ModelProfile
from profiles.torch_compat import is_batch_norm

# Where a block differentiates inside (torch/autograd/graph.py, `disable_saved_tensors_hooks`).
_NO_HOOKS = "yet support saved tensor hooks"
# Where the second run of a block differs from the first, besides CheckpointError; in torch's words
# too (torch/utils/checkpoint.py), whose contexts compiled blocks use.
_DIFFERS = (OTHER_PRODUCT, "encountered during backward but not found in storage")

Contexts = tuple[AbstractContextManager[None], AbstractContextManager[None]]


def recomputed(plan: Plan, profile: ModelProfile) -> list[str]:
    """Names of the blocks that `plan` recomputes: all, or the first ones of each stage."""
    if plan.recompute is Recompute.NONE:
        return []
    most = len(profile.units) if plan.recompute_blocks is None else plan.recompute_blocks
    names, left = [], most
    for unit in profile.units:
        left = most if unit.name in plan.stages else left
        if unit.is_block and left:
            names.append(unit.name)
            left -= 1
    return names


def recompute_blocks(
    model: nn.Module, names: Sequence[str], plan: Plan, *, draws: bool = True
) -> None:
    """Replace the forward of the blocks `names` by one that saves less for the backward, in place.

    Parameter names, hooks and the block's class stay as they are. `FULL` saves a block's inputs;
    `SELECTIVE` also saves the outputs of matmuls, convolutions and attention, so that only cheap
    operations run twice. Dropout draws the same numbers both times, and batch norms count a
    microbatch once.

    Args:
        plan: its kind of recompute; under `compile` torch.compile will take the blocks.
        draws: they may draw from Python's or numpy's generators.
    """
    for name in names:
        run = _compiled(plan.recompute) if plan.compile else _checkpointed(plan.recompute, draws)
        wrap_forward(model.get_submodule(name), run)


def _checkpointed(kind: Recompute, draws: bool) -> Callable[..., object]:
    def run(forward: Callable[..., object], block: nn.Module, *args: Any, **kwargs: Any) -> object:
        if not torch.is_grad_enabled():
            return forward(*args, **kwargs)
        given = Arguments(*without_caches(args, kwargs))
        return checkpoint(
            functools.partial(given.call, forward),
            *given.tensors,
            use_reentrant=False,
            context_fn=functools.partial(_contexts, kind, block, draws, given.others),
        )

    return run


def _compiled(kind: Recompute) -> Callable[..., object]:
    """As `_checkpointed`, for torch.compile: it can follow no contexts but those that torch made;
    what it makes of writes in place writes into nothing that is kept."""
    how: dict[str, Any] = {}
    if kind is Recompute.SELECTIVE:
        operators = list(kept_operators())
        how["context_fn"] = functools.partial(create_selective_checkpoint_contexts, operators)

    def run(forward: Callable[..., object], block: nn.Module, *args: Any, **kwargs: Any) -> object:
        if not torch.is_grad_enabled():
            return forward(*args, **kwargs)
        args, kwargs = without_caches(args, kwargs)
        return checkpoint(forward, *args, use_reentrant=False, **how, **kwargs)

    return run


def without_caches(
    args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """The arguments of a block without empty caches: see `without_cache`."""
    others = {name: without_cache(value) for name, value in kwargs.items()}
    return tuple(map(without_cache, args)), others


def without_cache(value: object) -> object:
    """None for an empty key/value cache: a forward of transformers makes one by default
    (`use_cache`), and the second run of a block would add to it again. transformers does the same
    in its own checkpointing (`GradientCheckpointingLayer`)."""
    length = getattr(value, "get_seq_length", None)
    return None if callable(length) and hasattr(value, "update") and length() == 0 else value


def holds_state(block: nn.Module) -> bool:
    """True if a forward of `block` may change buffers that a second run of it reads: spectral
    norm's vectors, counters. Masks and indices it does not."""
    return bool(_batch_norms(block)) or any(
        buffer.is_floating_point() or buffer.numel() == 1
        for module in block.modules()
        if not is_batch_norm(module)
        for buffer in module.buffers(recurse=False)
    )


def _contexts(kind: Recompute, block: nn.Module, draws: bool, given: Sequence[object]) -> Contexts:
    """The contexts of the first and of the second run of a block."""
    first: AbstractContextManager[None]
    second: AbstractContextManager[None]
    if kind is Recompute.SELECTIVE:
        first, second = selective_contexts()
    else:
        first, second = nullcontext(), nullcontext()
    state = ForwardState(list(block.modules()), draws=draws, given=given)
    norms = _batch_norms(block)

    def again() -> AbstractContextManager[None]:
        own = _within(state.second(), second)
        return _frozen_statistics(own, norms) if norms else own

    return _within(state.first(), first), _EachTime(again)


@contextmanager
def _within(
    outer: AbstractContextManager[None], inner: AbstractContextManager[None]
) -> Iterator[None]:
    with outer, inner:
        yield


class _EachTime(AbstractContextManager[None]):
    """A context that is made anew whenever it is entered: a graph that is retained runs a block
    again in each of its backwards."""

    def __init__(self, make: Callable[[], AbstractContextManager[None]]) -> None:
        self._make = make
        self._entered: list[AbstractContextManager[None]] = []

    def __enter__(self) -> None:
        context = self._make()
        context.__enter__()
        self._entered.append(context)

    def __exit__(self, *of_error: Any) -> bool | None:
        return self._entered.pop().__exit__(*of_error)


def _batch_norms(block: nn.Module) -> list[nn.BatchNorm2d]:
    return [
        module for module in block.modules() if is_batch_norm(module) and module.track_running_stats
    ]


@contextmanager
def _frozen_statistics(
    inner: AbstractContextManager[None], batch_norms: list[nn.BatchNorm2d]
) -> Iterator[None]:
    """The second run must not move running statistics a second time: momentum 0 leaves them."""
    saved = [(norm, norm.momentum, _count(norm).clone()) for norm in batch_norms]
    try:
        for norm, _, _ in saved:
            norm.momentum = 0.0
        with inner:
            yield
    finally:
        for norm, momentum, count in saved:
            norm.momentum = momentum
            with torch.no_grad():
                _count(norm).copy_(count)


def _count(norm: nn.BatchNorm2d) -> Tensor:
    assert norm.num_batches_tracked is not None  # it tracks running statistics
    return norm.num_batches_tracked


@contextmanager
def explained_recompute(plan: Plan) -> Iterator[None]:
    """Turn torch's errors about blocks that cannot run twice into ours.

    Raises:
        ModelError: a block computes something else the second time, or differentiates in its
            forward.
    """
    try:
        yield
    except RuntimeError as error:
        if plan.recompute is not Recompute.NONE and _NO_HOOKS in str(error):
            raise ModelError(
                "a block differentiates in its forward by torch.func (grad, vjp, jacrev, hessian):"
                " torch refuses that where tensors are saved by hooks, as recompute saves them",
                where=f"plan: {plan}\n{summary(error)}",
                hints=["plan with recompute=none"],
            ) from error
        if not isinstance(error, CheckpointError) and not any(w in str(error) for w in _DIFFERS):
            raise
        raise ModelError(
            "a block computes something else the second time: its forward changes state outside it"
            " (a key/value cache)",
            where=f"plan: {plan}\n{str(error).splitlines()[0]}",
            hints=["switch the cache off (`use_cache=False`)", "or plan with recompute=none"],
        ) from error
