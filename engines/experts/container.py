"""Modules that hold experts (by `profiles.capture.module.experts`), and the test that these can be
sharded."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from profiles.capture.fakes.tensors import preserved_random_state
from profiles.capture.module.experts import experts_of
from profiles.errors import PlanError, a_type

TOLERANCE = 1e-4
"""Relative; sums in another order differ by far less, other experts by the order of 1."""
TOKENS_AN_EXPERT = 2  # of the trial


def containers(model: nn.Module) -> dict[str, nn.Module]:
    """The modules of the form, by path."""
    return {path: module for path, module in model.named_modules() if experts_of(module)}


@contextmanager
def counting(module: nn.Module, count: int) -> Iterator[None]:
    """Inside, the module's attributes say that there are `count` experts."""
    before = counts_of(module)
    try:
        for name in before:
            setattr(module, name, count)
        yield
    finally:
        for name, value in before.items():
            setattr(module, name, value)


def counts_of(module: nn.Module) -> dict[str, int]:
    """The attributes that say how many experts there are."""
    total = experts_of(module)
    return {
        name: value
        for name, value in vars(module).items()
        if type(value) is int and value == total and "expert" in name
    }


def require_separable(path: str, module: nn.Module, *, size: int) -> None:
    """Require that slices of the experts compute their parts of the whole, on random tokens.

    Raises:
        PlanError: they do not, or an expert's output is not proportional to its weight.
    """
    with torch.no_grad(), preserved_random_state():
        why_not = _why_not(module, size)
    if why_not:
        raise PlanError(
            f"the experts of `{path}` over {size} ranks do not compute what they compute on one:"
            f" {why_not}",
            where=f"{a_type(module)} of {experts_of(module)} experts",
            hints=["set ep=1"],
        )


def _why_not(module: nn.Module, size: int) -> str:
    total = experts_of(module)
    generator = torch.Generator().manual_seed(20)
    own = _with_values(dict(module.named_parameters(recurse=False)), generator)
    like = next(weight for weight in own.values() if weight.dim() == 3)
    count = TOKENS_AN_EXPERT * total
    chosen = torch.stack([torch.randperm(total, generator=generator)[:2] for _ in range(count)])
    chosen = chosen.to(like.device)
    weights = (torch.rand(count, chosen.shape[1], generator=generator) + 0.5).to(like)
    for width in dict.fromkeys(like.shape[1:]):  # whichever of the two a token is
        hidden = torch.randn(count, width, generator=generator).to(like)
        try:
            whole = torch.func.functional_call(module, own, (hidden, chosen, weights))
        except (RuntimeError, IndexError, ValueError, TypeError) as error:
            why_not = (str(error).strip().splitlines() or [type(error).__name__])[0]
            continue
        if not isinstance(whole, Tensor) or whole.shape != hidden.shape:
            why_not = "it does not return tokens"
            continue
        added = torch.zeros_like(whole)
        try:
            for rank in range(size):
                added += _part(module, own, hidden, chosen, weights, rank=rank, size=size)
        except (RuntimeError, IndexError, ValueError, TypeError) as error:
            return (str(error).strip().splitlines() or [type(error).__name__])[0]
        bound = TOLERANCE if whole.dtype is torch.float32 else 0.05  # of half precision
        differs = (added - whole).abs().max() > bound * whole.abs().max()
        return "their parts do not add up to the whole" if differs else ""
    return why_not


def _with_values(own: Mapping[str, Tensor], generator: torch.Generator) -> dict[str, Tensor]:
    """Random values in place of those on the meta device; one module's at a time."""
    return {
        name: torch.randn(weight.shape, generator=generator).to(weight.dtype).mul_(0.02)
        if weight.is_meta
        else weight
        for name, weight in own.items()
    }


def _part(
    module: nn.Module,
    own: Mapping[str, Tensor],
    hidden: Tensor,
    chosen: Tensor,
    weights: Tensor,
    *,
    rank: int,
    size: int,
) -> Tensor:
    """The output of one rank's experts, each called alone on its tokens and weighted afterwards."""
    each = experts_of(module) // size
    slices = {name: weight.narrow(0, rank * each, each) for name, weight in own.items()}
    token, place = ((chosen // each) == rank).nonzero(as_tuple=True)
    numbers = (chosen[token, place] - rank * each)[:, None]
    with counting(module, each):
        made = torch.func.functional_call(
            module, slices, (hidden[token], numbers, torch.ones_like(weights[token, :1]))
        )
    weighted = made * weights[token, place, None]
    return torch.zeros_like(hidden).index_add(0, token, weighted)
