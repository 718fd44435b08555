"""Lists, dicts and objects that units are given, and that units of other stages change."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from profiles.errors import PlanError, RankError
from tests.engines.cases import Case
from tests.engines.parity import gradient_error, local_rows, reference_loss, spread
from tests.workers import Pool

PLAN = "pp=2 schedule=gpipe microbatches=2 stages=layers.2"


class Counting(nn.Module):
    """Raises a number that it is given, and computes with it."""

    def __init__(self) -> None:
        super().__init__()
        self.out = nn.Linear(6, 6)

    def forward(self, x: Tensor, given: Any) -> Tensor:
        return x + torch.tanh(self.out(x)) * self.raised(given)

    def raised(self, given: Any) -> float | Tensor:
        given["calls"] += 1
        return float(given["calls"])


class CountingObject(Counting):
    def raised(self, given: Any) -> float:
        given.calls += 1
        return float(given.calls)


class Reading(Counting):
    def raised(self, given: Any) -> float:
        return float(given["calls"])


class Popping(Counting):
    def forward(self, x: Tensor, given: Any) -> Tensor:
        made: Tensor = torch.tanh(self.out(x))
        if len(given) < 2:
            given.append(x)
        else:
            made = made + given.pop() * given.pop()
        return x + made


class Stack(nn.Module):
    """Hands one thing to all its layers."""

    def __init__(self, kind: type[Counting], given: Any) -> None:
        super().__init__()
        self.layers, self.head = nn.ModuleList(kind() for _ in range(3)), nn.Linear(6, 3)
        self.make = given

    def forward(self, x: Tensor) -> Tensor:
        given = self.make()
        for layer in self.layers:
            if isinstance(layer, Reading):
                given["calls"] += 1
            x = layer(x, given)
        logits: Tensor = self.head(x)
        return logits


KINDS = {
    "number in a dict": (Counting, lambda: {"calls": 0}),
    "number of an object": (CountingObject, lambda: SimpleNamespace(calls=0)),
    "skips in a list": (Popping, list),
    "number that code between units raises": (Reading, lambda: {"calls": 0}),
}


def _case(name: str) -> Case:
    def batch(rows: int) -> tuple[Tensor, Tensor]:
        torch.manual_seed(rows)
        return torch.randn(rows, 6), torch.randint(0, 3, (rows,))

    return Case(lambda: Stack(*KINDS[name]), batch)


def _refusal(name: str) -> str:
    with pytest.raises((PlanError, RankError)) as refusal:
        spread(_case(name), PLAN)
    return refusal.value.what


def _gradient_error(name: str) -> float:
    case = _case(name)
    reference, parallel = spread(case, PLAN)
    reference_loss(reference, case, case.batch(4)).backward()
    parallel.forward_backward(local_rows(parallel, case.batch(4), 4))
    return gradient_error(parallel, reference)


@pytest.mark.dist
@pytest.mark.parametrize(
    ("name", "said"),
    [
        (
            "number in a dict",
            "the output of `layers.2` is another one on the stage that begins with",
        ),
        (
            "number of an object",
            "the output of `layers.2` is another one on the stage that begins with",
        ),
        ("skips in a list", "is another one on the stage that begins with `layers.2`"),
    ],
)
def test_stages_whose_units_change_what_others_are_given_are_refused(
    pool: Pool, name: str, said: str
) -> None:
    for what in pool.run(_refusal, name, world_size=2):
        assert said in what


@pytest.mark.dist
def test_what_code_between_units_changes_is_the_same_on_every_stage(pool: Pool) -> None:
    name = "number that code between units raises"
    assert max(pool.run(_gradient_error, name, world_size=2)) < 1e-5
