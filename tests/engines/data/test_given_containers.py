"""Items that sharded units put into lists and dicts which they are given reach the others."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field

import pytest
import torch
from torch import Tensor, nn

from tests.engines.cases import Case
from tests.engines.parity import gradient_error, local_rows, reference_loss, relative, spread
from tests.workers import Pool


@dataclass
class Made:
    """Values that layers hand to each other."""

    count: int = 0
    last: Tensor | None = None
    losses: list[Tensor] = field(default_factory=list)


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.out = nn.Linear(6, 6)

    def forward(
        self,
        x: Tensor,
        skips: list[Tensor],
        queue: deque[Tensor],
        by_name: dict[str, Tensor],
        made: Made,
    ) -> Tensor:
        h = torch.tanh(self.out(x)) * (made.count + 1)
        if len(skips) > 1:
            h = h + skips.pop()
        skips.append(h)
        queue.append(h * 2)
        by_name["sum"] = by_name.get("sum", h) + h
        made.count, made.last = made.count + 1, h
        made.losses.append((h * h).mean(1, keepdim=True))
        return x + h


class Stack(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Layer() for _ in range(4))
        self.head = nn.Linear(6, 3)

    def forward(self, x: Tensor) -> Tensor:
        skips, queue, by_name, made = [x], deque([x]), {"x": x}, Made()
        for layer in self.layers:
            x = layer(x, skips, queue, by_name=by_name, made=made)
        assert made.last is not None
        logits: Tensor = self.head(x + sum(queue) + by_name["sum"] + made.last + skips[-1])
        return logits + sum(made.losses)


def _batch(rows: int) -> tuple[Tensor, Tensor]:
    torch.manual_seed(rows)
    return torch.randn(rows, 6), torch.randint(0, 3, (rows,))


def _errors(plan: str) -> tuple[float, float]:
    case = Case(Stack, _batch)
    reference, parallel = spread(case, plan)
    loss = reference_loss(reference, case, case.batch(4))
    loss.backward()
    own = parallel.forward_backward(local_rows(parallel, case.batch(4), 4))
    return relative(own, loss.detach()), gradient_error(parallel, reference)


@pytest.mark.dist
@pytest.mark.parametrize("setting", ["", "recompute=full"])
def test_sharded_units_change_what_they_are_given(pool: Pool, setting: str) -> None:
    for errors in pool.run(_errors, f"dp_shard=2 {setting}", world_size=2):
        assert max(errors) < 1e-5


@pytest.mark.dist
def test_cast_copies_are_given_back_too(pool: Pool) -> None:
    for errors in pool.run(_errors, "dp_shard=2 precision=bf16", world_size=2):
        assert max(errors) < 3e-2
