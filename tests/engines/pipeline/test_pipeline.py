"""A pipeline trains like one process: loss, every gradient, and parameters after three steps."""

from __future__ import annotations

import pytest

from engines.plan import Plan
from tests.engines.parity import measure
from tests.workers import Pool

pytestmark = pytest.mark.dist

TOLERANCE = 1e-5
"""Relative, fp32: summing in another order costs a few units of 6e-8."""


def four_stages(borders: str, microbatches: int = 4) -> tuple[str, ...]:
    """Two stages on each of two ranks, under every schedule that knows such."""
    schedules = ("interleaved", "zero_bubble", "zbv")
    return tuple(
        f"pp=2 schedule={schedule} microbatches={microbatches} stages={borders}"
        for schedule in schedules
    )


def check(pool: Pool, model: str, text: str) -> None:
    """Steps of growing batches, so that each has new shapes."""
    plan = Plan.parse(text)
    forwards = plan.forwards
    rows = 2 * forwards
    for result in pool.run(measure, model, text, rows, 3, forwards, world_size=plan.world_size):
        assert result.loss <= TOLERANCE, result
        assert result.gradient <= TOLERANCE, result
        assert result.parameter_after_steps <= TOLERANCE, result


@pytest.mark.parametrize(
    "plan",
    [
        "pp=2 schedule=naive microbatches=1 accumulation=2 stages=blocks.1",
        "pp=2 schedule=naive microbatches=4 stages=blocks.1",
        "pp=2 schedule=gpipe microbatches=2 accumulation=2 stages=blocks.1",
        "pp=4 schedule=gpipe microbatches=2 stages=blocks.0,blocks.2,norm",
        "pp=2 schedule=1f1b microbatches=2 stages=head",
        "pp=3 schedule=1f1b microbatches=4 stages=blocks.1,norm",
        "pp=2 schedule=1f1b microbatches=2 stages=blocks.1 recompute=full",
        "pp=2 schedule=zero_bubble microbatches=4 stages=blocks.1",
        *four_stages("blocks.0,blocks.1,norm"),
    ],
)
def test_every_schedule_trains_a_gpt_like_one_process(pool: Pool, plan: str) -> None:
    check(pool, "gpt", plan)


@pytest.mark.parametrize(
    "plan",
    [
        "pp=2 schedule=1f1b microbatches=2 stages=blocks.1",
        "pp=4 schedule=1f1b microbatches=4 stages=blocks.0,blocks.2,head",
        *four_stages("blocks.0,blocks.1,norm"),
    ],
)
def test_an_embedding_and_the_head_tied_to_it_lie_on_different_ranks(pool: Pool, plan: str) -> None:
    check(pool, "tied-frozen-unused", plan)


@pytest.mark.parametrize(
    "plan",
    [
        "pp=2 schedule=1f1b microbatches=2 stages=layers.1",
        "pp=2 schedule=gpipe microbatches=2 stages=stem.2",  # its ReLU changes what arrives
        "pp=3 schedule=1f1b microbatches=3 stages=stem.1,layers.1",
    ],
)
def test_a_convolutional_net_with_activations_in_place(pool: Pool, plan: str) -> None:
    check(pool, "resnet-group-norm", plan)


@pytest.mark.parametrize(
    "plan",
    [
        "pp=2 schedule=1f1b microbatches=2 stages=bottom",
        "pp=4 schedule=1f1b microbatches=4 stages=down,bottom,up",  # `high` passes two stages by
        *four_stages("down,bottom,up", microbatches=2),
        "pp=2 schedule=zbv microbatches=3 stages=down,bottom,up",  # an odd number
    ],
)
def test_skip_edges_travel_past_the_stages_between(pool: Pool, plan: str) -> None:
    check(pool, "unet", plan)


@pytest.mark.parametrize(
    "plan",
    [
        "pp=2 schedule=1f1b microbatches=2 stages=middle",
        "pp=3 schedule=gpipe microbatches=2 stages=middle,head",
    ],
)
def test_a_unit_called_on_both_sides_of_a_cut(pool: Pool, plan: str) -> None:
    check(pool, "siamese", plan)


@pytest.mark.parametrize("border", ["second", "third", "head"])
def test_a_value_that_is_changed_in_place_crosses_as_it_was_made(pool: Pool, border: str) -> None:
    check(pool, "overwriting", f"pp=2 schedule=1f1b microbatches=2 stages={border}")


@pytest.mark.parametrize("border", ["second", "halves", "third", "head"])
def test_what_a_unit_hands_through_is_used_beside_it(pool: Pool, border: str) -> None:
    check(pool, "handed-through", f"pp=2 schedule=1f1b microbatches=2 stages={border}")


@pytest.mark.parametrize("border", ["blocks.1", "norm", "head"])
def test_gradients_reach_the_modules_of_reentrant_checkpoints(pool: Pool, border: str) -> None:
    check(pool, "reentrant", f"pp=2 schedule=1f1b microbatches=2 stages={border}")


@pytest.mark.parametrize("border", ["blocks.1", "blocks.2", "norm", "blocks.2 dp_shard=2"])
def test_layers_that_no_loss_depends_on_have_no_gradient(pool: Pool, border: str) -> None:
    check(pool, "early-features", f"pp=2 schedule=1f1b microbatches=2 stages={border}")


def test_a_model_that_returns_its_loss(pool: Pool) -> None:
    check(pool, "loss-inside", "pp=2 schedule=1f1b microbatches=2 stages=gpt.blocks.1")


def test_a_model_without_blocks(pool: Pool) -> None:
    check(pool, "lstm", "pp=2 schedule=1f1b microbatches=2 stages=head")
