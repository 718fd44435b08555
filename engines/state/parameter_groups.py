"""Parameter groups as a factory makes them of the whole model, on ranks that hold parts of it.

A factory may sort parameters by their place in the list, their shape or their size. Of a stage's
parameters, or of slices of the model's, it would make other groups than one process has.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from engines.state.layout import Layout

Group = dict[str, Any]


def groups_of_whole(
    given: Any, names_before: Mapping[nn.Parameter, str], layout: Layout
) -> list[Group] | None:
    """The groups that the factory `given` makes of the whole model's trainable parameters, with
    names in the place of parameters.

    None where every rank has those, or where the factory takes no parameters without values. It
    is asked before it makes the real optimizer, which it may keep.
    """
    if not layout.is_partial:
        return None
    trainable = [name for parameter, name in names_before.items() if parameter.requires_grad]
    forms = {name: (layout.shape(name), layout.dtype(name)) for name in trainable}
    for whole in _stand_ins(forms, layout.device):
        try:
            groups = given(list(whole)).param_groups
            return [{**group, "params": [whole[p] for p in group["params"]]} for group in groups]
        except Exception:  # a factory is the user's code: it may look at devices
            continue
    return None


def regroup(
    optimizer: torch.optim.Optimizer, groups: list[Group], own: Mapping[str, nn.Parameter]
) -> None:
    """Let `optimizer` have the groups of the whole model, with the parameters that this rank has.

    All ranks have as many groups then; some may be empty here.
    """
    as_whole = [
        {**group, "params": [own[name] for name in group["params"] if name in own]}
        for group in groups
    ]
    if not _are_equal(as_whole, optimizer.param_groups):
        optimizer.param_groups[:] = as_whole


def _stand_ins(
    forms: Mapping[str, tuple[Any, torch.dtype]], device: torch.device
) -> Iterator[dict[nn.Parameter, str]]:
    """Parameters of whole shapes that take no memory: without values, else of one element each."""
    yield {
        nn.Parameter(torch.empty(shape, dtype=dtype, device="meta")): name
        for name, (shape, dtype) in forms.items()
    }
    yield {
        nn.Parameter(torch.zeros((), dtype=dtype, device=device).expand(shape)): name
        for name, (shape, dtype) in forms.items()
    }


def _are_equal(groups: list[Group], others: list[Group]) -> bool:
    return len(groups) == len(others) and all(
        one.keys() == other.keys() and all(_same(one[key], other[key]) for key in one)
        for one, other in zip(groups, others, strict=True)
    )


def _same(one: object, other: object) -> bool:
    if isinstance(one, list) and isinstance(other, list):
        return len(one) == len(other) and all(map(_same, one, other))
    if isinstance(one, nn.Parameter):
        return one is other
    if isinstance(one, Tensor):
        return isinstance(other, Tensor) and torch.equal(one, other)
    return bool(one == other)
