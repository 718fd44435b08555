"""Calls of a model's units, and the kinds of units that are alike."""

from __future__ import annotations

import functools
import re
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from enum import Enum
from types import BuiltinFunctionType, FunctionType, MethodType
from typing import Any

import torch
from torch import Tensor, nn

from engines.tensor.copy_tree import copy_tree
from profiles.capture.batch.call import Batch, call_model
from profiles.capture.batch.rows import split_rows
from profiles.capture.batch.tree import map_batch
from profiles.capture.fakes.code_states import unchanged_code
from profiles.capture.fakes.known_values import known_values
from profiles.capture.fakes.mode import FakeRunMode
from profiles.capture.fakes.tensors import preserved_random_state, replaced, stand_ins
from profiles.capture.module.hooks import own_hooks
from profiles.errors import ModelError
from profiles.torch_compat import (
    flatten,
    map_tensors,
    tensors_in,
    version_of,
    without_onednn,
)

TOKENS = 64  # of a sequence: a layer is split right for few as for many
_OWN_NUMBER = ("layer_idx", "layer_id", "block_idx", "index")


@dataclass(frozen=True, slots=True)
class UnitArguments:
    """Arguments of one call of a unit, and the tensors of its output that the model's output needs.

    `why_not`: the reason why the arguments could not be recorded; else empty.
    """

    args: Any
    kwargs: Any
    used: frozenset[int]
    why_not: str = ""


@dataclass(frozen=True, slots=True)
class UnitKind:
    """Units that are alike, with a call of the first: equal classes, parameters and settings."""

    paths: tuple[str, ...]
    call: UnitArguments


def unit_kinds(
    model: nn.Module, batch: Batch, units: Iterable[str], *, has_target: bool
) -> list[UnitKind]:
    """The kinds of called units, in the order of `units`.

    The model runs once on fake tensors over a row of few tokens, or, if it depends on values, over
    `batch` for real, and is restored.
    """
    paths = list(dict.fromkeys(units))
    calls = _calls(model, batch, paths, has_target=has_target)
    kinds: dict[object, list[str]] = {}
    for path in paths:
        if path in calls:
            kinds.setdefault(_kind(model.get_submodule(path), calls[path]), []).append(path)
    return [UnitKind(tuple(alike), calls[alike[0]]) for alike in kinds.values()]


def _kind(unit: nn.Module, call: UnitArguments) -> object:
    shapes = [(n, tuple(p.shape)) for n, p in unit.named_parameters(remove_duplicate=False)]
    settings = [
        (path, type(module), name, known)
        for path, module in unit.named_modules()
        for name, value in vars(module).items()
        if name not in _OWN_NUMBER and (known := _setting(value)) is not None
    ]
    settings += [
        (path, object, name, _setting(hook))
        for path, module in unit.named_modules()
        for name, hook in own_hooks(module)
    ]
    leaves, structure = flatten((call.args, call.kwargs))
    given = [tuple(x.shape) if isinstance(x, Tensor) else type(x) for x in leaves]
    return tuple(shapes), tuple(settings), tuple(given), str(structure), call.used, call.why_not


def _setting(value: object) -> Hashable:
    """A number or a choice as units that are alike share it; None of other values.

    Factors may differ from block to block, and names may have a number in them; a factor that is
    zero, and other code, make another unit.
    """
    if isinstance(value, bool | int | Enum):
        return value
    if isinstance(value, float):
        return ("zero", not value)
    if isinstance(value, str):
        return re.sub(r"\d+", "#", value)
    if isinstance(value, functools.partial):
        given = (*value.args, *value.keywords.items())
        return _setting(value.func), tuple(map(_setting, given))
    if isinstance(value, tuple):
        return tuple(map(_setting, value))
    if isinstance(value, MethodType):
        return _setting(value.__func__)
    if isinstance(value, FunctionType):
        return value.__code__
    return value if isinstance(value, BuiltinFunctionType | type | torch.dtype) else None


def _calls(
    model: nn.Module, batch: Batch, paths: Sequence[str], *, has_target: bool
) -> dict[str, UnitArguments]:
    """The arguments of the first call of each unit; cheap runs are tried first."""
    last: Exception | None = None
    known = functools.partial(_fake_calls, knows_values=True)
    ways = ((_fake_calls, _short), (_fake_calls, _same), (known, _same), (_real_calls, _same))
    for follow, part in ways:
        try:
            return follow(model, part(batch), paths, has_target=has_target)
        except Exception as error:  # of the model's code, which may ask fakes for anything
            last = error
    assert last is not None
    raise last


def _same(batch: Batch) -> Batch:
    return batch


def _short(batch: Batch) -> Batch:
    """One row, and the first tokens of it."""
    row = split_rows(batch, [1])[0]

    def few(tensor: Tensor) -> Tensor:
        is_tokens = tensor.dim() == 2 and not tensor.is_floating_point()
        return tensor[:, :TOKENS] if is_tokens else tensor

    return map_batch(few, row)


def _fake_calls(
    model: nn.Module,
    batch: Batch,
    paths: Sequence[str],
    *,
    has_target: bool,
    knows_values: bool = False,
) -> dict[str, UnitArguments]:
    with (
        _noted(model, paths) as notes,
        torch.inference_mode(False),
        torch.enable_grad(),
        stand_ins([model]) as fakes,
    ):
        fake = map_batch(lambda tensor: fakes.of(tensor.detach()), batch)
        values = known_values(fakes, batch, fake) if knows_values else None
        with FakeRunMode(values).on(fake), without_onednn():
            output = call_model(model, fake, has_target=has_target)
        return _with_use(notes, output)


def _real_calls(
    model: nn.Module, batch: Batch, paths: Sequence[str], *, has_target: bool
) -> dict[str, UnitArguments]:
    device = next(model.parameters()).device
    there = map_batch(lambda tensor: tensor.to(device), batch)
    with _noted(model, paths) as notes, _left_as_it_was(model), torch.enable_grad():
        output = call_model(model, there, has_target=has_target)
        return _with_use(notes, output)


@dataclass(slots=True)
class _Note:
    """The recorded first call of a unit; `ends` are its outputs in the gradient graph."""

    args: Any
    kwargs: Any
    why_not: str = ""
    ends: tuple[tuple[Any, int], ...] | None = None


class _Mark(torch.autograd.Function):
    """The same tensor, with a node of its own in the graph of gradients."""

    @staticmethod
    def forward(ctx: Any, tensor: Tensor) -> Tensor:
        return tensor.clone()

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Tensor:
        return gradients[0]


def mark(tensor: Tensor) -> Tensor:
    """`tensor` with a node of its own in the graph of gradients."""
    if not tensor.is_floating_point():
        return tensor
    marked: Tensor = _Mark.apply(tensor)  # type: ignore[no-untyped-call]
    return marked


@contextmanager
def _noted(model: nn.Module, paths: Sequence[str]) -> Iterator[dict[str, _Note]]:
    notes: dict[str, _Note] = {}
    copies: dict[tuple[int, int], tuple[Tensor, Tensor]] = {}

    def snapshot(tensor: Tensor) -> Tensor:
        """A copy, the same for all units: a cache that grows is passed again and again."""
        key = id(tensor), version_of(tensor)
        if key not in copies:
            copies[key] = tensor, alone(tensor)  # with itself, whose id then stays its own
        return copies[key][1]

    def enter(path: str) -> Callable[..., None]:
        def hook(module: nn.Module, args: Any, kwargs: Any) -> None:
            if path in notes:
                return
            try:
                notes[path] = _Note(*copy_tree((args, kwargs), snapshot))
            except ModelError as error:
                notes[path] = _Note((), {}, error.what)

        return hook

    def leave(path: str) -> Callable[..., None]:
        def hook(module: nn.Module, args: Any, output: Any) -> Any:
            marked = map_tensors(mark, output)  # uses inside the unit do not count
            if notes[path].ends is None:
                notes[path].ends = tuple((t.grad_fn, t.output_nr) for t in tensors_in(marked))
            return marked

        return hook

    hooks = []
    try:
        for path in paths:
            unit = model.get_submodule(path)
            hooks.append(unit.register_forward_pre_hook(enter(path), with_kwargs=True))
            hooks.append(unit.register_forward_hook(leave(path)))
        yield notes
    finally:
        for hook in hooks:
            hook.remove()


def _with_use(notes: Mapping[str, _Note], output: object) -> dict[str, UnitArguments]:
    """The calls, with the outputs that the model's output depends on.

    They are all that a call returns where it seems to depend on none: the model's own code may have
    taken them within the call, before they were marked.
    """
    left = [(t.grad_fn, t.output_nr) for t in tensors_in(output)]
    reached: set[tuple[Any, int]] = set()
    while left:
        place = left.pop()
        if place[0] is not None and place not in reached:
            reached.add(place)
            left += place[0].next_functions

    def used(ends: tuple[tuple[Any, int], ...]) -> frozenset[int]:
        followed = [n for n, place in enumerate(ends) if place[0] is not None]
        seen = [number for number in followed if ends[number] in reached]
        # Tensors outside the graph cannot be followed, and count as used.
        return frozenset(range(len(ends))) - frozenset(followed) | frozenset(seen or followed)

    return {
        path: UnitArguments(note.args, note.kwargs, used(note.ends or ()), note.why_not)
        for path, note in notes.items()
    }


def alone(tensor: Tensor) -> Tensor:
    """A detached copy, which needs a gradient if the tensor does."""
    return tensor.detach().clone().requires_grad_(tensor.requires_grad)


@contextmanager
def _left_as_it_was(model: nn.Module) -> Iterator[None]:
    """Inside, the model is in eval mode; whatever its forward does to attributes and buffers is
    done to copies of them."""

    def own(tensor: Tensor) -> Tensor:
        return tensor if isinstance(tensor, nn.Parameter) else tensor.clone()

    with unchanged_code([model]), preserved_random_state(), replaced([model], own):
        model.eval()
        yield
