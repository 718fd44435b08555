"""Plans with a chunked loss beside the same model on one process."""

from __future__ import annotations

import functools

import pytest
import torch

from engines.legality import problems
from engines.plan import Plan
from engines.tensor.proposal import propose_styles
from profiles.capture.capture import capture
from profiles.model.profile import ModelProfile
from tests.engines.cases import CASES, cpu_ranks, profile_of
from tests.engines.parity import Parity, measure, parallelize
from tests.matrix.architectures import architecture_of
from tests.matrix.cell import TOLERANCE, difference
from tests.nightly import nightly
from tests.workers import Pool

pytest.importorskip("transformers")


@functools.lru_cache
def looked_at(name: str) -> ModelProfile:
    architecture = architecture_of(name)
    torch.manual_seed(0)
    return capture(
        architecture.build(), architecture.batch, loss_fn=architecture.loss_fn, name=name
    )


def planned(name: str, text: str) -> Plan:
    """The plan, with the styles that are proved where it splits layers."""
    plan, architecture = Plan.parse(f"{text} loss_chunks=3"), architecture_of(name)
    if plan.tp == 1:
        return plan
    torch.manual_seed(0)
    proposal = propose_styles(
        architecture.build(),
        architecture.batch,
        size=plan.tp,
        profile=looked_at(name),
        has_target=architecture.loss_fn is not None,
    )
    return plan.model_copy(update={"tensor_styles": proposal.styles})


PLANS = [
    ("Llama", "dp_replicate=2 accumulation=2"),
    ("Llama", "dp_shard=2"),
    ("Llama", "tp=2"),
    ("GPT-2", "pp=2 schedule=1f1b microbatches=2 stages=transformer.h.2"),
    *nightly(
        ("GPT-2", "dp_replicate=2 zero=2 accumulation=2"),
        ("BERT", "dp_shard=2 recompute=full"),
        ("GPT-2", "tp=2 pp=2 schedule=gpipe microbatches=2 stages=transformer.h.2"),
        ("Llama", "tp=2 dp_shard=2"),
        ("Llama", "pp=2 schedule=zbv microbatches=2"
         " stages=model.layers.1,model.layers.2,model.layers.3"),
        ("Llama", "dp_replicate=2 dp_shard=2"),
    ),
]  # fmt: skip


@pytest.mark.dist
@pytest.mark.parametrize(("name", "text"), PLANS)
def test_a_model_that_computes_its_loss_trains_as_one_process(
    pool: Pool, name: str, text: str
) -> None:
    plan = planned(name, text)
    for result in pool.run(difference, name, plan, looked_at(name), world_size=plan.world_size):
        assert result.loss < TOLERANCE
        assert result.gradient < TOLERANCE, result.worst_gradient


KINDS = [
    "dp_shard=2 accumulation=2",
    "pp=2 schedule=zero_bubble microbatches=4 stages=blocks.1",
    *nightly("dp_replicate=2", "dp_replicate=2 zero=1 accumulation=2", "cp=2"),
]  # fmt: skip


@pytest.mark.dist
@pytest.mark.parametrize("text", KINDS)
def test_a_loss_function_beside_the_model_trains_as_one_process(pool: Pool, text: str) -> None:
    plan = Plan.parse(f"{text} loss_chunks=4")
    for result in pool.run(measure, "gpt", str(plan), world_size=plan.world_size):
        assert isinstance(result, Parity)
        assert result.loss < TOLERANCE
        assert result.gradient < TOLERANCE, result.worst_gradient
        assert result.parameter_after_steps < TOLERANCE


def _classic(plan: str) -> tuple[list[int], float]:
    """Shape of what a forward returns, and the difference of it."""
    case, reference, parallel = parallelize("gpt", plan)
    ids, _ = case.batch(2)
    logits, wanted = parallel(ids), reference(ids)
    logits.sum().backward()
    return list(logits.shape), (logits - wanted).abs().max().item()


@pytest.mark.dist
def test_a_forward_of_a_loop_of_ones_own_returns_whole_logits(pool: Pool) -> None:
    for shape, error in pool.run(_classic, "dp_shard=2 loss_chunks=4", world_size=2):
        assert shape == [2, 12, 61]
        assert error < TOLERANCE


def rules(text: str, profile: ModelProfile) -> set[str]:
    plan = Plan.parse(f"{text} loss_chunks=4")
    return {problem.rule for problem in problems(plan, profile, cpu_ranks(plan.world_size))}


def test_what_has_no_head_before_its_loss_is_refused() -> None:
    gpt = profile_of(CASES["gpt"], CASES["gpt"].build())
    assert rules("dp_shard=2", gpt) == set()
    assert rules("tp=2 tensor_styles=head:vocab", gpt) == set()
    assert rules("tp=2 tensor_styles=head:gather", gpt) == {"chunks-of-gathered-logits"}
    read = gpt.model_copy(update={"logits_read_by": "log_softmax"})
    assert rules("dp_shard=2", read) == {"chunks-of-read-logits"}
    squares = CASES["tied-frozen-unused"]  # its logits are multiplied by a buffer
    assert "chunks-without-head" in rules("dp_shard=2", profile_of(squares, squares.build()))
    units = tuple(unit for unit in gpt.units if unit.name != "head")
    headless = gpt.model_copy(update={"units": units})
    assert rules("dp_shard=2", headless) == {"chunks-without-head"}
