"""Attributes that code around blocks puts on them are for the second run those of the first."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from torch import Tensor, nn

from engines.blocks.forward_state import ForwardState
from tests.engines.cases import Case
from tests.engines.parity import gradient_error, reference_loss, spread
from tests.workers import Pool


class Scaled(nn.Module):
    """Computes with what the model put on it, or on an object that blocks share."""

    def __init__(self, shared: SimpleNamespace, numbers: dict[str, float]) -> None:
        super().__init__()
        self.out = nn.Linear(6, 6)
        self.rate, self.shared, self.numbers = 1.0, shared, numbers

    def forward(self, x: Tensor) -> Tensor:
        scale = self.rate * self.shared.rate * self.numbers["rate"] * getattr(self, "late", 1.0)
        return x + torch.tanh(self.out(x * scale))


class Rounds(nn.Module):
    """The same blocks several times, each time with other numbers."""

    def __init__(self) -> None:
        super().__init__()
        self.shared, self.numbers = SimpleNamespace(rate=1.0), {"rate": 1.0}
        self.blocks = nn.ModuleList(Scaled(self.shared, self.numbers) for _ in range(2))
        self.head = nn.Linear(6, 3)

    def forward(self, x: Tensor) -> Tensor:
        for place in ("rate", "shared", "numbers", "late"):
            for block in self.blocks:
                self.put(block, place)
                x = block(x)
                self.put(block, place, 1.0)
        logits: Tensor = self.head(x)
        return logits

    def put(self, block: nn.Module, place: str, number: float = 0.3) -> None:
        if place == "shared":
            self.shared.rate = number
        elif place == "numbers":
            self.numbers["rate"] = number
        elif number == 1.0 and place == "late":
            del block.late
        else:
            setattr(block, place, number)


class Masked(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.out = nn.Linear(6, 6)
        self.mask: Tensor | None = None

    def forward(self, x: Tensor) -> Tensor:
        assert self.mask is not None
        return x + torch.tanh(self.out(x * self.mask)) * self.mask


class Conditioned(nn.Module):
    """Puts what it makes of the batch on its blocks: gates, with a gradient."""

    def __init__(self) -> None:
        super().__init__()
        self.gate, self.head = nn.Linear(6, 6), nn.Linear(6, 3)
        self.blocks = nn.ModuleList(Masked() for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        gate = torch.sigmoid(self.gate(x))
        for block in self.blocks:
            block.mask = gate
        for block in self.blocks:
            x = block(x)
        logits: Tensor = self.head(x)
        return logits


def _batch(rows: int) -> tuple[Tensor, Tensor]:
    torch.manual_seed(rows)
    return torch.randn(rows, 6), torch.randint(0, 3, (rows,))


def _error(kind: type[nn.Module], plan: str) -> float:
    case = Case(kind, _batch)
    reference, parallel = spread(case, plan)
    for _ in range(2):
        reference_loss(reference, case, case.batch(4)).backward()
        parallel.forward_backward(case.batch(4))
        error = gradient_error(parallel, reference)
        parallel.optimizer.zero_grad()
        reference.zero_grad()
    return error


@pytest.mark.parametrize("recompute", ["full", "selective"])
def test_blocks_are_recomputed_with_what_was_put_on_them_for_the_call(recompute: str) -> None:
    assert _error(Rounds, f"recompute={recompute}") < 1e-6


@pytest.mark.dist
def test_blocks_are_recomputed_with_what_their_microbatch_put_on_them(pool: Pool) -> None:
    plan = "pp=2 schedule=1f1b microbatches=4 stages=blocks.2 recompute=full"
    assert max(pool.run(_error, Conditioned, plan, world_size=2)) < 1e-5


def test_results_of_an_earlier_forward_are_not_kept() -> None:
    """A graph that a block replaces would live on until the backward."""
    block = Masked()
    block.mask = block.out.weight * 2
    state = ForwardState([block])
    with state.first():
        block.mask = block.out.weight * 3
    made = block.mask
    with state.second():
        assert block.mask is made


class Listening(nn.Module):
    """Adds a hook to its layer before it is first called, as transformers does to keep outputs."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(6, 6)
        self.seen: list[int] = []

    def forward(self, x: Tensor) -> Tensor:
        if not getattr(self, "listens", False):
            self.layer.register_forward_hook(lambda *_: self.seen.append(1))
            self.listens = True
        result: Tensor = self.layer(x)
        return result


def test_hooks_that_the_first_run_added_are_not_there_twice() -> None:
    model, x = Listening(), torch.ones(2, 6)
    state = ForwardState(list(model.modules()))
    with state.first():
        model(x)
    assert model.seen == [1]
    with state.second():
        model(x)
        assert model.seen == [1]
    model(x)
    assert (len(model.layer._forward_hooks), model.seen) == (1, [1, 1])
