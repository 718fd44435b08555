"""Copies of modules that hold results of operations."""

from __future__ import annotations

import warnings

import torch
from torch import nn

from profiles.torch_compat.module_copy import copy_module


def test_a_copy_has_results_without_their_history() -> None:
    module = nn.Linear(3, 2)
    module.last = result = module(torch.ones(1, 3))  # type: ignore[assignment]
    module.seen = [result]  # type: ignore[assignment]
    made = copy_module(module)
    assert torch.equal(made.last, result)
    assert made.last.grad_fn is None
    assert made.seen[0] is made.last
    assert result.grad_fn is not None


def test_a_copy_computes_the_weight_of_a_hook_from_its_own_parameters() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)  # in favour of parametrizations
        module = nn.utils.weight_norm(nn.Linear(3, 2))
    made = copy_module(module)
    with torch.no_grad():
        made.weight_g.mul_(2)
        made.bias.zero_()
    x = torch.randn(4, 3)
    torch.testing.assert_close(made(x), 2 * (module(x) - module.bias))


def test_known_copies_are_taken() -> None:
    module = nn.Linear(3, 2)
    weight = nn.Parameter(torch.zeros(2, 3))
    assert copy_module(module, {id(module.weight): weight}).weight is weight
