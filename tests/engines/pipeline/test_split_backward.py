"""A backward that the schedule splits gives each weight its gradient, however a unit uses it."""

from __future__ import annotations

from functools import partial

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.engines.cases import Case
from tests.engines.parity import gradient_error, local_rows, reference_loss, relative, spread
from tests.workers import Pool

WIDTH, ROWS = 8, 8


class Unit(nn.Module):
    """A matrix, a table and vectors, of which each kind uses some."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.shared = (nn.Parameter(torch.randn(WIDTH)) for _ in range(3))
        self.matrix = nn.Parameter(torch.randn(WIDTH, WIDTH) / 3)
        self.norm = nn.LayerNorm(WIDTH)


class InARow(Unit):
    """One matrix twice, so that its second use leads to its first."""

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(torch.tanh(F.linear(x, self.matrix)), self.matrix)


class Parts(Unit):
    """Halves of one matrix, one after the other."""

    def forward(self, x: Tensor) -> Tensor:
        down, up = self.matrix.chunk(2)
        return torch.tanh(x @ down.T) @ up


class Biases(Unit):
    """A matrix that joins two biases, which are the first in the order of names."""

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(torch.tanh(F.linear(x, self.matrix, self.a)), self.matrix, self.b)


class Sums(Unit):
    """A vector that joins two others, where torch keeps nothing of the forward."""

    def forward(self, x: Tensor) -> Tensor:
        return x + (self.a + self.shared) + (self.b + self.shared)


class Terms(Unit):
    """Two vectors whose gradient is one tensor."""

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(x + (self.a + self.shared))


class Around(Unit):
    """A vector that is used before and after a matrix, beside which it is in no sum."""

    def forward(self, x: Tensor) -> Tensor:
        y = torch.tanh(F.linear(x + self.shared, self.matrix, self.a))
        return x * self.shared + self.norm(y * self.shared)


class LookedUp(Unit):
    """Rows that are chosen by what arrives, so that no gradient goes back there."""

    def forward(self, x: Tensor) -> Tensor:
        return self.norm(self.matrix[(x @ self.matrix.T).argmax(-1)])


class Recurrent(nn.Module):
    """An LSTM, taken apart by autograd or not: its last outputs and states."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.LSTM(WIDTH, WIDTH, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        out, (hidden, cell) = self.net(x.unsqueeze(1).expand(-1, 3, -1))
        made: Tensor = out[:, -1] + hidden[0] + 2 * cell[0]
        return made


KINDS = (InARow, Parts, Biases, Sums, Terms, Around, LookedUp, Recurrent)


class Net(nn.Module):
    """Two units of a kind between linear layers."""

    def __init__(self, kind: type[nn.Module]) -> None:
        super().__init__()
        self.first = nn.Linear(WIDTH, WIDTH)
        self.blocks = nn.ModuleList(kind() for _ in range(2))
        self.head = nn.Linear(WIDTH, 4)

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        for block in self.blocks:
            x = block(x)
        logits: Tensor = self.head(x)
        return logits


def _batch(rows: int) -> tuple[Tensor, Tensor]:
    drawn = torch.Generator().manual_seed(rows)
    return torch.randn(rows, WIDTH, generator=drawn), torch.randint(4, (rows,), generator=drawn)


def _errors(kind: type[nn.Module], plan: str) -> tuple[float, float]:
    case = Case(partial(Net, kind), _batch)
    reference, parallel = spread(case, plan, rows=ROWS)
    batch = case.batch(ROWS)
    loss = parallel.forward_backward(local_rows(parallel, batch, ROWS))
    expected = reference_loss(reference, case, batch)
    expected.backward()  # type: ignore[no-untyped-call]
    return relative(loss, expected.detach()), gradient_error(parallel, reference)


@pytest.mark.dist
@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.__name__)
@pytest.mark.parametrize(
    "plan",
    [
        "schedule=zero_bubble microbatches=2 stages=blocks.1",
        "schedule=zbv microbatches=3 stages=blocks.0,blocks.1,head",
    ],
)
def test_a_split_backward_gives_the_gradients_of_one_process(
    kind: type[nn.Module], plan: str, pool: Pool
) -> None:
    for loss, gradient in pool.run(_errors, kind, f"pp=2 {plan}", world_size=2):
        assert loss < 1e-6
        assert gradient < 1e-5
