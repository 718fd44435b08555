"""Pipelines with data axes train like one process, in every kind and precision."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch import nn

from engines.plan import Plan
from tests.engines.cases import CASES, Case
from tests.engines.parity import (
    gradient_error,
    local_rows,
    measure,
    parallelize,
    reference_loss,
    relative,
    sgd,
    state_error,
)
from tests.workers import Pool

TOLERANCE = 1e-5
"""Relative, fp32: summing in another order costs a few units of 6e-8."""

DDP = "pp=2 dp_replicate=2 schedule=1f1b microbatches=2 stages=blocks.1"
ZERO1 = "pp=2 dp_replicate=2 zero=1 schedule=1f1b microbatches=2 stages=blocks.1"
ZERO3 = "pp=2 dp_shard=2 schedule=1f1b microbatches=2 stages=blocks.1"


@pytest.mark.dist
@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("tied-frozen-unused", f"{DDP} accumulation=2"),
        ("gpt", "pp=2 dp_replicate=2 schedule=zbv microbatches=2 stages=blocks.0,blocks.1,norm"),
        ("tied-frozen-unused", f"{ZERO1} accumulation=2 recompute=full"),
        (
            "tied-frozen-unused",
            "pp=2 dp_replicate=2 zero=2 schedule=interleaved microbatches=2 accumulation=2"
            " stages=blocks.0,blocks.1,norm",
        ),
        (
            "tied-frozen-unused",
            "pp=2 dp_shard=2 schedule=zbv microbatches=2 stages=blocks.0,blocks.1,norm",
        ),
        ("gpt", f"{ZERO3} recompute=full offload=states"),
    ],
)
def test_a_pipeline_with_data_axes_trains_like_one_process(
    pool: Pool, name: str, text: str
) -> None:
    check(pool, name, text)


@pytest.fixture(scope="module")
def eight() -> Iterator[Pool]:
    ranks = Pool(8)
    yield ranks
    ranks.close()


@pytest.mark.dist
def test_a_pipeline_of_shard_groups_and_replicas_of_them(eight: Pool) -> None:
    hsdp = "pp=2 dp_replicate=2 dp_shard=2 schedule=1f1b microbatches=2 accumulation=2"
    check(eight, "tied-frozen-unused", f"{hsdp} stages=blocks.1")


def check(pool: Pool, name: str, text: str) -> None:
    plan = Plan.parse(text)
    rows = plan.forwards * plan.data_degree
    found = pool.run(measure, name, text, rows, 3, rows, world_size=plan.world_size)
    for parity in found:
        assert parity.loss <= TOLERANCE, parity
        assert parity.gradient <= TOLERANCE, parity
        assert parity.parameter_after_steps <= TOLERANCE, parity


def clipped(text: str) -> tuple[float, float, float]:
    """Differences of the norm, of the parameters after a clipped step, and of an evaluation."""
    case, reference, parallel = parallelize("tied-frozen-unused", text)
    batch = case.batch(8)
    reference_loss(reference, case, batch).backward()
    trainable = [p for p in reference.parameters() if p.requires_grad]
    norm = nn.utils.clip_grad_norm_(trainable, 0.1)
    sgd(trainable).step()
    mine = local_rows(parallel, batch, 8)
    parallel.forward_backward(mine)
    found = parallel.clip_grad_norm_(0.1)
    parallel.optimizer.step()
    evaluated = parallel.eval_step(mine)
    after = reference_loss(reference, case, batch).detach()
    return relative(found, norm), state_error(parallel, reference), relative(evaluated, after)


@pytest.mark.dist
@pytest.mark.parametrize("text", [DDP, ZERO3])
def test_the_norm_counts_every_element_once(pool: Pool, text: str) -> None:
    for errors in pool.run(clipped, text, world_size=4):
        assert max(errors) < TOLERANCE


def in_bf16(text: str) -> tuple[float, float, float]:
    """Differences from one process in the same precision: of the loss, the gradients, and of the
    gradients of fp32 from those."""
    case, reference, parallel = parallelize("gpt", f"{text} precision=bf16")
    batch = case.batch(8)
    exact = copy.deepcopy(reference)
    reference_loss(exact, case, batch).backward()
    expected = _low_precision(reference, case, parallel.plan)
    loss = parallel.forward_backward(local_rows(parallel, batch, 8))
    noise = max(
        relative(p.grad, q.grad)
        for p, q in zip(reference.parameters(), exact.parameters(), strict=True)
        if p.grad is not None and q.grad is not None
    )
    return relative(loss, expected), gradient_error(parallel, reference), noise


def _low_precision(model: nn.Module, case: Case, plan: Plan) -> torch.Tensor:
    """The loss of one process, with its gradients on the parameters of `model`."""
    inputs, targets = case.batch(8)
    assert case.loss_fn is not None
    if not plan.data_parallel.is_sharded:
        with torch.autocast("cpu", torch.bfloat16):
            output = model(inputs)
        loss = case.loss_fn(output.float(), targets)
        loss.backward()
        return loss.detach()
    low = copy.deepcopy(model).bfloat16()
    loss = case.loss_fn(low(inputs).float(), targets)
    loss.backward()
    for parameter, cast in zip(model.parameters(), low.parameters(), strict=True):
        parameter.grad = None if cast.grad is None else cast.grad.float()
    return loss.detach()


@pytest.mark.dist
@pytest.mark.parametrize("text", [DDP, ZERO3, ZERO1])
def test_bf16_in_a_pipeline_is_bf16_on_one_process(pool: Pool, text: str) -> None:
    for loss, gradient, noise in pool.run(in_bf16, text, world_size=4):
        # Microbatches are summed in fp32, in one process a matmul sums them: bf16 has 8 bits.
        assert loss < 2**-8
        assert gradient < 2**-5
        assert noise > 2**-10  # and it is bf16 indeed


def moved(folder: str, text: str, how: str) -> dict[str, torch.Tensor]:
    """States after two steps that are saved, or after a third one on top of what is loaded."""
    adam = {"optimizer": lambda params: torch.optim.Adam(params, lr=1e-3, eps=1e-3)}
    case, _, parallel = parallelize("tied-frozen-unused", text, **adam)
    if how == "load":
        parallel.load(folder)
    for step in range(2 if how == "save" else 1):
        batch = case.batch(8 + 4 * step)
        parallel.train_step(local_rows(parallel, batch, 8 + 4 * step))
    if how == "save":
        parallel.save(folder)
    return {name: value.clone() for name, value in parallel.state_dict().items()}


def _after_three_steps() -> dict[str, torch.Tensor]:
    case = CASES["tied-frozen-unused"]
    torch.manual_seed(1)
    model = case.build()
    trainable = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.Adam(trainable, lr=1e-3, eps=1e-3)
    for rows in (8, 12, 8):
        optimizer.zero_grad()
        reference_loss(model, case, case.batch(rows)).backward()
        optimizer.step()
    return model.state_dict()


@pytest.mark.dist
@pytest.mark.parametrize(
    ("before", "after"), [(ZERO1, "dp_replicate=2"), ("dp_replicate=2", ZERO1), (ZERO3, DDP)]
)
def test_a_saved_hybrid_goes_on_under_another_plan(
    pool: Pool, tmp_path: Path, before: str, after: str
) -> None:
    folder = str(tmp_path / "checkpoint")
    pool.run(moved, folder, before, "save", world_size=Plan.parse(before).world_size)
    found = pool.run(moved, folder, after, "load", world_size=Plan.parse(after).world_size)
    wanted = _after_three_steps()
    for state in found:
        assert list(state) == list(wanted)
        assert max(relative(state[n], value) for n, value in wanted.items()) < TOLERANCE
