"""A step that ran out of memory is made again, and training goes on as if it had not."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from engines.parallel.recovery import NextPlan
from engines.plan import Plan, Recompute
from engines.runtime.shortage import Shortage
from profiles.errors import RankError, ShortageError
from tests.engines.cases import Case
from tests.engines.hungry import (
    HUNGRY,
    NO_LIMIT_MIB,
    TensorLimit,
    Wide,
    hungry_batch,
    memory_limit,
)
from tests.engines.parity import local_rows, reference_loss, relative, spread
from tests.nightly import nightly
from tests.workers import Pool

ROWS = 16
"""Of a replica's part of a batch."""


class Halving:
    """Answers each shortage with half of the microbatch."""

    def __init__(self) -> None:
        self.shortages: list[Shortage] = []

    def __call__(self, plan: Plan, shortage: Shortage) -> NextPlan:
        self.shortages.append(shortage)
        assert plan.microbatch_size is not None
        half = {"microbatch_size": plan.microbatch_size // 2, "accumulation": 2 * plan.accumulation}
        return NextPlan(plan=plan.model_copy(update=half), because="half of it")


def _train(plan: str, short: int, limit_mib: float, steps: int = 2) -> tuple[float, str, int, int]:
    """SGD under `plan` with a limit on rank `short`, and in one process without one.

    Returns the largest difference of a loss or a parameter, the last plan, the rank that ran out,
    and how often rank 0 was asked for a plan.
    """
    rank = dist.get_rank() if dist.is_initialized() else 0
    reference, parallel = spread(HUNGRY, plan)
    chooser = Halving()
    parallel.next_plan = chooser
    rows = ROWS * parallel.data_world_size
    optimizer = torch.optim.SGD(reference.parameters(), lr=0.05, momentum=0.9)
    batches = [hungry_batch(rows + step) for step in range(steps)]
    batches = [(x[:rows], y[:rows]) for x, y in batches]
    with TensorLimit(limit_mib if rank == short else NO_LIMIT_MIB):
        losses = [parallel.train_step(local_rows(parallel, batch, rows)) for batch in batches]
    errors = []
    for batch, loss in zip(batches, losses, strict=True):
        optimizer.zero_grad()
        wanted = reference_loss(reference, HUNGRY, batch)
        wanted.backward()
        optimizer.step()
        errors.append(relative(loss, wanted.detach()))
    after = parallel.state_dict()
    errors += [relative(after[name], value) for name, value in reference.state_dict().items()]
    ranks = {shortage.rank for shortage in chooser.shortages}
    return max(errors), str(parallel.plan), next(iter(ranks), -1), len(chooser.shortages)


PLANS = {
    # A plan, and MiB that hold half of its microbatch, not the whole: on rank 0, on rank 1. A row
    # takes 1 MiB in each block before the last, and 3 in that: 6 in all, 3 with recompute.
    "dp_replicate=2": (72, 72),
    "dp_replicate=2 zero=1": (72, 72),
    "dp_shard=2": (72, 72),
    "dp_replicate=2 recompute=full": (36, 36),
    "pp=2 microbatches=2 schedule=1f1b stages=blocks.2": (36, 30),
}


def test_one_process_goes_on_with_smaller_microbatches() -> None:
    error, plan, rank, asked = _train(f"microbatch_size={ROWS}", 0, 72)
    assert error < 1e-5
    assert plan == "microbatch_size=8 accumulation=2"
    assert (rank, asked) == (0, 1)


@pytest.mark.dist
@pytest.mark.parametrize("short", [1, *nightly(0)])
@pytest.mark.parametrize("plan", [*[*PLANS][2:], *nightly(*[*PLANS][:2])])
def test_all_ranks_go_on_when_one_ran_out(pool: Pool, plan: str, short: int) -> None:
    size = ROWS // Plan.parse(plan).microbatches
    fixed = f"{plan} microbatch_size={size}"
    results = pool.run(_train, fixed, short, PLANS[plan][short], world_size=2)
    for error, after, _, _ in results:
        assert error < 1e-5
        assert Plan.parse(after).microbatch_size == size // 2
        assert Plan.parse(after).accumulation == 2
    assert [(rank, asked) for _, _, rank, asked in results] == [(short, 1), (-1, 0)]


def test_a_step_is_made_again_twice(caplog: pytest.LogCaptureFixture) -> None:
    error, plan, _, asked = _train(f"microbatch_size={ROWS}", 0, 36, steps=1)
    assert (error < 1e-5, plan, asked) == (True, "microbatch_size=4 accumulation=4", 2)
    first, second = [record.getMessage() for record in caplog.records]
    assert first.startswith("step 1: rank 0 ran out of memory: ")
    assert "with microbatch_size=8 accumulation=2 instead of microbatch_size=16" in first
    assert "with microbatch_size=4 accumulation=4 instead of microbatch_size=8" in second


def _refusal(plan: str, short: int, limit_mib: float, *, asks: bool = True) -> str:
    rank = dist.get_rank() if dist.is_initialized() else 0
    _, parallel = spread(HUNGRY, plan)
    parallel.next_plan = Halving() if asks else None
    rows = ROWS * parallel.data_world_size
    batch = local_rows(parallel, hungry_batch(rows), rows)
    with TensorLimit(limit_mib if rank == short else NO_LIMIT_MIB):
        try:
            parallel.train_step(batch)
        except (ShortageError, RankError) as error:
            assert all(parameter.grad is None for parameter in parallel.module.parameters())
            return str(error)
    return "no error"


@pytest.mark.dist
def test_all_ranks_stop_after_the_third_shortage_in_a_step(pool: Pool) -> None:
    texts = pool.run(_refusal, f"dp_replicate=2 microbatch_size={ROWS}", 1, 8, world_size=2)
    assert texts[0] == texts[1]
    assert "step 1: rank 1 ran out of memory: " in texts[0]
    assert "for the 3rd time in this step" in texts[0]
    assert "plan: dp_replicate=2 microbatch_size=4 accumulation=4" in texts[0]
    assert "hint: start again" in texts[0]
    assert "`dp_replicate=2 microbatch_size=2 accumulation=8`" in texts[0]


def test_without_a_chooser_the_error_has_the_numbers_and_the_change() -> None:
    text = _refusal(f"microbatch_size={ROWS}", 0, 72, asks=False)
    assert "step 1: rank 0 ran out of memory: " in text
    assert " were held and asked for 16.0 MiB more" in text
    assert "a smaller microbatch_size and more accumulation" in text


class Counting(Wide):
    """Counts its forwards in a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("calls", torch.zeros(1))

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        return super().forward(x)


class Normalised(nn.Module):
    """Counts if it is told to; a batch norm sees the rows before they need memory."""

    def __init__(self, *, counts: bool) -> None:
        super().__init__()
        self.norm = nn.Identity() if counts else nn.BatchNorm1d(16)
        self.blocks = nn.ModuleList((Counting if counts else Wide)() for _ in range(4))
        self.head = nn.Linear(16, 5)

    def forward(self, x: Tensor) -> Tensor:
        x = self.norm(x)
        for block in self.blocks:
            x = block(x)
        logits: Tensor = self.head(x)
        return logits


def test_a_forward_that_changed_a_buffer_is_not_made_again() -> None:
    case = Case(partial(Normalised, counts=True), hungry_batch, F.cross_entropy)
    _, parallel = spread(case, f"microbatch_size={ROWS}")
    parallel.next_plan = Halving()
    with memory_limit(75), pytest.raises(ShortageError, match=r"changed the buffer `blocks.0.c"):
        parallel.train_step(hungry_batch(ROWS))


def test_with_more_recompute_statistics_and_dropout_are_those_of_one_attempt() -> None:
    """The second attempt draws the numbers of the first, and batch norms count one step."""

    def recomputed(plan: Plan, shortage: Shortage) -> NextPlan:
        return NextPlan(plan=plan.model_copy(update={"recompute": Recompute.FULL}), because="")

    def build() -> nn.Module:
        model = Normalised(counts=False)
        model.head = nn.Sequential(nn.Dropout(0.5), model.head)  # type: ignore[assignment]
        return model

    after = []
    for limit_mib in (NO_LIMIT_MIB, 75):  # 96 are taken, 48 with recompute
        _, parallel = spread(Case(build, hungry_batch, F.cross_entropy), f"microbatch_size={ROWS}")
        parallel.next_plan = recomputed
        torch.manual_seed(3)
        with TensorLimit(limit_mib):
            parallel.train_step(hungry_batch(ROWS))
        after.append(parallel.state_dict())
        assert parallel.plan.recompute == ("none" if limit_mib == NO_LIMIT_MIB else "full")
    for name, value in after[0].items():
        assert relative(after[1][name], value) < 1e-6, name


class Greedy(torch.optim.SGD):
    """Asks for 100 MiB in its step."""

    def step(self, closure: Any = None) -> Any:
        self.scratch = torch.ones(25 * 2**20)
        return super().step(closure)


def test_a_shortage_in_the_update_ends_the_training() -> None:
    _, parallel = spread(HUNGRY, "microbatch_size=2", optimizer=partial(Greedy, lr=0.1))
    parallel.next_plan = Halving()
    with memory_limit(75), pytest.raises(ShortageError, match="may have changed some param"):
        parallel.train_step(hungry_batch(2))
