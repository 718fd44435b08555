"""Copies of a unit and one of its calls with random numbers, to try splits on."""

from __future__ import annotations

from collections.abc import Container, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from enum import Enum
from typing import Any

import torch
from torch import Tensor, nn

from engines.blocks.forward_state import OF_TORCH
from engines.tensor.copy_tree import copy_tree
from engines.tensor.unit_kinds import UnitArguments, UnitKind, alone
from profiles.capture.fakes.code_states import CodeStates
from profiles.capture.fakes.object_states import object_states
from profiles.errors import ModelError
from profiles.model.flow import Flow
from profiles.torch_compat import (
    is_fake,
    tensors_in,
    version_of,
)
from profiles.torch_compat.module_copy import copy_module

SEED = 20
LARGE = 2**26  # parameters from which on a copy in float64 would be felt in memory


class Masks(Enum):
    """Made-up values of arguments that need no gradient; others are random numbers."""

    ONES = "whole numbers and booleans are 1"
    ZEROS = "whole numbers and booleans are 0"
    MIXED = "whole numbers and booleans are 0 or 1, and half of other numbers are 0"
    ALL_ONES = "all are 1"


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
        is_read: others compute with what a call leaves on its modules, or in what it was given.
    """

    paths: tuple[str, ...]
    unit: nn.Module
    args: Any
    kwargs: Any
    used: frozenset[int]
    values: Mapping[str, Tensor] = field(repr=False)
    code: CodeStates = field(repr=False)
    is_read: bool = False

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
        return copy_module(self.unit, memo)

    def call(self, unit: nn.Module, args: Any, kwargs: Any) -> list[Tensor]:
        """Call `unit`: the tensors of its output that are used, and those that it leaves for
        others."""
        before = self._left(unit, args, kwargs)
        written = {id(tensor): version_of(tensor) for tensor in before}
        returned = tensors_in(unit(*args, **kwargs))
        outputs = [t for number, t in enumerate(returned) if number in self.used]
        left = {id(tensor): tensor for tensor in self._left(unit, args, kwargs)}
        return [*outputs, *(t for key, t in left.items() if written.get(key) != version_of(t))]

    def _left(self, unit: nn.Module, args: Any, kwargs: Any) -> list[Tensor]:
        """Results on modules, in arguments, in objects among these and in the names and containers
        of the unit's code, if others read them."""
        if not self.is_read:
            return []
        names = [vars(module) for module in unit.modules()]
        values = [value for each in names for name, value in each.items() if name not in OF_TORCH]
        values += [args, kwargs]
        numbered = {str(number): value for number, value in enumerate(values)}
        parts = [state.part for state in object_states([numbered])]
        tensors = [*tensors_in([values, parts]), *self.code.tensors()]
        return [tensor for tensor in tensors if tensor.is_floating_point()]

    def inputs(self) -> tuple[Any, Any, list[Tensor]]:
        """Arguments for one call, and the leaves that get their gradients.

        The arguments are copies of those leaves: a unit may write to them, also to a cache, so
        that every call has its own.
        """
        leaves: list[Tensor] = []

        def given(tensor: Tensor) -> Tensor:
            leaf = alone(tensor)
            if leaf.requires_grad:
                leaves.append(leaf)
            return leaf.clone()

        args, kwargs = copy_tree((self.args, self.kwargs), given)
        return args, kwargs, leaves


def copy_unit(model: nn.Module, kind: UnitKind, *, read: Container[str] = ()) -> UnitCopy:
    """Copy the first unit of a kind with random numbers on which it runs and stays finite, and on
    which as many of its parameters as can be have a gradient: a mask may hide what others show.

    Args:
        read: units that leave results for others, beside what they return.

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
                made = replace(made, is_read=any(path in read for path in paths))
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
            return made.call(unit, args, kwargs), 0, 0
    outputs = made.call(unit, args, kwargs)
    ends = [t for t in outputs if t.requires_grad]
    torch.autograd.backward(ends, [torch.linspace(1, 2, t.numel()).to(t).view_as(t) for t in ends])
    gradients = [p.grad.to_dense() for p in unit.parameters() if p.grad is not None]
    return [t.detach() for t in outputs], sum(bool(g.any()) for g in gradients), len(gradients)


def _untried(path: str, why_not: str) -> ModelError:
    return ModelError(
        f"`{path}` cannot be tried alone: {why_not}",
        hints=["leave its layers out of `tensor_styles`"],
    )


def reads_left(flow: Flow) -> frozenset[str]:
    """The units that leave results for others beside what they return: on a list, say."""
    return frozenset(c.unit for c in flow.calls if not all(v.is_returned for v in c.values))


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
    unit = copy_module(original, memo).eval()
    return UnitCopy(paths, unit, args, kwargs, call.used, values, code)
