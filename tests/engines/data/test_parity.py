"""Every plan of the data-parallel family trains like one process: loss, gradients, parameters."""

from __future__ import annotations

from itertools import product

import pytest

from tests.engines.parity import Parity, measure
from tests.nightly import half, nightly
from tests.workers import Pool

TOLERANCE = 1e-5
"""Relative, fp32: summing in another order costs a few units of 6e-8."""

PLANS = (
    "dp_replicate=1",
    "dp_replicate=1 accumulation=4",
    "dp_replicate=2",
    "dp_replicate=4",
    "dp_replicate=2 accumulation=2",
    "dp_replicate=2 zero=1",
    "dp_replicate=4 zero=1",
    "dp_replicate=2 zero=1 accumulation=2",
    "dp_replicate=2 zero=2",
    "dp_replicate=4 zero=2",
    "dp_replicate=2 zero=2 accumulation=2",
    "dp_shard=2",
    "dp_shard=4",
    "dp_shard=2 accumulation=2",
    "dp_replicate=2 dp_shard=2",
    "dp_replicate=2 dp_shard=2 accumulation=2",
    "dp_shard=2 offload=states",
)
MODELS = ("gpt", "tied-frozen-unused", "resnet-group-norm")


@pytest.mark.dist
@pytest.mark.parametrize(("model", "plan"), half(product(MODELS, PLANS), of=3))
def test_plan_trains_like_one_process(pool: Pool, model: str, plan: str) -> None:
    _check(pool, model, plan)


@pytest.mark.dist
@pytest.mark.parametrize("recompute", ["selective", "full"])
@pytest.mark.parametrize(
    "degrees",
    ["dp_replicate=2 zero=2", "dp_shard=2", *nightly("dp_replicate=1", "dp_replicate=2")],
)
@pytest.mark.parametrize("model", ["tied-frozen-unused", *nightly("gpt", "resnet-group-norm")])
def test_recompute_changes_nothing(pool: Pool, model: str, degrees: str, recompute: str) -> None:
    _check(pool, model, f"{degrees} accumulation=2 recompute={recompute}")


@pytest.mark.dist
@pytest.mark.parametrize("plan", ["dp_replicate=2", "dp_replicate=4", "dp_shard=2"])
def test_synchronised_batch_norm_equals_one_process(pool: Pool, plan: str) -> None:
    _check(pool, "resnet-batch-norm", f"{plan} sync_batch_norm=true")


@pytest.mark.dist
@pytest.mark.parametrize("model", ["lstm", "loss-inside"])
@pytest.mark.parametrize(
    "plan", ["dp_shard=2", *nightly("dp_replicate=2", "dp_replicate=2 zero=1")]
)
def test_models_without_blocks_or_with_the_loss_inside(pool: Pool, model: str, plan: str) -> None:
    _check(pool, model, plan)


def _check(pool: Pool, model: str, plan: str) -> None:
    from engines.plan import Plan

    results = pool.run(measure, model, plan, world_size=Plan.parse(plan).world_size)
    for parity in results:
        assert isinstance(parity, Parity)
        assert parity.loss <= TOLERANCE, parity
        assert parity.gradient <= TOLERANCE, parity
        assert parity.parameter_after_steps <= TOLERANCE, parity
