"""Modules that hold experts (by `profiles.capture.module.experts`), and the test that these can be
sharded."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from profiles.capture.fakes.tensors import preserved_random_state
from profiles.capture.frames import summary
from profiles.capture.module.experts import experts_of
from profiles.errors import PlanError, a_type
from profiles.torch_compat import tensors_in, version_of

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
        PlanError: they do not, an expert's output is not proportional to its weight, or a call
            leaves something beside its result.
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
    state = _with_values(module, generator)
    names = (name for name, p in module.named_parameters(recurse=False) if p.dim() == 3)
    like = state[next(names)]  # with values, also where the module's own are on meta
    count = TOKENS_AN_EXPERT * total
    spread = torch.stack([torch.randperm(total, generator=generator)[:2] for _ in range(count)])
    spread = spread.to(like.device)
    weights = (torch.rand(count, spread.shape[1], generator=generator) + 0.5).to(like)
    for width in dict.fromkeys(like.shape[1:]):  # whichever of the two a token is
        hidden = torch.randn(count, width, generator=generator).to(like)
        before = _tensors_of(module, state)
        try:
            whole = torch.func.functional_call(module, state, (hidden, spread, weights))
        except Exception as error:  # of the user's code
            why_not = summary(error)
            continue
        if not isinstance(whole, Tensor) or whole.shape != hidden.shape:
            why_not = "it does not return tokens"
            continue
        changed = _tensors_of(module, state) - before
        if changed:
            return f"a call keeps `{min(changed)[0]}`, which would be of other tokens"
        # An expert that drops tokens beyond its share of them does so where all choose it.
        for chosen in (spread, spread[:1, :1].expand(count, 1)):
            taken = weights[:, : chosen.shape[1]]
            difference = _difference(module, state, hidden, chosen, taken, size=size)
            if difference:
                return difference
        return ""
    return why_not


def _difference(
    module: nn.Module,
    state: Mapping[str, Tensor],
    hidden: Tensor,
    chosen: Tensor,
    weights: Tensor,
    *,
    size: int,
) -> str:
    """Of the parts' sum from the whole; empty if they are equal."""
    added = torch.zeros_like(hidden)
    try:
        whole = torch.func.functional_call(module, dict(state), (hidden, chosen, weights))
        for rank in range(size):
            added += _part(module, state, hidden, chosen, weights, rank=rank, size=size)
    except Exception as error:  # of the user's code
        return summary(error)
    bound = TOLERANCE if whole.dtype is torch.float32 else 0.05  # of half precision
    is_equal = (added - whole).abs().max() <= bound * whole.abs().max()
    return "" if is_equal else "their parts do not add up to the whole"


def _with_values(module: nn.Module, generator: torch.Generator) -> dict[str, Tensor]:
    """Its parameters and buffers at other numbers, one module's at a time: what is zero or one at
    the start of a training would hide whose number an expert takes."""
    state: dict[str, Tensor] = {}
    for name, weight in [*module.named_parameters(), *module.named_buffers()]:
        value = torch.zeros(weight.shape, dtype=weight.dtype) if weight.is_meta else weight
        if value.is_floating_point():
            drawn = torch.rand(value.shape, generator=generator).to(value)
            moved = value + drawn * value.abs().mean().clamp(min=0.04)
            value = torch.where(value.isfinite(), moved, value)
        state[name] = value.clone()
    return state


def _tensors_of(module: nn.Module, state: Mapping[str, Tensor]) -> set[tuple[str, int, int]]:
    """The tensors that its attributes and buffers hold: their names, which they are, and how often
    they were written to."""
    attributes = [item for each in module.modules() for item in vars(each).items()]
    return {
        (name, id(tensor), version_of(tensor))
        for name, value in [*attributes, *state.items()]
        for tensor in tensors_in(value)
    }


def _part(
    module: nn.Module,
    state: Mapping[str, Tensor],
    hidden: Tensor,
    chosen: Tensor,
    weights: Tensor,
    *,
    rank: int,
    size: int,
) -> Tensor:
    """The output of one rank's experts, each called alone on its tokens and weighted afterwards."""
    each = experts_of(module) // size
    own = [name for name, _ in module.named_parameters(recurse=False)]
    slices = {name: state[name].narrow(0, rank * each, each) for name in own}
    token, place = ((chosen // each) == rank).nonzero(as_tuple=True)
    numbers = (chosen[token, place] - rank * each)[:, None]
    with counting(module, each):
        made = torch.func.functional_call(
            module,
            {**state, **slices},
            (hidden[token], numbers, torch.ones_like(weights[token, :1])),
        )
    weighted = made * weights[token, place, None]
    return torch.zeros_like(hidden).index_add(0, token, weighted)
