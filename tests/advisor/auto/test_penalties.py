"""Penalties on parameters in the loss function."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import Tensor

from advisor import auto_parallelize
from tests.engines.cases import CASES, TinyGPT, cpu_ranks, token_loss
from tests.engines.parity import local_rows, sgd, state_error
from tests.nightly import nightly
from tests.workers import Pool

ROWS = 8
PLANS = ["dp_shard=2", "tp=2", "pp=2", *nightly("dp_replicate=2", "cp=2")]


def penalised(model: TinyGPT, logits: Tensor, targets: Tensor) -> Tensor:
    """With the norm of a layer that tensor parallelism would split, and the mean of a table."""
    weight = model.blocks[0].mlp[0].weight
    return token_loss(logits, targets) + 0.5 * weight.norm() + model.embed.weight.abs().mean()


def _trained(plan: str) -> tuple[tuple[str, ...], float]:
    """Paths of split layers, and how far parameters are from those of one process after three
    steps."""
    torch.manual_seed(1)
    reference, case = TinyGPT(), CASES["gpt"]
    model = copy.deepcopy(reference)
    batch = case.batch(ROWS)
    parallel = auto_parallelize(
        model,
        sample=batch,
        loss_fn=lambda logits, targets: penalised(model, logits, targets),
        plan=plan,
        optimizer=sgd,
        cluster=cpu_ranks(2),
        global_batch_size=ROWS,
        learns=False,
    )
    optimizer = sgd(list(reference.parameters()))
    for _ in range(3):
        parallel.train_step(local_rows(parallel, batch, ROWS))
        optimizer.zero_grad()
        tokens, targets = batch
        penalised(reference, reference(tokens), targets).backward()
        optimizer.step()
    return tuple(path for path, _ in parallel.plan.tensor_styles), state_error(parallel, reference)


@pytest.mark.dist
@pytest.mark.parametrize("plan", PLANS)
def test_a_loss_function_reads_whole_parameters_under_every_plan(pool: Pool, plan: str) -> None:
    for split, error in pool.run(_trained, plan, world_size=2):
        assert not {"embed", "blocks.0.mlp.0", "blocks.*.mlp.0"}.intersection(split)
        assert ("blocks.1.mlp.0" in split) == (plan == "tp=2")
        assert error < 1e-5
