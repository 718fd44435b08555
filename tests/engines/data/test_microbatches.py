"""Batches that do not fit, and what a microbatch weighs."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from engines.data.microbatches import FIRST_CUTS
from engines.plan import Plan
from profiles.capture.batch.call import Batch
from profiles.capture.batch.rows import split_rows
from profiles.errors import BatchError
from tests.engines.cases import CASES
from tests.engines.parity import (
    KINDS,
    alone,
    gradient_error,
    local_rows,
    parallelize,
    reference_loss,
    relative,
)
from tests.workers import Pool


def test_more_rows_than_the_plan_holds_are_refused_with_the_limit() -> None:
    _, parallel = alone("gpt", plan=Plan(microbatch_size=2, accumulation=2))
    parallel.train_step(CASES["gpt"].batch(4))
    with pytest.raises(BatchError, match="microbatches of 3, the plan holds 2"):
        parallel.train_step(CASES["gpt"].batch(5))


def test_a_batch_without_values_is_refused() -> None:
    _, parallel = alone("gpt", plan=Plan())
    inputs, targets = CASES["gpt"].batch(4)
    with pytest.raises(BatchError, match="on the meta device"):
        parallel.train_step((inputs.to("meta"), targets))


def _own_rows(plan: str, replicas: int) -> list[str]:
    """Errors of ranks that take rows by their number, as data-parallel scripts do."""
    case, reference, parallel = parallelize("gpt", plan)
    batch, messages = case.batch(8), []
    world = dist.get_world_size()
    for step in (parallel.train_step, parallel.eval_step):
        try:
            step(split_rows(batch, [8 // world] * world)[dist.get_rank()])
        except BatchError as error:
            messages.append(error.what)
    assert parallel.data_world_size == replicas
    parallel.forward_backward(local_rows(parallel, batch, 8))
    reference_loss(reference, case, batch).backward()
    assert gradient_error(parallel, reference) < 1e-5
    return messages


@pytest.mark.dist
@pytest.mark.parametrize(
    ("plan", "replicas"),
    [
        ("pp=2 schedule=gpipe microbatches=2 stages=blocks.1", 1),
        ("pp=2 dp_replicate=2 schedule=gpipe microbatches=2 stages=blocks.1", 2),
    ],
)
def test_different_rows_within_one_replica_are_refused(
    pool: Pool, plan: str, replicas: int
) -> None:
    ranks = "ranks 0-1" if replicas == 1 else "ranks 0, 2"
    for messages in pool.run(_own_rows, plan, replicas, world_size=2 * replicas):
        assert len(messages) == 2
        said = f"the 2 ranks of replica 0 got different batches: {ranks} have parts of one model"
        assert all(said in text for text in messages)


def _bad_on_one_rank(plan: str, before: int = 0) -> list[str]:
    """Rank 1 gets 3 inputs and 4 targets; what the ranks are told by each kind of step, after so
    many good ones."""
    case, reference, parallel = parallelize("gpt", plan)
    batch = case.batch(8)
    good = local_rows(parallel, batch, 8)
    for _ in range(before):
        parallel.forward_backward(good)
        parallel.optimizer.zero_grad()
    inputs, targets = good
    bad = (inputs[:3], targets) if dist.get_rank() == 1 else good
    messages = []
    for step in (parallel.train_step, parallel.forward_backward, parallel.eval_step):
        try:
            step(bad)
        except BatchError as error:
            messages.append(str(error))
    # All ranks go on together, as if nothing had happened.
    parallel.forward_backward(good)
    reference_loss(reference, case, batch).backward()
    assert gradient_error(parallel, reference) < 1e-5
    return messages


REFUSED = "1 of 2 ranks could not use their part of the batch: rank 1 ("
"""With the reason of that rank."""


@pytest.mark.dist
@pytest.mark.parametrize("plan", KINDS)
def test_a_bad_batch_on_one_rank_is_refused_on_every_rank(pool: Pool, plan: str) -> None:
    fine, bad = pool.run(_bad_on_one_rank, plan, world_size=2, timeout_s=20)
    assert len(fine) == len(bad) == 3
    assert all("first dimensions differ: element 0 has 3, element 1 has 4" in t for t in bad)
    assert all(REFUSED in text for text in fine)
    assert all("rank 0, which has 4 rows and could" in text for text in fine)
    assert all("element 0 has 3, element 1 has 4" in text.splitlines()[0] for text in fine)


@pytest.mark.dist
@pytest.mark.parametrize("plan", ["dp_replicate=2", "dp_replicate=2 accumulation=2"])
def test_it_is_so_where_replicas_count_beside_the_forward(pool: Pool, plan: str) -> None:
    """From the third step on; the rank that refuses its rows makes no forward."""
    fine, bad = pool.run(_bad_on_one_rank, plan, FIRST_CUTS + 1, world_size=2, timeout_s=20)
    assert all("first dimensions differ: element 0 has 3, element 1 has 4" in t for t in bad)
    assert all(REFUSED in text for text in fine)
    assert len(fine) == len(bad) == 3


def padded(rows: int) -> Batch:
    """Ids and labels; row i has i + 1 labels that count, the rest are padding."""
    ids, labels = CASES["gpt"].batch(rows)  # type: ignore[misc]
    labels = labels.clone()
    for row in range(rows):
        labels[row, row + 1 :] = -100
    return ids, labels


def tokens(batch: Batch) -> Tensor:
    _, labels = batch  # type: ignore[misc]
    return (labels != -100).sum()


def _token_means(plan: str, is_said: bool) -> tuple[float, float, float]:
    """Errors of loss, gradient and eval loss against one mean over all tokens of all ranks."""
    weight = {"loss_weight": tokens} if is_said else {}
    case, reference, parallel = parallelize("gpt", plan, **weight)
    batch = padded(8)
    part = local_rows(parallel, batch, 8)
    expected = reference_loss(reference, case, batch)
    expected.backward()
    seen = parallel.eval_step(part)
    loss = parallel.forward_backward(part)
    return (
        relative(loss, expected.detach()),
        gradient_error(parallel, reference),
        relative(seen, expected.detach()),
    )


@pytest.mark.dist
@pytest.mark.parametrize("is_said", [True, False])
@pytest.mark.parametrize("plan", KINDS)
def test_tokens_weigh_the_same_wherever_they_are_by_weight_or_as_seen(
    pool: Pool, plan: str, is_said: bool
) -> None:
    # Rank 0 has 10 of the 36 tokens, its first microbatch 3.
    for errors in pool.run(_token_means, f"{plan} accumulation=2", is_said, world_size=2):
        assert max(errors) < 1e-5


def _nothing_to_count(plan: str) -> tuple[float, bool]:
    """A row that is all padding (its own mean is 0/0), then a batch that is."""
    case, reference, parallel = parallelize("gpt", plan)
    ids, labels = padded(8)  # type: ignore[misc]
    labels[0] = labels[1] = -100  # rank 0's first microbatch
    part = local_rows(parallel, (ids, labels), 8)
    expected = reference_loss(reference, case, (ids, labels))
    expected.backward()
    loss = parallel.forward_backward(part)
    assert gradient_error(parallel, reference) < 1e-5
    parallel.optimizer.zero_grad()
    before = {n: value.clone() for n, value in parallel.state_dict().items()}
    parallel.train_step((part[0], torch.full_like(part[1], -100)))  # type: ignore[index]
    after = parallel.state_dict()
    unmoved = all(torch.equal(after[n], value) for n, value in before.items())
    return relative(loss, expected.detach()), unmoved


@pytest.mark.dist
@pytest.mark.parametrize("plan", ["dp_replicate=2 accumulation=2", "dp_shard=2 accumulation=2"])
def test_a_microbatch_with_nothing_to_count_has_no_weight(pool: Pool, plan: str) -> None:
    for error, unmoved in pool.run(_nothing_to_count, plan, world_size=2):
        assert error < 1e-5
        assert unmoved


def _first_batch_too_short(plan: str) -> str:
    case, _, parallel = parallelize("gpt", plan)
    try:
        parallel.train_step(local_rows(parallel, case.batch(1), 1))
    except BatchError as error:
        return error.what
    return "no error"


@pytest.mark.dist
def test_a_first_batch_with_fewer_rows_than_ranks_is_refused_on_every_rank(pool: Pool) -> None:
    first, second = pool.run(_first_batch_too_short, "dp_replicate=2", world_size=2, timeout_s=20)
    assert "1 of 2 ranks could not use" in first
    assert "0 rows on rank 1 for 1 microbatches, and no earlier batch" in second
