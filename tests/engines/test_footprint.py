"""Optimizer states are counted by letting the optimizer step once."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import pytest
import torch
from torch import nn

from engines.footprint import optimizer_footprint
from profiles.errors import InputError
from profiles.workload import OPTIMIZERS


class Averaged(torch.optim.Optimizer):
    """A user's own: three fp32 copies and a bf16 one per element, 14 bytes."""

    def __init__(self, params: Iterable[nn.Parameter]) -> None:
        super().__init__(params, {})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for parameter in group["params"]:
                state = self.state[parameter]
                for name in ("one", "two", "three"):
                    state[name] = torch.zeros_like(parameter)
                state["half"] = torch.zeros_like(parameter, dtype=torch.bfloat16)
                state["step"] = torch.tensor(0.0)


@pytest.mark.parametrize(
    ("factory", "state_bytes"),
    [
        (lambda p: torch.optim.SGD(p, lr=0.1), 0),
        (lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9), 4),
        (lambda p: torch.optim.AdamW(p), 8),
        (lambda p: torch.optim.AdamW(p, amsgrad=True), 12),
        (lambda p: torch.optim.RMSprop(p), 4),
        (Averaged, 14),
    ],
)
def test_state_bytes_are_those_of_the_textbook(
    factory: Callable[[list[nn.Parameter]], torch.optim.Optimizer], state_bytes: int
) -> None:
    found = optimizer_footprint(factory)
    assert found.state_bytes_per_element == state_bytes


@pytest.mark.parametrize("foreach", [False, True])
def test_the_named_optimizers_move_what_torchs_defaults_move(foreach: bool) -> None:
    factories: dict[str, Callable[[list[nn.Parameter]], torch.optim.Optimizer]] = {
        "sgd": lambda p: torch.optim.SGD(p, lr=0.1, foreach=foreach),
        "sgd-momentum": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, foreach=foreach),
        "adam": lambda p: torch.optim.Adam(p, foreach=foreach),
        "adamw": lambda p: torch.optim.AdamW(p, foreach=foreach),
    }
    assert factories.keys() == OPTIMIZERS.keys()
    for name, factory in factories.items():
        found = optimizer_footprint(factory)
        assert found.state_bytes_per_element == OPTIMIZERS[name].state_bytes_per_element
        assert found.moved_bytes_per_element == pytest.approx(
            OPTIMIZERS[name].moved_bytes_per_element, rel=1e-3
        )


def test_plain_sgd_moves_parameter_and_gradient_once() -> None:
    # p <- p - lr g: p and g read, p written, 4 bytes each.
    assert optimizer_footprint(lambda p: torch.optim.SGD(p, lr=0.1)).moved_bytes_per_element == 12


def test_adafactor_keeps_a_row_and_a_column_per_matrix() -> None:
    found = optimizer_footprint(lambda p: torch.optim.Adafactor(p))
    assert found.state_bytes_per_element == pytest.approx(4 * (64 + 64) / 64**2)


def test_an_optimizer_that_exists_is_measured_without_touching_it() -> None:
    model = nn.Linear(1000, 1000)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    before = model.weight.clone()
    assert optimizer_footprint(optimizer).state_bytes_per_element == 8
    assert torch.equal(model.weight, before)
    assert not optimizer.state
    assert optimizer.param_groups[0]["params"][0] is model.weight


def test_no_optimizer_is_adamw() -> None:
    assert optimizer_footprint(None).state_bytes_per_element == 8


def test_a_factory_that_ignores_its_parameters_is_refused() -> None:
    model = nn.Linear(3, 3)
    with pytest.raises(InputError, match="does not use the parameters"):
        optimizer_footprint(lambda params: torch.optim.SGD(model.parameters(), lr=0.1))
