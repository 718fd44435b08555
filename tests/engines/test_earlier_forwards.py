"""Models that ran before they were parallelized: graphs and results that live on."""

from __future__ import annotations

import warnings

import pytest
import torch
from torch import Tensor, nn

from engines.apply import apply_plan
from engines.plan import Plan
from engines.tensor.proposal import propose_styles
from tests.engines.cases import CASES, Case, TinyGPT, cpu_ranks, profile_of
from tests.engines.parity import gradient_error, local_rows, reference_loss, sgd
from tests.matrix.cell import TOLERANCE
from tests.workers import Pool

GPT = CASES["gpt"]
ROWS = 8
PLANS = (
    "dp_replicate=2",
    "dp_shard=2",
    "tp=2",
    "pp=2 schedule=1f1b microbatches=2 stages=blocks.1",
    "cp=2",
)


class Remembering(TinyGPT):
    """Each block keeps its last output, for a plot say; one has a weight that a hook computes."""

    def __init__(self) -> None:
        super().__init__()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", FutureWarning)  # in favour of parametrizations
            nn.utils.weight_norm(self.blocks[1].out)
        for block in self.blocks:
            block.register_forward_hook(_keep)


def _keep(module: nn.Module, args: tuple[Tensor, ...], output: Tensor) -> None:
    module.last = output  # type: ignore[assignment]


CASE = Case(Remembering, GPT.batch, GPT.loss_fn)


def _after_a_forward(text: str) -> tuple[float, float]:
    """Errors of a step's loss and gradients, of a model whose graph of an earlier loss lives."""
    torch.manual_seed(1)
    reference, model = CASE.build(), CASE.build()
    model.load_state_dict(reference.state_dict())
    earlier = reference_loss(model, CASE, CASE.batch(2))
    plan, profile = Plan.parse(text), profile_of(CASE, model)
    if plan.tp > 1:
        styles = propose_styles(
            model, CASE.batch(2), size=plan.tp, profile=profile, has_target=True
        ).styles
        assert styles
        plan = plan.model_copy(update={"tensor_styles": styles})
    parallel = apply_plan(
        model,
        plan,
        profile=profile,
        cluster=cpu_ranks(plan.world_size),
        loss_fn=CASE.loss_fn,
        sample=CASE.batch(2),
        optimizer=sgd,
    )
    expected = reference_loss(reference, CASE, CASE.batch(ROWS))
    expected.backward()
    loss = parallel.forward_backward(local_rows(parallel, CASE.batch(ROWS), ROWS))
    assert earlier.grad_fn is not None
    return abs(float(loss.detach() - expected.detach())), gradient_error(parallel, reference)


@pytest.mark.dist
@pytest.mark.parametrize("plan", PLANS)
def test_a_model_that_ran_before_trains_like_one_process(pool: Pool, plan: str) -> None:
    for loss, gradient in pool.run(_after_a_forward, plan, world_size=2):
        assert loss < TOLERANCE
        assert gradient < TOLERANCE
