"""Records the outputs of a block, and makes like ones for other arguments without running it."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, field
from typing import Any, cast

import torch
from torch import Tensor

from profiles.capture.module.state import PLAIN
from profiles.capture.traces.dispatch_modes import TraceMode
from profiles.capture.traces.flow_trace import Trail
from profiles.errors import ModelError
from profiles.torch_compat import flatten, storage_of, unflatten
from profiles.trace.scopes import Scope

Gradients = dict[int, Hashable]  # by output: form of the gradient that came for it


@dataclass(frozen=True, slots=True)
class _Made:
    """A tensor that a block returns.

    Attributes:
        sources: positions of the arguments that it has a gradient for.
        is_saved, is_kept: the block keeps it for backward, as it is and under selective recompute.
    """

    shape: torch.Size
    stride: tuple[int, ...]
    dtype: torch.dtype
    needs_gradient: bool
    sources: tuple[int, ...]
    is_saved: bool
    is_kept: bool


@dataclass(frozen=True, slots=True)
class _Argument:
    """A block returns what it took."""

    position: int


@dataclass(slots=True)
class BlockRun:
    """A block that ran in full, as those after it need it.

    Attributes:
        outputs: the leaves of what it returned: for a tensor the position of the argument that it
            is, or what to make; else the leaf itself.
        saved: positions of the arguments that it keeps for backward.
        given: gradients that came back to it, for outputs that it did not also use itself.
    """

    scope: Scope
    trail: Trail
    outputs: list[object]
    structure: object
    saved: tuple[int, ...]
    given: Gradients = field(default_factory=dict)


def run_of(
    trace: TraceMode, trail: Trail, taken: Sequence[object], output: object
) -> BlockRun | None:
    """Record the call in progress; None if it returns more than new tensors, its arguments and
    plain values."""
    leaves, structure = flatten(output)
    outputs = _outputs(leaves, taken, trail, trace)
    if outputs is None:
        return None
    saved = tuple(
        position
        for position, leaf in enumerate(taken)
        if isinstance(leaf, Tensor) and trace.storages.is_saved_by(leaf, trace.scope)
    )
    run = BlockRun(trace.scope, trail, outputs, structure, saved)
    made = [n for n, out in enumerate(outputs) if isinstance(out, _Made) and out.needs_gradient]
    tensors = {number: cast(Tensor, leaves[number]) for number in made}
    for number, tensor in tensors.items():
        others = (other for other in tensors.values() if other is not tensor)
        if not any(trace.sources_of(other, [tensor]) for other in others):
            tensor.register_hook(_noting(run.given, number))
    return run


def _noting(given: Gradients, number: int) -> Callable[[Tensor], None]:
    def note(gradient: Tensor) -> None:
        given[number] = _form(gradient)

    return note


def _form(gradient: Tensor) -> Hashable:
    storage = storage_of(gradient)
    size_bytes = storage.nbytes() if storage is not None else None
    return tuple(gradient.shape), gradient.dtype, size_bytes


def _outputs(
    leaves: Sequence[object], taken: Sequence[object], trail: Trail, trace: TraceMode
) -> list[object] | None:
    """Describe the outputs so that they can be made for other arguments; None if they share
    memory."""
    positions = {id(leaf): index for index, leaf in enumerate(taken) if isinstance(leaf, Tensor)}
    memories: set[int] = set()
    outputs: list[object] = []
    for leaf in leaves:
        if not isinstance(leaf, Tensor):
            if not isinstance(leaf, PLAIN):
                return None
            outputs.append(leaf)
        elif id(leaf) in positions:
            outputs.append(_Argument(positions[id(leaf)]))
        else:
            number = trace.storages.number_of(leaf)
            if number is None or number < trail.first_made or number in memories:
                return None
            if not _is_whole(leaf):
                return None
            memories.add(number)
            outputs.append(
                _Made(
                    shape=leaf.shape,
                    stride=leaf.stride(),
                    dtype=leaf.dtype,
                    needs_gradient=leaf.requires_grad,
                    sources=trace.sources_of(leaf, taken),
                    is_saved=trace.storages.is_saved_by(leaf, trace.scope),
                    is_kept=trace.storages.is_selectively_saved_by(leaf, trace.scope),
                )
            )
    return outputs


def _is_whole(tensor: Tensor) -> bool:
    """True if the tensor covers its storage."""
    storage = storage_of(tensor)
    last = sum((size - 1) * step for size, step in zip(tensor.shape, tensor.stride(), strict=True))
    elements = last + 1 if tensor.numel() else 0
    return storage is not None and storage.nbytes() == elements * tensor.element_size()


def substitute_outputs(
    run: BlockRun, trace: TraceMode, taken: Sequence[object], parameter: Tensor | None
) -> tuple[object, Gradients]:
    """Return the outputs of a block like that of `run` for the arguments `taken`; and the gradients
    that arrived for them, filled in by backward.

    `parameter`: one that is trained; it makes outputs need a gradient where no argument does.
    """
    given: Gradients = {}
    leaves: dict[int, object] = {}
    saved = [cast(Tensor, taken[position]).detach() for position in run.saved]
    made = [(n, output) for n, output in enumerate(run.outputs) if isinstance(output, _Made)]
    # First those that only others can keep for backward.
    for number, output in sorted(made, key=lambda item: item[1].needs_gradient):
        if output.needs_gradient:
            sources = [taken[position] for position in output.sources]
            apply = cast(Callable[..., Tensor], _Substitute.apply)
            call = _Call(trace, output, number, given, saved)
            tensor = apply(call, parameter, *sources)
            saved = []
        else:
            tensor = _empty(output)
            if output.is_saved:
                saved.append(tensor)
        if output.is_kept:
            trace.storages.keep(tensor, trace.scope)
        leaves[number] = tensor
    for number, other in enumerate(run.outputs):
        if isinstance(other, _Argument):
            leaves[number] = taken[other.position]
        elif number not in leaves:
            leaves[number] = other
    return unflatten([leaves[number] for number in range(len(run.outputs))], run.structure), given


def _empty(made: _Made) -> Tensor:
    return torch.empty_strided(made.shape, made.stride, dtype=made.dtype)


@dataclass(slots=True)
class _Call:
    """Of a function that makes output `number` and saves `saved` for backward."""

    trace: TraceMode
    made: _Made
    number: int
    given: Gradients
    saved: list[Tensor]


class _Substitute(torch.autograd.Function):
    """Makes a tensor like one of those of the block, and gradients for what it was made of."""

    @staticmethod
    def forward(ctx: Any, call: _Call, parameter: Tensor | None, *sources: Tensor) -> Tensor:
        ctx.set_materialize_grads(False)
        ctx.call = call
        ctx.sources = [(tensor.shape, tensor.stride(), tensor.dtype) for tensor in sources]
        output = _empty(call.made)
        ctx.save_for_backward(*call.saved, *([output] if call.made.is_saved else []))
        call.saved = []
        return output

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor | None) -> tuple[Tensor | None, ...]:
        call: _Call = ctx.call
        (gradient,) = gradients
        if not call.trace.in_backward:
            raise ModelError("gradients of gradients go through a block that did not run")
        if gradient is None:
            return (None, None, *(None for _ in ctx.sources))
        call.given[call.number] = _form(gradient)
        # Along a residual the layout of a gradient goes on from block to block.
        layouts = {gradient.shape: gradient.stride()}
        made = (
            torch.empty_strided(shape, layouts.get(shape, stride), dtype=dtype)
            for shape, stride, dtype in ctx.sources
        )
        return (None, None, *made)
