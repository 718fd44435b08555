"""Equal blocks: run twice, stood in for from then on.

Two blocks are equal if their modules are (classes, attributes, shapes of parameters) and so are
their arguments. The ends of a list differ in cost from its middle (the first block keeps what
several blocks take, the last is the first to give it a gradient), so the second stands for all but
the ends.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor, nn

from profiles.flow_trace import Trail
from profiles.modules import Unit
from profiles.places import Place
from profiles.torch_compat import flatten, tensors_in, unflatten
from profiles.tracing import Trace

_PLAIN = int | float | str | bool | torch.dtype | torch.device | None
# Attributes that every module has: modules, tensors and hooks, looked at elsewhere or not at all.
_OF_MODULES = frozenset(vars(nn.Module())) - {"training"}
RUNS = 2  # of equal blocks that run in full


@dataclass(slots=True)
class _Run:
    """A block that ran in full, as those after it need it.

    Attributes:
        outputs: the leaves of what it returned: for a tensor the position of the argument that it
            is, or what to make; else the leaf itself.
    """

    place: Place
    trail: Trail
    outputs: list[object]
    structure: object


@dataclass(frozen=True, slots=True)
class _Made:
    """A tensor that a block returns."""

    shape: torch.Size
    stride: tuple[int, ...]
    dtype: torch.dtype
    needs_gradient: bool


@dataclass(frozen=True, slots=True)
class _Argument:
    """A block returns what it took."""

    position: int


class Repeats:
    """Stands in for blocks that are equal to blocks which ran."""

    def __init__(self, trace: Trace, units: Sequence[Unit]) -> None:
        self._trace = trace
        self._count: dict[Hashable, int] = {}
        self._runs: dict[Hashable, _Run] = {}
        last = {unit.name.rpartition(".")[0]: unit.name for unit in units if unit.is_block}
        for unit in units:
            if unit.is_block and unit.name not in last.values():
                attributes = unit.module.__dict__  # a copy that goes
                attributes["forward"] = self._instead(unit, unit.module.forward)

    def _instead(self, unit: Unit, forward: Callable[..., object]) -> Callable[..., object]:
        kind = _signature(unit.module, unit.name.rpartition(".")[2])

        def instead(*args: Any, **kwargs: Any) -> object:
            taken, structure = flatten((args, kwargs))
            arguments = _describe(taken)
            if arguments is None or self._trace.in_backward:
                return forward(*args, **kwargs)
            trail = self._trace.flow.current
            if trail is None or trail.unit != unit.name:  # called within another unit
                return forward(*args, **kwargs)
            key = (kind, str(structure), arguments)
            known = self._runs.get(key)
            if known is not None:
                self._trace.stand_for(known.place, known.trail)
                return _stand_in(known, taken, unit.module)
            place = self._trace.place
            output = forward(*args, **kwargs)
            self._remember(key, place, trail, taken, output)
            return output

        return instead

    def _remember(
        self, key: Hashable, place: Place, trail: Trail, taken: Sequence[object], output: object
    ) -> None:
        leaves, structure = flatten(output)
        outputs = _outputs(leaves, taken, self._trace)
        if outputs is None or not trail.is_closed:
            return
        self._trace.flow.close(trail, tensors_in(leaves))
        self._count[key] = self._count.get(key, 0) + 1
        if self._count[key] == RUNS:
            self._runs[key] = _Run(place, trail, outputs, structure)


def _signature(module: nn.Module, position: str) -> Hashable:
    """What decides what a module does, apart from where it stands.

    A number that is the block's own `position` in its list is left out: blocks know their place,
    and those that act on it differ in something else too.
    """
    return tuple(
        (name, type(part), _attributes(part, position), _tensors(part))
        for name, part in module.named_modules(remove_duplicate=False)
    )


def _attributes(module: nn.Module, position: str) -> Hashable:
    """Names and values; objects that are more than values have to be the same ones."""
    found: list[tuple[str, str]] = []
    for name, value in vars(module).items():
        if name in _OF_MODULES:
            continue
        if isinstance(value, _PLAIN | tuple | list | dict):
            is_position = type(value) is int and str(value) == position
            found.append((name, "position" if is_position else repr(value)))
        elif not isinstance(value, Tensor):
            found.append((name, f"object {id(value)}"))
    return tuple(sorted(found))


def _tensors(module: nn.Module) -> Hashable:
    own = (*module.named_parameters(recurse=False), *module.named_buffers(recurse=False))
    return tuple((name, tuple(t.shape), t.dtype, t.requires_grad) for name, t in own)


def _describe(leaves: Sequence[object]) -> Hashable | None:
    """What decides the shapes that a call makes; None for arguments that may be more than values.

    Tensors that are one and the same are told from those that are only alike.
    """
    found: list[Hashable] = []
    first: dict[int, int] = {}
    for position, leaf in enumerate(leaves):
        if isinstance(leaf, Tensor):
            if leaf.layout is not torch.strided:
                return None
            same = first.setdefault(id(leaf), position)
            found.append((same, tuple(leaf.shape), leaf.stride(), leaf.dtype, leaf.requires_grad))
        elif isinstance(leaf, _PLAIN):
            found.append((type(leaf), leaf))
        else:
            return None
    return tuple(found)


def _outputs(
    leaves: Sequence[object], taken: Sequence[object], trace: Trace
) -> list[object] | None:
    """How to make these again from other arguments; None where they share memory."""
    positions = {id(leaf): index for index, leaf in enumerate(taken) if isinstance(leaf, Tensor)}
    memories: set[int] = set()
    found: list[object] = []
    for leaf in leaves:
        if not isinstance(leaf, Tensor):
            if not isinstance(leaf, _PLAIN):
                return None
            found.append(leaf)
        elif id(leaf) in positions:
            found.append(_Argument(positions[id(leaf)]))
        else:
            number = trace.storages.number_of(leaf)
            if number is None or number in memories:
                return None
            memories.add(number)
            found.append(_Made(leaf.shape, leaf.stride(), leaf.dtype, leaf.requires_grad))
    return found


def _stand_in(known: _Run, taken: Sequence[object], module: nn.Module) -> object:
    made = [output for output in known.outputs if isinstance(output, _Made)]
    # A parameter makes the outputs need a gradient where no argument does.
    parameter = next((p for p in module.parameters() if p.requires_grad), None)
    tensors = [leaf for leaf in taken if isinstance(leaf, Tensor)]
    apply = cast(Callable[..., tuple[Tensor, ...]], _StandIn.apply)
    results = iter(apply(made, parameter, *tensors) if made else ())
    leaves = [
        next(results)
        if isinstance(output, _Made)
        else taken[output.position]
        if isinstance(output, _Argument)
        else output
        for output in known.outputs
    ]
    return unflatten(leaves, known.structure)


class _StandIn(torch.autograd.Function):
    """Makes tensors like those of the block, and gradients for what it took."""

    @staticmethod
    def forward(
        ctx: Any, made: Sequence[_Made], parameter: Tensor | None, *taken: Tensor
    ) -> tuple[Tensor, ...]:
        ctx.taken = [(tensor.shape, tensor.stride(), tensor.dtype) for tensor in taken]
        results = tuple(torch.empty_strided(m.shape, m.stride, dtype=m.dtype) for m in made)
        still = [t for t, m in zip(results, made, strict=True) if not m.needs_gradient]
        ctx.mark_non_differentiable(*still)
        return results

    @staticmethod
    def backward(ctx: Any, *given: Tensor) -> tuple[Tensor | None, ...]:
        # Along a residual the layout of a gradient goes on from block to block.
        layouts = {gradient.shape: gradient.stride() for gradient in given}
        gradients = (
            torch.empty_strided(shape, layouts.get(shape, stride), dtype=dtype)
            if is_needed
            else None
            for (shape, stride, dtype), is_needed in zip(
                ctx.taken, ctx.needs_input_grad[2:], strict=True
            )
        )
        return (None, None, *gradients)
