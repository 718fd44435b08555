"""Tensors with a number for every head, of which a rank takes its heads.

Scores of attention get a bias that differs from head to head: by ALiBi's slopes (arXiv:2108.12409),
or by a table of relative positions (T5, arXiv:1910.10683; Swin, arXiv:2103.14030). Where queries
and keys are split by heads, a rank needs the bias of its heads alone:

* a parameter is cut along its dimension of heads, and so is a buffer while the forward runs;
* of an argument, which is whole on every rank, it takes its heads, and its gradient is gathered;
* what the module returns by head is gathered: between units every value is whole.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import count
from typing import Any

from torch import Tensor, is_grad_enabled, nn

from engines.blocks.wrap import wrap_forward
from engines.state.slices import Slice
from engines.tensor.collectives import Collectives
from engines.tensor.layers import head_dim
from engines.tensor.rules import SCORES_RANK
from engines.tensor.styles import Style
from profiles.errors import PlanError
from profiles.torch_compat import map_tensors

_HEADS = -3  # their dimension in scores and what is added to them, as torch's attention has it
_RETURNED = re.compile(r"return_(\d+)")


def returned(number: int) -> str:
    """The name, in a style, of a tensor that a module returns."""
    return f"return_{number}"


def has_heads(tensor: Tensor, heads: int) -> bool:
    """True if a tensor has the shape of scores with so many heads; samples may lie before them in
    one dimension (Bloom's slopes)."""
    if tensor.dim() < SCORES_RANK - 1 or not tensor.shape[_HEADS]:
        return False
    length = tensor.shape[_HEADS]
    return length == heads if tensor.dim() >= SCORES_RANK else length % heads == 0


def take_heads(module: nn.Module, style: Style, collectives: Collectives, *, path: str) -> None:
    """Let `module` take its rank's heads of what `style` names, but for parameters, which are cut
    like those of layers.

    Raises:
        PlanError: the heads have no equal share for every rank, or there is no such tensor.
    """
    heads, size = style.packs, collectives.size
    if heads % size:
        raise PlanError(
            f"{heads} heads have no equal share for each of {size} ranks",
            where=f"tensor style {path}:{style}",
        )
    names = [name for name in style.sizes if name not in module._parameters]
    buffers = [name for name in names if name in module._buffers]
    outputs = [int(match[1]) for name in names if (match := _RETURNED.fullmatch(name))]
    arguments = [n for n in names if n not in buffers and not _RETURNED.fullmatch(n)]
    known = inspect.signature(module.forward).parameters
    unknown = [name for name in arguments if name not in known]
    if unknown:
        raise PlanError(
            f"`{path}` has no parameter, buffer or argument `{unknown[0]}`",
            where=f"tensor style {path}:{style}",
        )
    if buffers:
        _cut_buffers(module, buffers, heads, collectives)
    if arguments or outputs:
        places = {name: list(known).index(name) for name in arguments}
        _exchange(module, places, outputs, heads, collectives)


def _cut_buffers(
    module: nn.Module, names: Sequence[str], heads: int, collectives: Collectives
) -> None:
    """While the forward of `module` runs, its buffers are this rank's part: checkpoints have them
    whole."""

    def run(forward: Any, module: nn.Module, *args: Any, **kwargs: Any) -> object:
        with _cut(module, names, heads, collectives):
            return forward(*args, **kwargs)

    wrap_forward(module, run)


@contextmanager
def _cut(module: nn.Module, names: Sequence[str], heads: int, ranks: Collectives) -> Iterator[None]:
    before = {name: module.get_buffer(name) for name in names}
    try:
        for name, whole in before.items():
            part = Slice(head_dim(whole, heads)).part(whole, rank=ranks.rank, size=ranks.size)
            module._buffers[name] = part
        yield
    finally:
        module._buffers.update(before)


def _exchange(
    module: nn.Module,
    arguments: Mapping[str, int],
    outputs: Sequence[int],
    heads: int,
    collectives: Collectives,
) -> None:
    """Let the forward of `module` take its rank's heads of `arguments`, by their places, and return
    all heads of its `outputs`. An argument that it returns as it was given is whole again."""

    def run(forward: Any, module: nn.Module, *args: Any, **kwargs: Any) -> object:
        taken: list[tuple[Tensor, Tensor]] = []

        def part_of(name: str, value: object) -> object:
            if not isinstance(value, Tensor):
                return value
            if not has_heads(value, heads):
                if value.dim() >= SCORES_RANK and value.shape[_HEADS] == 1:  # the same for all
                    return value
                raise PlanError(
                    f"`{name}` is a tensor of {tuple(value.shape)}, which has no {heads} heads in"
                    " the last dimension but two",
                    hints=["leave the layers of this attention out of `tensor_styles`"],
                )
            taken.append((_part(value, heads, collectives), value))
            return taken[-1][0]

        given = list(args)
        for name, place in arguments.items():
            if name in kwargs:
                kwargs[name] = part_of(name, kwargs[name])
            elif place < len(given):
                given[place] = part_of(name, given[place])
        numbers = count()

        def whole_of(tensor: Tensor) -> Tensor:
            is_part = next(numbers) in outputs
            for part, whole in taken:
                if part is tensor:
                    return whole
            return _whole(tensor, heads, collectives) if is_part else tensor

        return map_tensors(whole_of, forward(*given, **kwargs))

    wrap_forward(module, run)


def _part(whole: Tensor, heads: int, ranks: Collectives) -> Tensor:
    cut = Slice(_HEADS, whole.shape[_HEADS] // heads)
    if whole.requires_grad and is_grad_enabled():
        return ranks.scatter(whole, cut)
    return cut.part(whole, rank=ranks.rank, size=ranks.size)


def _whole(part: Tensor, heads: int, ranks: Collectives) -> Tensor:
    length = part.shape[_HEADS] * ranks.size
    return ranks.gather(part, Slice(_HEADS, length // heads), length=length)
