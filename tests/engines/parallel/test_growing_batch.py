"""A batch that grows during training, under one plan."""

from __future__ import annotations

import pytest
import torch

from advisor.auto.growing_batch import GrowingBatch
from profiles.errors import BatchError
from tests.engines.parity import parallelize, reference_loss, relative

GROWING = GrowingBatch(
    batch=4, learning_rate=0.1, factor=2, milestones=(1, 2, 3), largest=16, multiple=4
)


def test_a_plan_for_the_largest_batch_trains_the_smaller_ones_as_one_process_does() -> None:
    case, reference, parallel = parallelize(
        "lstm",
        "microbatch_size=4 accumulation=4",
        optimizer=lambda parameters: torch.optim.SGD(parameters, lr=GROWING.learning_rate),
    )
    optimizer = torch.optim.SGD(reference.parameters(), lr=GROWING.learning_rate)
    trained = []
    for epoch in range(4):
        batch, rate = GROWING.at(epoch)
        trained.append((batch, rate))
        for group in (*parallel.optimizer.param_groups, *optimizer.param_groups):
            group["lr"] = rate
        rows = case.batch(batch)
        parallel.train_step(rows)
        optimizer.zero_grad()
        reference_loss(reference, case, rows).backward()
        optimizer.step()
    assert trained == [(4, 0.1), (8, 0.1), (16, 0.1), (16, 0.05)]
    for result, wanted in zip(parallel.parameters(), reference.parameters(), strict=True):
        assert relative(result, wanted) < 1e-5
    with pytest.raises(BatchError, match="the plan holds 4"):
        parallel.train_step(case.batch(GROWING.largest + 4))
