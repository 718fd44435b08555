"""Tensors that a forward leaves on modules for the next one, or for whoever saves the model."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from profiles.capture.batch.rows import split_rows
from profiles.capture.capture import capture
from profiles.errors import ModelError, PlanError, RankError
from tests.engines.cases import Case
from tests.engines.parity import (
    gradient_error,
    local_rows,
    reference_loss,
    sgd,
    spread,
    state_error,
)
from tests.workers import Pool

ROWS, LENGTH, WIDTH = 4, 5, 8
PLAN = "pp=2 schedule=naive stages=inner"


class Around(nn.Module):
    """Three units; subclasses say what the code between them leaves."""

    def __init__(self) -> None:
        super().__init__()
        self.enter = nn.GRU(3, WIDTH, batch_first=True)
        self.inner, self.leave = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, 1)
        self.register_buffer("mean", torch.zeros(WIDTH))
        self.last: Tensor | None = None

    def between(self, x: Tensor) -> Tensor:
        return x

    def forward(self, x: Tensor) -> Tensor:
        y, last = self.enter(x, self.last)
        self.leave_behind(last)
        out: Tensor = self.leave(self.between(torch.tanh(self.inner(y))))
        return out

    def leave_behind(self, last: Tensor) -> None:
        pass


class Carries(Around):
    """The state of a recurrent layer goes on to the next batch."""

    def leave_behind(self, last: Tensor) -> None:
        self.last = last.detach()


class Averages(Around):
    """A running mean of what units computed."""

    def between(self, x: Tensor) -> Tensor:
        y: Tensor = x - self.get_buffer("mean").clone()
        self.get_buffer("mean").lerp_(y.detach().mean((0, 1)), 0.5)
        return y


class Shows(Around):
    """Leaves what nothing computes with, and makes a table of positions once."""

    table: Tensor | None = None

    def between(self, x: Tensor) -> Tensor:
        if self.table is None:
            self.table = torch.arange(x.shape[1])[:, None] / LENGTH
        self.seen = x
        return x + self.table


class Late(Around):
    """Counts its forwards at their end, and warms its input by that."""

    calls = 0

    def forward(self, x: Tensor) -> Tensor:
        out = super().forward(x * (1 + self.calls))
        self.calls += 1
        return out


class Early(nn.Module):
    """Counts its forwards at their start, in a number and a buffer, and warms layers by that."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(n, WIDTH) for n in (3, WIDTH, WIDTH, WIDTH))
        self.leave, self.heat = nn.Linear(WIDTH, 1), 1.0
        self.register_buffer("count", torch.ones(2))

    def forward(self, x: Tensor) -> Tensor:
        self.heat *= 0.8
        self.get_buffer("count").add_(1)
        for layer in self.layers:
            x = torch.tanh(layer(x) * self.heat * self.get_buffer("count")[0].clone())
        out: Tensor = self.leave(x)
        return out


class Told(nn.Linear):
    """Adds to a list that others have too, and multiplies by its length."""

    def __init__(self, numbers: list[int], out: int) -> None:
        super().__init__(WIDTH, out)
        self.numbers = numbers

    def forward(self, x: Tensor) -> Tensor:
        self.numbers.append(1)
        return super().forward(x) * len(self.numbers)


class Telling(Around):
    """Two of its units hand on a number in a list."""

    def __init__(self) -> None:
        super().__init__()
        self.numbers: list[int] = []
        self.inner, self.leave = Told(self.numbers, WIDTH), Told(self.numbers, 1)

    def forward(self, x: Tensor) -> Tensor:
        self.numbers.clear()
        return super().forward(x)


class Asking(Around):
    """Code between units computes with the length of a list of a unit's own."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = Told([], WIDTH)

    def between(self, x: Tensor) -> Tensor:
        assert isinstance(self.inner, Told)
        return x / (1 + len(self.inner.numbers))


class Pace:
    """A number that code between units raises, where no module leads to."""

    number = 0


PACE = Pace()


class Paced(Around):
    """Each stage has its own number, and one ends before it is raised."""

    def between(self, x: Tensor) -> Tensor:
        PACE.number += 1
        return x

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = super().forward(x * (1 + PACE.number))
        return out


COLLECTED: list[int] = []


class Noting(nn.GRU):
    def forward(self, *args: Any) -> Any:
        COLLECTED.append(args[0].shape[1])
        return super().forward(*args)


class Collects(Around):
    """A list that a unit's call fills, and that code behind the border reads."""

    def __init__(self) -> None:
        super().__init__()
        self.enter = Noting(3, WIDTH, batch_first=True)

    def between(self, x: Tensor) -> Tensor:
        lengths = [COLLECTED.pop()]
        return x + lengths[0] / LENGTH


def batch(rows: int) -> tuple[Tensor, Tensor]:
    made = torch.Generator().manual_seed(rows)
    inputs = torch.randn(rows, LENGTH, 3, generator=made)
    return inputs, torch.randn(rows, LENGTH, 1, generator=made)


def case(kind: type[nn.Module]) -> Case:
    return Case(kind, batch, F.mse_loss)


@pytest.mark.parametrize(
    ("kind", "buffers", "attributes"),
    [(Carries, (), ("last",)), (Averages, ("mean",), ()), (Shows, (), ("seen",))],
)
def test_a_profile_names_what_is_left(
    kind: type[Around], buffers: tuple[str, ...], attributes: tuple[str, ...]
) -> None:
    flow = capture(kind(), batch(2), loss_fn=F.mse_loss).flow
    assert flow.buffers_between == buffers
    assert flow.attributes_between == attributes


def _refusal(kind: type[Around], plan: str = PLAN) -> str:
    with pytest.raises((PlanError, RankError)) as refusal:
        spread(case(kind), plan, rows=ROWS)
    return refusal.value.what


@pytest.mark.dist
@pytest.mark.parametrize(
    ("kind", "said"),
    [
        (Carries, "left in `last`"),
        (Averages, "changes the buffer `mean`"),
        (Late, "left in `calls`, and code that runs after the call of `inner` changes it"),
    ],
)
def test_stages_without_what_others_computed_are_refused(
    pool: Pool, kind: type[Around], said: str
) -> None:
    for what in pool.run(_refusal, kind, world_size=2):
        assert said in what


@pytest.mark.dist
@pytest.mark.parametrize("kind", [Telling, Asking])
def test_stages_whose_units_compute_with_what_units_of_others_count_are_refused(
    pool: Pool, kind: type[Around]
) -> None:
    plan = PLAN.replace("inner", "leave")
    for what in pool.run(_refusal, kind, plan, world_size=2):
        assert "the output of `leave` is another one on the stage that begins with `leave`" in what


@pytest.mark.dist
def test_stages_that_end_before_a_global_changes_are_refused(pool: Pool) -> None:
    for what in pool.run(_refusal, Paced, world_size=2):
        assert "the output of `enter` is another one on the first stage than in the whole" in what


def _trained(kind: type[Around]) -> tuple[float, float]:
    reference, parallel = spread(case(kind), PLAN, rows=ROWS)
    optimizer = sgd(list(reference.parameters()))
    for _ in range(2):
        optimizer.zero_grad()
        reference_loss(reference, case(kind), batch(ROWS)).backward()  # type: ignore[no-untyped-call]
        parallel.forward_backward(local_rows(parallel, batch(ROWS), ROWS))
        gradient = gradient_error(parallel, reference)
        optimizer.step()
        parallel.optimizer.step()
        parallel.optimizer.zero_grad()
    return gradient, state_error(parallel, reference)


@pytest.mark.dist
@pytest.mark.parametrize("kind", [Shows, Telling, Asking])
def test_what_no_other_stage_computes_with_stays_possible(pool: Pool, kind: type[Around]) -> None:
    for gradient, parameter in pool.run(_trained, kind, world_size=2):
        assert gradient < 1e-5
        assert parameter < 1e-5


def _warmed() -> tuple[float, float]:
    """After two steps in two microbatches, errors of gradients and of what is saved."""
    plan = "pp=2 schedule=zbv microbatches=2 stages=layers.1,layers.2,layers.3"
    reference, parallel = spread(case(Early), plan, rows=ROWS)
    whole = batch(ROWS)
    for _ in range(2):
        reference.zero_grad()
        parallel.optimizer.zero_grad()
        for piece in split_rows(whole, [ROWS // 2, ROWS // 2]):
            (reference_loss(reference, case(Early), piece) / 2).backward()  # type: ignore[no-untyped-call]
        parallel.forward_backward(whole)
    return gradient_error(parallel, reference), state_error(parallel, reference)


@pytest.mark.dist
def test_two_stages_of_a_rank_change_the_state_of_the_code_between_units_once(pool: Pool) -> None:
    for gradient, state in pool.run(_warmed, world_size=2):
        assert gradient < 1e-5
        assert state < 1e-5


def _step_error() -> str:
    _, parallel = spread(case(Collects), PLAN, rows=ROWS)
    try:
        parallel.forward_backward(local_rows(parallel, batch(ROWS), ROWS))
    except (ModelError, RankError) as error:
        return str(error)
    return ""


@pytest.mark.dist
def test_a_stage_whose_forward_lacks_what_others_collected_says_so(pool: Pool) -> None:
    first, last = pool.run(_step_error, world_size=2)
    said = "the forward raised IndexError: pop from empty list on the stage that begins with"
    assert last.startswith(f"{said} `inner`")
    assert "what code takes from within their calls" in last
    assert f"rank 1 failed: ModelError: {said} `inner`" in first
