"""Follows sums of values, which are values' only use in a residual stream between units."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor

from profiles.capture.traces.storages import Storages
from profiles.model.flow import Key
from profiles.torch_compat import Operator

TermSet = frozenset[Key]
"""The terms of a sum, in no order; a value by itself is a sum of one."""

# A longer sum is not followed: its terms count as taken one by one. As many as residual models have
# layers; of each prefix of a sum the terms are noted.
MOST_TERMS = 256
_Layout = tuple[torch.Size, tuple[int, ...], int, torch.dtype]


class SumTrace:
    """Knows of each memory which sums of values its contents are made of.

    A memory that a call returned is a sum of one value. What an addition of two whole sums makes is
    the sum of both; what other code makes is made of the sums that it reads. Memory is known by its
    number.
    """

    def __init__(self, storages: Storages) -> None:
        self._storages = storages
        self._made_of: dict[int, frozenset[TermSet]] = {}
        self._whole: dict[int, tuple[_Layout, TermSet]] = {}  # of memories that are one sum

    def put(self, memory: int, values: Iterable[Key], whole: Tensor | None = None) -> None:
        """The memory holds these values now; `whole` if it is one and fills it."""
        terms = frozenset(values)
        self._made_of[memory] = frozenset(frozenset({value}) for value in terms)
        self._whole.pop(memory, None)
        layout = _layout(whole) if whole is not None and len(terms) == 1 else None
        if layout is not None:
            self._whole[memory] = layout, terms

    def put_sum(self, tensor: Tensor, terms: TermSet) -> None:
        """The tensor is the sum of these now."""
        memory, layout = self._storages.memory_of(tensor), _layout(tensor)
        if memory is not None and layout is not None:
            self._made_of[memory] = frozenset({terms})
            self._whole[memory] = layout, terms

    def mix(self, tensor: Tensor, sums: frozenset[TermSet], *, is_written: bool) -> None:
        """Code made the tensor, or wrote to it, and read these."""
        memory = self._storages.memory_of(tensor)
        if memory is None:
            return
        self._made_of[memory] = self._made_of.get(memory, frozenset()) | sums
        if is_written:
            self._whole.pop(memory, None)

    def of(self, tensor: Tensor, sources: TermSet) -> frozenset[TermSet]:
        """Sums that a tensor is made of, where these are all of their terms."""
        memory = self._storages.memory_of(tensor)
        known = self._made_of.get(memory, frozenset()) if memory is not None else frozenset()
        within = {terms for terms in known if terms <= sources}
        alone = sources.difference(*within)
        return frozenset(within | {frozenset({source}) for source in alone})

    def added(self, tensors: Sequence[Tensor], made_of: TermSet) -> TermSet | None:
        """Terms of the sum of two tensors of the same shape; None if it is not one of values alone.

        Args:
            made_of: all that the tensors are made of.
        """
        parts = [self._terms(tensor) for tensor in tensors]
        if len(parts) != 2 or parts[0] is None or parts[1] is None:
            return None
        one, other = tensors
        total = parts[0] | parts[1]
        is_sum = len(total) == len(parts[0]) + len(parts[1]) <= MOST_TERMS
        is_alike = one.shape == other.shape and one.dtype == other.dtype
        return total if is_sum and is_alike and total == made_of else None

    def _terms(self, tensor: Tensor) -> TermSet | None:
        memory = self._storages.memory_of(tensor)
        whole = self._whole.get(memory) if memory is not None else None
        return whole[1] if whole is not None and whole[0] == _layout(tensor) else None


def is_addition(operator: Operator, args: Sequence[Any], kwargs: dict[str, Any]) -> bool:
    """Return True if the operator adds two tensors, neither of them scaled."""
    adds = operator in (torch.ops.aten.add.Tensor, torch.ops.aten.add_.Tensor)
    are_tensors = len(args) == 2 and all(isinstance(each, Tensor) for each in args)
    return adds and are_tensors and kwargs.get("alpha", 1) == 1


def _layout(tensor: Tensor) -> _Layout | None:
    if tensor.layout is not torch.strided:
        return None
    return tensor.shape, tensor.stride(), int(tensor.storage_offset()), tensor.dtype
