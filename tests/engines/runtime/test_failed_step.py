"""A rank whose step fails, in a script that catches the error: no rank waits for another."""

from __future__ import annotations

import time
from itertools import islice
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from engines.parallel import ParallelModel
from engines.parallel.recovery import NextPlan
from engines.plan import Plan
from engines.runtime import failed_step
from engines.runtime.failures import reconnections
from tests.engines.cases import CASES
from tests.engines.parity import HSDP, local_rows, reference_loss, relative, spread
from tests.engines.runtime.fault_jobs import answers
from tests.nightly import nightly
from tests.soak.training import build, global_batches
from tests.workers import Pool

ROWS = 8
BOUND_S = 15.0
"""Of a failed step, on a loaded machine; groups time out after a minute."""
SAID = "rank 1 failed: ValueError: a bad sample"
STAGES = "pp=2 schedule=1f1b microbatches=2 stages=blocks.2"


class Fuse:
    """A hook that raises when it is armed."""

    def __init__(self) -> None:
        self.is_armed = False

    def __call__(self, *_: object) -> None:
        if self.is_armed:
            self.is_armed = False
            raise ValueError("a bad sample")


def _fused(parallel: ParallelModel, place: str = "head") -> Fuse:
    fuse = Fuse()
    parallel.module.get_submodule(place).register_forward_pre_hook(fuse)
    return fuse


def _step(parallel: ParallelModel, batch: Any) -> tuple[str, str, float]:
    """Take a step as a script that goes on after an error: type, text and seconds."""
    began = time.monotonic()
    try:
        parallel.train_step(batch)
    except Exception as error:
        return type(error).__name__, str(error), time.monotonic() - began
    return "", "", time.monotonic() - began


def _goes_on(plan: str, failing: tuple[int, ...]) -> tuple[str, str, float, float, int, int]:
    """Four steps, of which the second fails; and those of one process without that batch.

    Returns the error, seconds, the largest difference of a parameter, the steps made, and how often
    connections were made anew.
    """
    case, rank = CASES["gpt"], dist.get_rank()
    reference, parallel = spread(case, plan)
    parallel.next_plan = lambda *_: NextPlan(plan=None, because="")
    optimizer = torch.optim.SGD(reference.parameters(), lr=0.05, momentum=0.9)
    fuse = _fused(parallel)
    batches = [case.batch(ROWS + step) for step in range(4)]
    batches = [(x[:ROWS], y[:ROWS]) for x, y in batches]
    for number, batch in enumerate(batches):
        fuse.is_armed = number == 1 and rank in failing
        kind, text, seconds = _step(parallel, local_rows(parallel, batch, ROWS))
        if number == 1:
            assert all(parameter.grad is None for parameter in parallel.module.parameters())
            failure = kind, text, seconds
            continue
        assert not text
        optimizer.zero_grad()
        reference_loss(reference, case, batch).backward()
        optimizer.step()
    after = parallel.state_dict()
    error = max(relative(after[name], value) for name, value in reference.state_dict().items())
    return *failure, error, parallel.step, reconnections()


@pytest.mark.dist
@pytest.mark.parametrize(
    "plan", ["dp_replicate=2", "dp_shard=2", *nightly("dp_replicate=2 zero=1", HSDP)]
)
def test_all_ranks_go_on_without_a_batch_that_failed_on_one(pool: Pool, plan: str) -> None:
    size = Plan.parse(plan).world_size
    results = pool.run(_goes_on, plan, (1,), world_size=size)
    for rank, (kind, text, seconds, error, steps, anew) in enumerate(results):
        assert kind == ("ValueError" if rank == 1 else "RankError")
        assert (
            text == "a bad sample"
            if rank == 1
            else text.startswith(f"{SAID}\n  rank {rank} of {size}, in step 2\n")
        )
        assert rank == 1 or "the next `train_step` goes on, without this batch" in text
        assert seconds < BOUND_S
        assert error < 1e-5
        assert (steps, anew) == (3, 1)


@pytest.mark.dist
@pytest.mark.parametrize("plan", ["dp_shard=2", *nightly("dp_replicate=2")])
def test_ranks_that_fail_alike_close_no_connection(pool: Pool, plan: str) -> None:
    for kind, text, seconds, error, steps, anew in pool.run(_goes_on, plan, (0, 1), world_size=2):
        assert (kind, text) == ("ValueError", "a bad sample")
        assert seconds < failed_step.ALIKE_S
        assert error < 1e-5
        assert (steps, anew) == (3, 0)


def _ends(plan: str, place: str) -> list[tuple[str, str, float]]:
    """The second step and the one after it, where nothing knows the state before a step."""
    case = CASES["gpt"]
    _, parallel = spread(case, plan)
    batch = local_rows(parallel, case.batch(ROWS), ROWS)
    parallel.train_step(batch)
    fuse = Fuse() if place == "update" else _fused(parallel, place)
    if place == "update":
        parallel.optimizer.register_step_pre_hook(fuse)
    fuse.is_armed = dist.get_rank() == 1
    steps = [_step(parallel, batch), _step(parallel, batch), _step(parallel, batch)]
    return steps[1:] if place == "update" and dist.get_rank() == 0 else steps[:2]


@pytest.mark.dist
@pytest.mark.parametrize("plan", ["dp_shard=2", *nightly("dp_replicate=2")])
@pytest.mark.parametrize("place", ["head", "update"])
def test_a_job_that_cannot_go_on_says_so_on_all_ranks(pool: Pool, plan: str, place: str) -> None:
    """A rank whose update fails is noticed in the next step of the others."""
    first, second = pool.run(_ends, plan, place, world_size=2)
    assert second[0][:2] == ("ValueError", "a bad sample")
    for kind, text, seconds in (*first, *second):
        assert seconds < BOUND_S
        if kind == "RankError":
            assert text.startswith(SAID)
            assert "the connections of this job are closed: start it again" in text
    assert [kind for kind, *_ in (*first, *second[1:])] == ["RankError"] * 3
    assert first[1][2] < 1.0
    assert second[1][2] < 1.0


def _comes_late() -> list[tuple[str, str, float]]:
    failed_step.REPORTS_S, before = 1.0, failed_step.REPORTS_S
    case = CASES["gpt"]
    _, parallel = spread(case, "dp_shard=2")
    parallel.next_plan = lambda *_: NextPlan(plan=None, because="")
    fuse = _fused(parallel)
    batch = local_rows(parallel, case.batch(ROWS), ROWS)
    parallel.train_step(batch)
    fuse.is_armed = dist.get_rank() == 1
    if dist.get_rank() == 0:
        parallel.module.get_submodule("head").register_forward_pre_hook(
            lambda *_: time.sleep(failed_step.ALIKE_S + 3)
        )
    steps = [_step(parallel, batch), _step(parallel, batch)]
    failed_step.REPORTS_S = before
    return steps


@pytest.mark.dist
def test_a_rank_that_computes_for_too_long_is_not_waited_for(pool: Pool) -> None:
    first, second = pool.run(_comes_late, world_size=2)
    assert [kind for kind, *_ in (*first, *second)] == ["RankError"] * 2 + [
        "ValueError",
        "RankError",
    ]
    assert "rank 0 did not leave the step within 1 s" in second[1][1]
    for _, text, _ in first:
        assert SAID in text


def _without_a_store(plan: str) -> str:
    """A step that succeeds, where asking the store about failed ones would fail."""
    case = CASES["gpt"]
    _, parallel = spread(case, plan)
    with mock.patch.object(failed_step, "default_store", side_effect=AssertionError):
        return _step(parallel, local_rows(parallel, case.batch(ROWS), ROWS))[1]


@pytest.mark.dist
def test_a_step_that_succeeds_asks_the_store_nothing(pool: Pool) -> None:
    assert pool.run(_without_a_store, "dp_replicate=2", world_size=2) == ["", ""]


def _caught(plan: str) -> str:
    parallel, _ = build(plan, steps=5)
    fuse, said = Fuse(), []
    last = [each for each in parallel.module.modules() if any(True for _ in each.parameters(False))]
    last[-1].register_forward_pre_hook(fuse)
    for number, batch in enumerate(islice(parallel.shard(global_batches()), 4)):
        fuse.is_armed = number == 1 and dist.get_rank() == 1
        kind, text, seconds = _step(parallel, batch)
        assert seconds < BOUND_S
        said.append(f"{kind} {text.splitlines()[0]}" if text else "made")
    return "; ".join(said)


@pytest.mark.dist
@pytest.mark.parametrize("plan", ["dp_replicate=2", *nightly("dp_shard=2", "tp=2")])
def test_a_training_under_a_launcher_goes_on(plan: str) -> None:
    first, second = answers(_caught, plan, ranks=2)
    assert first == f"made; RankError {SAID}; made; made"
    assert second == "made; ValueError a bad sample; made; made"


@pytest.mark.dist
def test_a_pipeline_ends_at_once_and_says_so_in_every_later_step() -> None:
    first, second = answers(_caught, "pp=2 schedule=1f1b", ranks=2)
    lost = f"RankError lost contact with another rank while exchanging gradients: {SAID}"
    assert first == f"made; {lost}; RankError {SAID}; RankError {SAID}"
    assert second == f"made; ValueError a bad sample; RankError {SAID}; RankError {SAID}"
