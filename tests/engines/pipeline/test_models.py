"""Unmodified transformers models in pipelines: gradients of every parameter as on one process."""

from __future__ import annotations

import copy

import pytest
import torch

from engines.apply import apply_plan
from engines.plan import Plan
from profiles.capture.batch.rows import split_rows
from tests.captured import captured
from tests.engines.cases import cpu_ranks
from tests.workers import Pool

pytest.importorskip("transformers")

ROWS = 4
CASES = {
    "GPT-2": "pp=2 schedule=1f1b microbatches=2 stages=transformer.h.2",  # tied head
    "Llama": "pp=3 schedule=1f1b microbatches=4 stages=model.layers.1,model.layers.3",
    "T5": "pp=2 schedule=1f1b microbatches=2 stages=decoder.block.1",  # one table, both halves
    "BART": "pp=3 schedule=gpipe microbatches=2"
    " stages=model.encoder.layers.2,model.decoder.layers.1",
    "ViT": "pp=2 schedule=interleaved microbatches=2 stages=vit.layers.0,vit.layers.2,vit.layers.3",
    "Mixtral": "pp=2 schedule=1f1b microbatches=2 stages=model.layers.2",
    "ResNet": "pp=2 schedule=zero_bubble microbatches=2 stages=resnet.encoder.stages.2.layers.1",
    "Whisper": "pp=2 schedule=zbv microbatches=2"
    " stages=model.encoder.layers.2,model.decoder.layers.0,model.decoder.layers.2",
    "Falcon": "pp=2 schedule=zbv microbatches=2"
    " stages=transformer.h.1,transformer.h.2,transformer.h.3",
}


def difference(name: str, text: str) -> tuple[float, float]:
    """Loss and largest gradient difference, relative; microbatch by microbatch on one process."""
    from tests import zoo

    torch.manual_seed(0)
    build, sample = zoo.ARCHITECTURES[name]
    model, plan = build().eval(), Plan.parse(text)  # no dropout; gradients flow all the same
    for module in model.modules():
        if hasattr(getattr(module, "config", None), "use_cache"):
            module.config.use_cache = False
    assert isinstance(sample, dict)
    batch = {key: torch.cat([value, value])[:ROWS] for key, value in sample.items()}
    reference, loss = copy.deepcopy(model), torch.zeros(())
    for piece in split_rows(batch, [ROWS // plan.forwards] * plan.forwards):
        share = reference(**piece).loss / plan.forwards
        share.backward()
        loss += share.detach()
    profile = captured(name, model, batch, name=name)
    parallel = apply_plan(model, plan, profile=profile, cluster=cpu_ranks(plan.world_size))
    actual = parallel.forward_backward(batch)
    got = parallel.full_gradients()
    wanted = {n: p.grad for n, p in reference.named_parameters() if p.grad is not None}
    assert got.keys() == wanted.keys()
    largest = max(gradient.abs().max().item() for gradient in wanted.values())
    worst = max((got[n] - wanted[n]).abs().max().item() for n in wanted)
    return abs(actual - loss).item() / loss.item(), worst / largest


@pytest.mark.dist
def test_a_table_that_several_blocks_use_gets_its_whole_gradient_once(pool: Pool) -> None:
    plan = "pp=2 schedule=zero_bubble microbatches=2 stages=decoder.block.0"
    for _, gradient in pool.run(difference, "T5", plan, world_size=2):
        assert gradient < 1e-5


@pytest.mark.dist
@pytest.mark.parametrize("name", CASES)
def test_an_unmodified_model_trains_like_one_process(pool: Pool, name: str) -> None:
    plan = Plan.parse(CASES[name])
    for loss, gradient in pool.run(difference, name, CASES[name], world_size=plan.world_size):
        assert loss < 1e-5
        assert gradient < 1e-5


@pytest.mark.dist
@pytest.mark.parametrize(
    ("name", "recompute"), [("ResNet", "selective"), ("Falcon", "selective"), ("ResNet", "full")]
)
def test_blocks_are_computed_again_once_where_the_schedule_splits_backwards(
    pool: Pool, name: str, recompute: str
) -> None:
    plan = f"{CASES[name]} recompute={recompute}"
    for loss, gradient in pool.run(difference, name, plan, world_size=2):
        assert loss < 1e-5
        assert gradient < 1e-5
