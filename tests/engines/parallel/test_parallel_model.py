"""A ParallelModel beyond one plain step."""

from __future__ import annotations

import copy

import pytest
import torch

from engines.apply import apply_plan
from engines.plan import Plan
from tests.engines.cases import CASES, cpu_ranks, profile_of
from tests.engines.parity import (
    HSDP,
    KINDS,
    alone,
    gradient_error,
    local_rows,
    parallelize,
    reference_loss,
    relative,
    sgd,
)
from tests.workers import Pool


def test_one_process_without_a_launcher_is_a_plan_of_one() -> None:
    torch.manual_seed(0)
    _, parallel = alone("gpt")
    batch = CASES["gpt"].batch(4)
    first = parallel.train_step(batch).item()
    for _ in range(20):
        last = parallel.train_step(batch).item()
    assert last < first
    assert (parallel.data_rank, parallel.data_world_size) == (0, 1)


def test_names_are_those_of_the_unwrapped_model() -> None:
    model, parallel = alone("gpt")
    assert list(parallel.state_dict()) == list(CASES["gpt"].build().state_dict())
    assert [n for n, _ in parallel.named_parameters()] == [n for n, _ in model.named_parameters()]


def _classic_loop(plan: str) -> float:
    case, reference, parallel = parallelize("gpt", plan)
    assert case.loss_fn is not None
    optimizer = torch.optim.SGD(reference.parameters(), lr=0.05, momentum=0.9)
    for step in range(3):
        batch = case.batch(4 + 4 * step)
        inputs, targets = local_rows(parallel, batch, 4 + 4 * step)
        case.loss_fn(parallel(inputs), targets).backward()
        parallel.optimizer.step()
        parallel.optimizer.zero_grad()
        reference_loss(reference, case, batch).backward()
        optimizer.step()
        optimizer.zero_grad()
    after = parallel.state_dict()
    return max(relative(after[n], value) for n, value in reference.state_dict().items())


@pytest.mark.dist
@pytest.mark.parametrize("plan", KINDS)
def test_a_classic_loop_trains_like_one_process(pool: Pool, plan: str) -> None:
    assert max(pool.run(_classic_loop, plan, world_size=2)) < 1e-5


def _eval_between_steps(plan: str) -> tuple[float, float]:
    """Eval loss against one process, before and after a step that follows it."""
    case, reference, parallel = parallelize("gpt", plan)
    errors = []
    optimizer = torch.optim.SGD(reference.parameters(), lr=0.05, momentum=0.9)
    for rows in (7, 8):
        batch = case.batch(rows)
        part = local_rows(parallel, batch, rows)
        expected = reference_loss(reference, case, batch)
        errors.append(abs(parallel.eval_step(part).item() - expected.item()) / expected.item())
        parallel.train_step(part)
        optimizer.zero_grad()
        expected.backward()
        optimizer.step()
    return errors[0], errors[1]


@pytest.mark.dist
@pytest.mark.parametrize("plan", KINDS)
def test_eval_steps_see_the_newest_parameters(pool: Pool, plan: str) -> None:
    assert max(max(pair) for pair in pool.run(_eval_between_steps, plan, world_size=2)) < 1e-5


def _different_seeds(plan: str) -> float:
    import torch.distributed as dist

    case = CASES["gpt"]
    torch.manual_seed(dist.get_rank())
    model = case.build()
    torch.manual_seed(0)
    rank_zero = case.build().state_dict()
    parallel = apply_plan(
        model,
        Plan.parse(plan),
        profile=profile_of(case, model),
        cluster=cpu_ranks(2),
        loss_fn=case.loss_fn,
    )
    state = parallel.state_dict()
    return max((state[n] - value).abs().max().item() for n, value in rank_zero.items())


@pytest.mark.dist
@pytest.mark.parametrize("plan", KINDS)
def test_ranks_that_built_from_different_seeds_all_start_as_rank_zero(
    pool: Pool, plan: str
) -> None:
    assert pool.run(_different_seeds, plan, world_size=2) == [0.0, 0.0]


def _bf16(plan: str) -> tuple[float, set[torch.dtype], torch.dtype]:
    case = CASES["gpt"]
    torch.manual_seed(1)
    reference = case.build()
    model = copy.deepcopy(reference)
    parallel = apply_plan(
        model,
        Plan.parse(plan),
        profile=profile_of(case, model),
        cluster=cpu_ranks(2),
        loss_fn=case.loss_fn,
    )
    batch = case.batch(8)
    part = local_rows(parallel, batch, 8)
    output = parallel(part[0])
    expected = reference_loss(reference, case, batch).item()
    loss = parallel.train_step(part).item()
    dtypes = {p.dtype for p in parallel.parameters()}
    assert parallel.full_gradients() == {}
    return abs(loss - expected) / expected, dtypes, output.dtype


@pytest.mark.dist
@pytest.mark.parametrize("plan", KINDS)
def test_bf16_keeps_fp32_masters_and_hands_out_fp32(pool: Pool, plan: str) -> None:
    for error, dtypes, output in pool.run(_bf16, f"{plan} precision=bf16", world_size=2):
        # bf16 has 8 bits of mantissa: half a unit is 2^-9 = 0.2 %; equality would mean no bf16.
        assert 0 < error < 1e-2
        assert dtypes == {torch.float32}
        assert output == torch.float32


def _shard_bytes(plan: str) -> int:
    from torch.distributed.tensor import DTensor

    _, _, parallel = parallelize("gpt", plan)
    shard_bytes = 0
    for parameter in parallel.parameters():
        local = parameter.to_local() if isinstance(parameter, DTensor) else parameter
        shard_bytes += local.numel() * local.element_size()
    return shard_bytes


@pytest.mark.dist
def test_each_rank_holds_its_shard_between_steps(pool: Pool) -> None:
    whole = sum(p.numel() * 4 for p in CASES["gpt"].build().parameters())
    assert pool.run(_shard_bytes, "dp_replicate=4", world_size=4) == [whole] * 4
    shards = pool.run(_shard_bytes, "dp_shard=4", world_size=4)
    assert sum(shards) == whole
    assert max(shards) < 0.3 * whole


def _metric_forward_before_the_step(plan: str) -> tuple[float, float]:
    """A classic loop that looks at outputs without gradients between backward and step.

    Errors of the next training forward and of its gradients against one process.
    """
    case, reference, parallel = parallelize("gpt", plan)
    assert case.loss_fn is not None
    optimizer = sgd(list(reference.parameters()))
    batch = case.batch(8)
    inputs, targets = local_rows(parallel, batch, 8)
    case.loss_fn(parallel(inputs), targets).backward()
    with torch.no_grad():
        parallel(inputs)
    parallel.optimizer.step()
    parallel.optimizer.zero_grad()
    reference_loss(reference, case, batch).backward()
    optimizer.step()
    optimizer.zero_grad()

    output = parallel(inputs)
    case.loss_fn(output, targets).backward()
    reference_loss(reference, case, batch).backward()
    return relative(output.detach(), reference(inputs).detach()), gradient_error(
        parallel, reference
    )


@pytest.mark.dist
@pytest.mark.parametrize("plan", [*KINDS, HSDP])
def test_a_forward_without_gradients_does_not_keep_old_parameters(pool: Pool, plan: str) -> None:
    size = Plan.parse(plan).world_size
    assert max(max(e) for e in pool.run(_metric_forward_before_the_step, plan, world_size=size)) < (
        1e-5
    )
