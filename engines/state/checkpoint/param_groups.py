"""Parameter groups in a checkpoint: merged over ranks, compared with an optimizer's, taken over."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from itertools import chain, compress
from typing import Any

import torch
from torch import Tensor

from profiles.errors import FileError

State = dict[str, Any]


def merged_groups(every: list[list[State]], order: list[str]) -> list[State]:
    """Parameter groups over all ranks; settings are those of the first rank that has the group."""
    place = {name: number for number, name in enumerate(order)}
    merged = []
    for number in range(max(map(len, every), default=0)):
        parts = [rank[number] for rank in every if number < len(rank)]
        names = {name for part in parts for name in part["params"]}
        merged.append({**parts[0], "params": sorted(names, key=place.__getitem__)})
    return merged


def own_groups(saved: list[State], here: list[State]) -> list[State]:
    """Settings of the saved groups on this rank's parameters."""
    settings = {name: group for group in saved for name in group["params"]}
    result = []
    for number, group in enumerate(here):
        names = group["params"]
        fallback = saved[number] if number < len(saved) else group
        source = next((settings[name] for name in names if name in settings), fallback)
        result.append({**group, **source, "params": names})
    return result


@contextmanager
def without_empty_groups(
    optimizer: torch.optim.Optimizer, groups: list[State]
) -> Iterator[list[State]]:
    """Hide groups that have no parameters on this rank, as in a stage of a pipeline: torch's state
    dicts know one at most. After it they are back, with the settings in `groups`.

    Args:
        groups: of a state dict, one for each group of the optimizer.

    Yields those of `groups` that are not hidden.
    """
    has_any = [bool(group["params"]) for group in optimizer.param_groups]
    optimizer.param_groups = list(compress(optimizer.param_groups, has_any))
    try:
        yield list(compress(groups, has_any))
    finally:
        filled = iter(optimizer.param_groups)
        optimizer.param_groups = [
            next(filled) if is_filled else {**group, "params": []}
            for is_filled, group in zip(has_any, groups, strict=True)
        ]


def require_groups(
    folder: object, saved: object, here: list[State], names: Collection[str]
) -> None:
    """Compare saved groups with this rank's, so that taking them over cannot fail.

    Settings that are not saved stay as they are here: releases of torch add some.

    Args:
        names: of the model's parameters, on all ranks.

    Raises:
        FileError: `merged_groups` makes no such groups, or they are of another optimizer.
    """
    groups: list[Any] = saved if isinstance(saved, list) else [saved]
    if not all(isinstance(group, dict) and _names(group.get("params")) for group in groups):
        raise _refused(folder, "they are no list of settings with the names of parameters")
    counts = Counter(chain.from_iterable(group["params"] for group in groups))
    for name, count in counts.items():
        if name not in names or count > 1:
            why = "is in two of them" if count > 1 else "is no parameter of this model"
            raise _refused(folder, f"`{name}` {why}")
    for number, group in enumerate(groups):
        if not all(isinstance(setting, str) for setting in group):
            raise _refused(folder, f"group {number} has settings without a name")
        if "lr" not in group and any("lr" in each for each in here):
            raise _refused(folder, f"group {number} has no `lr`")
    for before, after in zip(here, own_groups(groups, here), strict=True):
        for setting, value in after.items():
            if setting != "params" and not is_alike(value, before.get(setting)):
                was = f", here it is {before[setting]!r}" if setting in before else ""
                raise _refused(folder, f"`{setting}` is {value!r}{was}")


def is_alike(saved: object, here: object) -> bool:
    """True if `saved` may take the place of `here`: of its kind, a number and no nan, as finite and
    no more negative. None stands for a default, which may be anything plain."""
    match here:
        case None:
            return not isinstance(saved, float) or not math.isnan(saved)
        case bool():
            return saved is None or isinstance(saved, bool)
        case int() | float() | Tensor():
            return _is_like_number(saved, here)
        case list() | tuple():
            if not isinstance(saved, list | tuple) or len(saved) != len(here):
                return False
            return all(is_alike(one, other) for one, other in zip(saved, here, strict=True))
    return isinstance(saved, type(here))


def _is_like_number(saved: object, here: float | Tensor) -> bool:
    if isinstance(saved, bool) or not isinstance(saved, int | float | Tensor):
        return False
    value, known = torch.as_tensor(saved), torch.as_tensor(here)
    if value.is_complex() or value.numel() != 1 or known.numel() != 1:
        return False
    number, before = value.item(), known.item()
    return (math.isfinite(number) or number == before) and (number >= 0 or before < 0)


def _names(value: object) -> bool:
    return isinstance(value, list) and all(isinstance(name, str) for name in value)


def _refused(folder: object, why: str) -> FileError:
    return FileError(
        f"`{folder}` has parameter groups that do not fit this optimizer: {why}",
        hints=["load the weights alone: `parallel.load_state_dict(...)`"],
    )
