"""Blocks that are split by tokens, from border to border, beside the same model on one process."""

from __future__ import annotations

import functools

import pytest
import torch

from engines.plan import Plan
from engines.tensor.proposal import Proposal, propose_styles
from profiles.capture.capture import capture
from profiles.model.profile import ModelProfile
from tests.matrix.architectures import architecture_of
from tests.matrix.cell import TOLERANCE, difference
from tests.workers import Pool

pytest.importorskip("transformers")


@functools.lru_cache
def looked_at(name: str, size: int) -> tuple[ModelProfile, Proposal]:
    """A model's profile, and its split by features and tokens as it is proved."""
    architecture = architecture_of(name)
    torch.manual_seed(0)
    model, has_target = architecture.build(), architecture.loss_fn is not None
    profile = capture(model, architecture.batch, loss_fn=architecture.loss_fn, name=name)
    proposal = propose_styles(
        model, architecture.batch, size=size, profile=profile, has_target=has_target, by_tokens=True
    )
    return profile, proposal


PLANS = [
    ("GPT-2", "tp=4"),
    ("GPT-2", "tp=2 pp=2 schedule=1f1b microbatches=2 stages=transformer.h.2"),
    ("Llama", "tp=2 recompute=full"),
    ("Llama", "tp=2 dp_shard=2"),
    ("Llama", "tp=2 pp=2 schedule=zbv microbatches=2"
     " stages=model.layers.1,model.layers.2,model.layers.3"),
    ("BERT", "tp=4"),
    ("BERT", "tp=2 dp_replicate=2 zero=1"),
    ("ViT, 16 tokens", "tp=2"),
    ("ViT, 16 tokens", "tp=2 pp=2 schedule=gpipe microbatches=2 stages=vit.layers.2"),
]  # fmt: skip


@pytest.mark.dist
@pytest.mark.parametrize(("name", "text"), PLANS)
def test_loss_and_gradients_are_those_of_one_process(pool: Pool, name: str, text: str) -> None:
    plan = Plan.parse(f"{text} sequence_parallel=true")
    profile, proposal = looked_at(name, plan.tp)
    plan = plan.model_copy(update={"tensor_styles": proposal.styles})
    for result in pool.run(difference, name, plan, profile, world_size=plan.world_size):
        assert result.loss < TOLERANCE
        assert result.gradient < TOLERANCE, result.worst_gradient
