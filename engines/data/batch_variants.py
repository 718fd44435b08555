"""Batches like a sample, with values that it happens not to have.

A sample may have no padding, or a mask that hides nothing, where later batches have both. In each
variant some elements are replaced, more of them the later the row, at the end of what a row has. In
one variant all are in order, so that what code does with some values falls on a few of the rows.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeVar

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from profiles.capture.batch.call import Batch
from profiles.capture.batch.dims import Dims
from profiles.capture.batch.tree import INSIDE, batch_items, map_nodes
from profiles.record import Record
from profiles.torch_compat import is_fake

USUAL = (0, -100, -1)
"""Values that stand for no target, no token or masked, whatever the code says."""
MOST_COMPARED = 4
_COMPARISONS = frozenset(
    {"eq", "ne", "lt", "le", "gt", "ge", "equal", "not_equal", "less", "less_equal", "greater"}
    | {"greater_equal"}
)
Ran = TypeVar("Ran")


class Change(Record):
    """A value that is put in place of others.

    Attributes:
        number: it; None: what is no number (nan).
        is_half: half of each value in its place, of lengths and of weights.
        is_order: whole numbers change places, the smallest to the first row.
    """

    number: int | None = None
    is_half: bool = False
    is_order: bool = False

    def __str__(self) -> str:
        if self.is_order:
            return "the same values in ascending order"
        word = "nan" if self.number is None else str(self.number)
        return "values that differ" if self.is_half else word

    def made(self, tensor: Tensor) -> Tensor | None:
        """Values for every place; None where such a tensor holds none of them."""
        is_float, is_bool = tensor.is_floating_point(), tensor.dtype == torch.bool
        if tensor.is_complex():
            return None
        if self.is_order:
            if is_float or is_bool or _is_mask(tensor):
                return None
            return tensor.flatten().sort().values.view(tensor.shape)
        if self.is_half and is_float:
            return tensor / 2 if _is_mask(tensor) else None
        if self.is_half:
            return (tensor + 1) // 2 if tensor.ndim == 1 and not is_bool else None
        if self.number is None:
            return torch.full_like(tensor, torch.nan) if is_float else None
        if self.number == 1 and not _is_mask(tensor):
            return None
        if self.number not in (0, 1) and (is_float or is_bool):
            return None
        return torch.full_like(tensor, self.number)

    def is_in(self, tensor: Tensor) -> bool:
        if self.is_order:
            return True  # a batch has its values in any order
        if self.is_half:
            is_float = tensor.is_floating_point()
            return not _is_mask(tensor) if is_float else bool((tensor != tensor[:1]).any())
        return bool((tensor.isnan() if self.number is None else tensor == self.number).any())


@dataclass(frozen=True, slots=True)
class Variant:
    """A batch with a change in the tensors of `names`."""

    batch: Batch
    names: tuple[str, ...]
    change: Change


def ran_variants(
    batch: Batch,
    dims: Dims,
    run: Callable[[Variant], Ran | None],
    *,
    numbers: Iterable[int],
    fixed: Iterable[str] = (),
    one_by_one: bool = False,
) -> Iterator[Ran]:
    """Results of `run` on variants of `batch`; None is that of one that does not run.

    Args:
        numbers: to put in place of others, where a tensor can hold them.
        fixed: names of tensors to be left alone.
        one_by_one: one tensor a variant; else all, at places of their own, and one by one only
            where that does not run.
    """
    left_alone = set(fixed)
    tensors = {n: t for n, t in with_rows(batch, dims).items() if n not in left_alone}
    changes = [Change(number=number) for number in dict.fromkeys([*numbers, 1])]
    for change in (*changes, Change(), Change(is_half=True), Change(is_order=True)):
        changed: dict[str, Tensor] = {}
        for number, (name, tensor) in enumerate(tensors.items()):
            made = change.made(tensor)
            if made is not None:
                places = _places(tensor, number).to(tensor.device) | change.is_order
                new = torch.where(places, made.to(tensor.dtype), tensor.detach())
                changed |= {} if torch.equal(new, tensor) else {name: new}
        groups = [{name: new} for name, new in changed.items()]
        if len(groups) > 1 and not one_by_one:
            ran = run(Variant(_replaced(batch, changed), tuple(changed), change))
            if ran is not None:
                yield ran
                continue
        for group in groups:
            ran = run(Variant(_replaced(batch, group), tuple(group), change))
            if ran is not None:
                yield ran


def with_rows(batch: Batch, dims: Dims) -> dict[str, Tensor]:
    """The tensors of a batch that have rows as their first dimension, by name."""
    return {
        name: value
        for name, value in batch_items(batch)
        if isinstance(value, Tensor)
        and value.ndim
        and dims.get(name, 0) == 0
        and not value.is_nested
        and value.layout is torch.strided
    }


def _is_mask(tensor: Tensor) -> bool:
    return bool(((tensor == 0) | (tensor == 1)).all())


def _places(tensor: Tensor, number: int) -> Tensor:
    """True at places at the end of later rows; at more or fewer of them by `number`."""
    rows = torch.arange(tensor.size(0), dtype=torch.float64) / max(1, tensor.size(0) - 1)
    shift = (0.5, 0.8, 0.2, 0.65, 0.35)[number % 5]
    if tensor.ndim == 1 or tensor.size(1) == 1:
        chosen = rows + shift >= 1
        return chosen.reshape(-1, *[1] * (tensor.ndim - 1)).expand(tensor.shape)
    most = max(1, tensor.size(1) // 2 - 1)
    most -= number % most
    left = tensor.size(1) - (rows * most + shift).floor().clamp(max=most)
    chosen = torch.arange(tensor.size(1)) >= left[:, None]
    return chosen.reshape(*chosen.shape, *[1] * (tensor.ndim - 2)).expand(tensor.shape)


def _replaced(batch: Batch, values: Mapping[str, Tensor]) -> Batch:
    return map_nodes(lambda name, value: values.get(name, INSIDE), batch)


class ComparedNumbers(TorchFunctionMode):
    """Record the whole numbers that the code inside compares tensors with: -1 of `labels != -1`,
    and of `labels >= 0`, which -1 is not."""

    def __init__(self) -> None:
        super().__init__()
        self._seen: dict[int, None] = {}

    @property
    def numbers(self) -> tuple[int, ...]:
        """The usual ones, and the first few that were seen."""
        return tuple(dict.fromkeys([*USUAL, *self._seen]))[: len(USUAL) + MOST_COMPARED]

    def __torch_function__(
        self,
        func: Callable[..., object],
        types: Sequence[type],
        args: Sequence[object] = (),
        kwargs: Mapping[str, object] | None = None,
    ) -> object:
        kwargs = kwargs or {}
        name = getattr(func, "__name__", "").strip("_")
        if name in _COMPARISONS:
            for value in (*args, *kwargs.values()):
                number = _whole_number(value)
                if number is not None:
                    is_least = name in ("ge", "greater_equal", "lt", "less")
                    self._seen[number - is_least] = None
        return func(*args, **kwargs)


def _whole_number(value: object) -> int | None:
    if isinstance(value, Tensor):
        if value.ndim or value.is_floating_point() or value.is_meta or is_fake(value):
            return None
        return int(value.detach())
    return int(value) if isinstance(value, int) and not isinstance(value, bool) else None
