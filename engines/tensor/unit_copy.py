"""Copies of a unit and one of its calls with random numbers, to try splits on."""

from __future__ import annotations

import copy
import functools
import re
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from enum import Enum
from typing import Any

import torch
from torch import Tensor, nn

from engines.tensor.copy_tree import copy_tree
from profiles.capture.batch.call import Batch, call_model
from profiles.capture.batch.rows import split_rows
from profiles.capture.batch.tree import map_batch
from profiles.capture.fakes.code_states import CodeStates, unchanged_code
from profiles.capture.fakes.known_values import known_values
from profiles.capture.fakes.mode import FakeRunMode
from profiles.capture.fakes.tensors import preserved_random_state, replaced, stand_ins
from profiles.capture.module.hooks import own_hooks
from profiles.errors import ModelError
from profiles.torch_compat import (
    flatten,
    is_fake,
    map_tensors,
    tensors_in,
    version_of,
    without_onednn,
)

SEED = 20
TOKENS = 64  # of a sequence: a layer is split right for few as for many
LARGE = 2**26  # parameters from which on a copy in float64 would be felt in memory
_OWN_NUMBER = ("layer_idx", "layer_id", "block_idx", "index")


class Masks(Enum):
    """Made-up values of arguments that need no gradient; others are random numbers."""

    ONES = "whole numbers and booleans are 1"
    ZEROS = "whole numbers and booleans are 0"
    MIXED = "whole numbers and booleans are 0 or 1, and half of other numbers are 0"
    ALL_ONES = "all are 1"


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
class UnitCopy:
    """One unit with the arguments of one call, on the CPU.

    Attributes:
        paths: the units of the model that are alike; the first one was copied.
        used: numbers of the tensors of its output that the model's output depends on; blocks return
            attention weights that are not used.
        values: of its parameters, by name. Not as initialised, because a bias of zeros or a norm
            of ones hides mistakes.
        code: state of the unit's code, which copies share: what functions close over, say.
    """

    paths: tuple[str, ...]
    unit: nn.Module
    args: Any
    kwargs: Any
    used: frozenset[int]
    values: Mapping[str, Tensor] = field(repr=False)
    code: CodeStates = field(repr=False)

    @contextmanager
    def running(self) -> Iterator[None]:
        """Around a run of a copy: all begin with the state that the unit's code has, and leave it
        to the training."""
        try:
            yield
        finally:
            self.code.restore()

    def fresh(self) -> nn.Module:
        """A copy of the unit that shares `values`: they must not be written to."""
        memo: dict[int, Any] = {
            id(parameter): nn.Parameter(self.values[name])
            for name, parameter in self.unit.named_parameters()
        }
        return copy.deepcopy(self.unit, memo)

    def outputs(self, returned: object) -> list[Tensor]:
        """The tensors of a call's output that are used."""
        return [t for number, t in enumerate(tensors_in(returned)) if number in self.used]

    def inputs(self) -> tuple[Any, Any, list[Tensor]]:
        """Arguments for one call, and the leaves that get their gradients.

        The arguments are copies of those leaves: a unit may write to them, also to a cache, so
        that every call has its own.
        """
        leaves: list[Tensor] = []

        def given(tensor: Tensor) -> Tensor:
            leaf = _alone(tensor)
            if leaf.requires_grad:
                leaves.append(leaf)
            return leaf.clone()

        args, kwargs = copy_tree((self.args, self.kwargs), given)
        return args, kwargs, leaves


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


def copy_unit(model: nn.Module, kind: UnitKind) -> UnitCopy:
    """Copy the first unit of a kind with random numbers on which it runs and stays finite, and on
    which as many of its parameters as can be have a gradient: a mask may hide what others show.

    Raises:
        ModelError: there are none, or the arguments of its call cannot be copied.
    """
    paths, call = kind.paths, kind.call
    if call.why_not:
        raise _untried(paths[0], call.why_not)
    original = model.get_submodule(paths[0])
    is_large = sum(parameter.numel() for parameter in original.parameters()) > LARGE
    why_not, code = "", CodeStates([original])
    # Code may cast to float32 by name.
    for dtype in [torch.float32] if is_large else [torch.float64, torch.float32]:
        best: tuple[int, UnitCopy] | None = None
        for masks in Masks:
            try:
                made = _made_up(original, paths, call, dtype, masks, code)
                with made.running():
                    outputs, reached, least = _tried(made)
            except Exception as error:  # the unit's own code, on numbers it was not made for
                why_not = first_line(error)
                continue
            if not all(is_fake(t) or t.isfinite().all() for t in outputs):
                why_not = "it makes numbers that are not finite"
                continue
            if best is None or reached > best[0]:
                best = reached, made
            if reached >= least:
                break
        if best is not None:
            return best[1]
    raise _untried(paths[0], why_not)


def _tried(made: UnitCopy) -> tuple[list[Tensor], int, int]:
    """Outputs of a copy; the number of parameters with a gradient that is not zero, and the number
    from which on other masks show no more."""
    unit = made.fresh()
    args, kwargs, _ = made.inputs()
    others = [t for t in tensors_in((args, kwargs)) if not t.requires_grad]
    if not others or any(map(is_fake, others)):
        with torch.no_grad():
            return made.outputs(unit(*args, **kwargs)), 0, 0
    outputs = made.outputs(unit(*args, **kwargs))
    ends = [t for t in outputs if t.requires_grad]
    torch.autograd.backward(ends, [torch.linspace(1, 2, t.numel()).to(t).view_as(t) for t in ends])
    gradients = [p.grad.to_dense() for p in unit.parameters() if p.grad is not None]
    return [t.detach() for t in outputs], sum(bool(g.any()) for g in gradients), len(gradients)


def _untried(path: str, why_not: str) -> ModelError:
    return ModelError(
        f"`{path}` cannot be tried alone: {why_not}",
        hints=["leave its layers out of `tensor_styles`"],
    )


def first_line(error: Exception) -> str:
    """The first line of an exception."""
    return (str(error).strip().splitlines() or [type(error).__name__])[0]


def _made_up(
    original: nn.Module,
    paths: tuple[str, ...],
    call: UnitArguments,
    dtype: torch.dtype,
    masks: Masks,
    code: CodeStates,
) -> UnitCopy:
    generator = torch.Generator().manual_seed(SEED)

    def noise(shape: torch.Size) -> Tensor:
        return torch.randn(shape, generator=generator, dtype=torch.float32).to(dtype)

    def argument(tensor: Tensor) -> Tensor:
        if not tensor.is_floating_point():
            filled = torch.full(tensor.shape, masks is not Masks.ZEROS)
            made = chance(tensor.shape) if masks is Masks.MIXED else filled
            return made.to(tensor.dtype) if is_fake(tensor) else tensor.cpu()
        value = noise(tensor.shape) if is_fake(tensor) else tensor.detach().to("cpu", dtype)
        if is_fake(tensor) and not tensor.requires_grad:
            value *= chance(tensor.shape) if masks is Masks.MIXED else 1
            value = torch.ones_like(value) if masks is Masks.ALL_ONES else value
        return value.clone().requires_grad_(tensor.requires_grad)

    def chance(shape: torch.Size) -> Tensor:
        return torch.randint(2, shape, generator=generator)

    memo: dict[int, Any] = {}
    values = {}
    for name, parameter in original.named_parameters():
        values[name] = noise(parameter.shape)
        if parameter.dim() > 1:
            values[name] /= parameter[0].numel() ** 0.5
        else:
            values[name] = 0.5 + 0.5 * values[name]
        memo[id(parameter)] = nn.Parameter(torch.empty_like(values[name], device="meta"))
    for buffer in original.buffers():
        memo[id(buffer)] = noise(buffer.shape) if buffer.is_meta else argument(buffer)
    args, kwargs = copy_tree((call.args, call.kwargs), argument)
    floats = [tensor for tensor in tensors_in((args, kwargs)) if tensor.is_floating_point()]
    if floats:
        floats[0].requires_grad_()  # its main input, also in a frozen model
    unit = copy.deepcopy(original, memo).eval()
    return UnitCopy(paths, unit, args, kwargs, call.used, values, code)


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
        return _setting(value.func)
    return getattr(value, "__code__", None)


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
            copies[key] = tensor, _alone(tensor)  # with itself, whose id then stays its own
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


def _alone(tensor: Tensor) -> Tensor:
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
