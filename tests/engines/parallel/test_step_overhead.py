"""Work of a step beyond a loop by hand: calls of Python functions, which nothing disturbs."""

from __future__ import annotations

import sys
from collections.abc import Callable
from types import FrameType

from torch import nn
from torch.nn.parallel import DistributedDataParallel

from engines.parallel import ParallelModel
from tests.engines.cases import CASES, token_loss
from tests.engines.parity import alone, local_rows, parallelize, sgd
from tests.workers import Pool

WARM_UP, STEPS = 5, 4
MOST_CALLS = 550
"""Of 2026-11: 460 on one process, 400 under DDP; they were 1,180 and 740."""


def _calls(step: Callable[[], object]) -> float:
    """Calls of Python functions in a step."""
    count = 0

    def note(frame: FrameType, event: str, argument: object) -> None:
        nonlocal count
        count += event == "call"

    for _ in range(WARM_UP):
        step()
    before = sys.getprofile()
    sys.setprofile(note)
    try:
        for _ in range(STEPS):
            step()
    finally:
        sys.setprofile(before)
    return count / STEPS


def _beyond_by_hand(parallel: ParallelModel, reference: nn.Module) -> float:
    """Calls of our step more than of the same one by hand."""
    case = CASES["gpt"]
    ids, targets = batch = local_rows(parallel, case.batch(4), 4)
    runner = reference
    if parallel.data_world_size > 1:
        runner = DistributedDataParallel(reference, gradient_as_bucket_view=True)
    optimizer = sgd(list(reference.parameters()))

    def by_hand() -> None:
        token_loss(runner(ids), targets).backward()
        optimizer.step()
        optimizer.zero_grad()

    return _calls(lambda: parallel.train_step(batch)) - _calls(by_hand)


def _under_ddp() -> float:
    _, reference, parallel = parallelize("gpt", "dp_replicate=2", optimizer=sgd)
    return _beyond_by_hand(parallel, reference)


def test_a_step_in_one_process_calls_little_more_than_by_hand() -> None:
    _, parallel = alone("gpt", optimizer=sgd)
    assert _beyond_by_hand(parallel, CASES["gpt"].build()) < MOST_CALLS


def test_a_step_under_ddp_calls_little_more_than_by_hand(pool: Pool) -> None:
    assert max(pool.run(_under_ddp, world_size=2)) < MOST_CALLS
