"""Blocks that would recompute something else are refused before the first step."""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable, Iterator

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from engines.blocks.trial import BlockTrial, run_twice
from profiles.errors import PlanError
from tests.engines.cases import Case, profile_of
from tests.engines.parity import gradient_error, reference_loss, spread

CALLS = {"all": 0}


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.out = nn.Linear(6, 6)

    def scale(self) -> float:
        return 1.0

    def forward(self, x: Tensor) -> Tensor:
        return x + torch.tanh(self.out(x)) * torch.tensor(self.scale())


class OfFile(Block):
    def scale(self) -> float:
        CALLS["all"] += 1
        return float(CALLS["all"])


class OfClass(Block):
    calls = 0

    def scale(self) -> float:
        OfClass.calls += 1
        return float(OfClass.calls)


class OfClosure(Block):
    def __init__(self) -> None:
        super().__init__()
        self.tick = _ticking()

    def scale(self) -> float:
        return self.tick()


class OfIterator(Block):
    def __init__(self) -> None:
        super().__init__()
        self.rates: Iterator[int] = itertools.count(1)

    def scale(self) -> float:
        return float(next(self.rates))


def _ticking() -> Callable[[], float]:
    count = 0.0

    def tick() -> float:
        nonlocal count
        count += 1
        return count

    return tick


class OfItself(Block):
    """Its state is its own, and is put back."""

    def __init__(self) -> None:
        super().__init__()
        self.calls = 0

    def scale(self) -> float:
        self.calls += 1
        return float(self.calls)


class DrawsOfPython(Block):
    def scale(self) -> float:
        return random.random()


class DrawsOfNumpy(Block):
    def scale(self) -> float:
        return float(np.random.randn())


class Counted(nn.Module):
    """Its blocks repeat; code around them counts in a global."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks, self.head = nn.Sequential(Block(), Block()), nn.Linear(6, 3)

    def forward(self, x: Tensor) -> Tensor:
        CALLS["all"] += 1
        logits: Tensor = self.head(self.blocks(x)) * CALLS["all"]
        return logits


def _batch(rows: int) -> tuple[Tensor, Tensor]:
    torch.manual_seed(rows)
    return torch.randn(rows, 6), torch.randint(0, 3, (rows,))


def _seed() -> None:
    random.seed(1)
    np.random.seed(1)


def _case(kind: type[nn.Module]) -> Case:
    return Case(lambda: nn.Sequential(kind(), kind(), nn.Linear(6, 3)), _batch)


@pytest.mark.parametrize("recompute", ["full", "selective"])
@pytest.mark.parametrize("kind", [OfFile, OfClass, OfClosure, OfIterator])
def test_state_that_no_module_leads_to_is_refused_under_recompute(
    kind: type[nn.Module], recompute: str
) -> None:
    with pytest.raises(PlanError, match="`0` computes something else when it runs again") as error:
        spread(_case(kind), f"recompute={recompute}")
    assert "or recompute=none" in str(error.value)


@pytest.mark.parametrize("kind", [Block, OfItself])
def test_blocks_that_repeat_are_recomputed(kind: type[nn.Module]) -> None:
    case = _case(kind)
    reference, parallel = spread(case, "recompute=full")
    reference_loss(reference, case, case.batch(4)).backward()
    parallel.forward_backward(case.batch(4))
    assert gradient_error(parallel, reference) < 1e-6


@pytest.mark.parametrize(
    ("kind", "draws"), [(Block, False), (DrawsOfPython, True), (DrawsOfNumpy, True)]
)
def test_generators_are_put_back_where_blocks_draw_from_them(
    kind: type[nn.Module], draws: bool
) -> None:
    """To look at Python's and numpy's takes longer than all else around a block."""
    case = _case(kind)
    model, batch = case.build(), case.batch(4)
    trial = run_twice(model, batch, cross_entropy, profile=profile_of(case, model))
    assert trial == BlockTrial(unlike="", draws=draws)
    reference, parallel = spread(case, "recompute=full")
    _seed()
    reference_loss(reference, case, batch).backward()
    _seed()
    parallel.forward_backward(batch)
    assert gradient_error(parallel, reference) < 1e-6


def test_a_model_that_cannot_be_tried_may_draw() -> None:
    case = _case(Block)
    model = case.build()
    wrong = (torch.randn(4, 5), torch.zeros(4, dtype=torch.long))
    assert run_twice(model, wrong, cross_entropy, profile=profile_of(case, model)).draws


def test_state_of_code_around_blocks_is_no_reason() -> None:
    spread(Case(Counted, _batch), "recompute=full")
