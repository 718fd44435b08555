"""Copies of arguments, down to the tensors inside of objects."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from engines.tensor.copy_tree import copy_tree
from profiles.capture.fakes.tensors import stand_ins
from profiles.errors import ModelError
from profiles.torch_compat import is_fake
from tests.engines.tensor import units


def test_writes_to_a_copied_cache_do_not_reach_the_original() -> None:
    cache = units.Cache()
    cache.keys[0] = torch.ones(2, requires_grad=True) * 3  # which a deep copy alone refuses
    copies, alias = copy_tree((cache, cache), lambda tensor: tensor.detach() + 1)
    assert copies is alias
    assert copies is not cache
    assert copies.keys[0].tolist() == [4, 4]
    assert copies.begin.item() == 1
    copies.keys[1] = torch.zeros(1)
    assert list(cache.keys) == [0]
    assert cache.keys[0].tolist() == [3, 3]


def test_fake_tensors_inside_of_an_object_are_made_real() -> None:
    cache = units.Cache()
    with stand_ins([nn.Linear(2, 3)]) as fakes:
        cache.begin = fakes.of(torch.tensor(7))
        cache.keys[0] = fakes.of(torch.zeros(4, 5, requires_grad=True)) * 2
    made = copy_tree(cache, lambda tensor: torch.full(tensor.shape, 6.0))
    assert is_fake(cache.keys[0])
    assert not is_fake(made.begin)
    assert not is_fake(made.keys[0])
    assert made.keys[0].sum() == 4 * 5 * 6


def test_an_object_without_tensors_is_copied_as_ever() -> None:
    results = {"device": torch.device("cpu"), "dtype": torch.float16, "numbers": [1, {2}]}
    assert copy_tree(results, lambda tensor: tensor) == results


@pytest.mark.parametrize("kind", [units.LockedCache, lambda: nn.Linear(2, 2)])
def test_an_object_that_cannot_be_copied_is_named(kind: type) -> None:
    with pytest.raises(ModelError, match=r"a (LockedCache|Linear) cannot be copied"):
        copy_tree([kind()], lambda tensor: tensor)
