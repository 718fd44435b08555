"""Unmodified transformers models under sharding and recompute train like one process."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

from advisor.auto.parallelize import auto_parallelize
from engines.apply import apply_plan
from engines.plan import Plan
from profiles.capture.batch.call import Batch
from profiles.capture.batch.rows import batch_size
from tests.captured import captured
from tests.engines.cases import cpu_ranks
from tests.engines.parity import local_rows
from tests.nightly import half
from tests.workers import Pool

pytest.importorskip("transformers")


def build(name: str) -> tuple[nn.Module, Batch]:
    """A tiny model of the named architecture, without dropout, and a batch."""
    from tests import zoo

    torch.manual_seed(0)
    model: nn.Module = getattr(zoo, name)()
    # Evaluation mode: no dropout; gradients flow all the same.
    return model.eval(), zoo.PIXELS if name == "vit" else zoo.TOKENS


def difference(name: str, plan: str, *, ranks: int = 2) -> float:
    """Largest gradient difference against one process, relative to the largest gradient."""
    model, batch = build(name)
    reference = copy.deepcopy(model)
    reference(**batch).loss.backward()
    parallel = apply_plan(
        model,
        Plan.parse(plan),
        profile=captured(name, model, batch, name=name),
        cluster=cpu_ranks(ranks),
    )
    parallel.forward_backward(local_rows(parallel, batch, batch_size(batch)))
    got = parallel.full_gradients()
    wanted = {n: p.grad for n, p in reference.named_parameters() if p.grad is not None}
    assert got.keys() == wanted.keys()
    largest = max(gradient.abs().max().item() for gradient in wanted.values())
    return max((got[n] - wanted[n]).abs().max().item() for n in wanted) / largest


@pytest.mark.parametrize("recompute", ["full", "selective"])
@pytest.mark.parametrize("name", half(["t5", "gpt2", "llama", "mixtral"], of=4))
def test_blocks_that_would_fill_a_cache_twice_are_recomputed(name: str, recompute: str) -> None:
    """A forward of transformers makes a key/value cache, unless it is told not to."""
    assert difference(name, f"recompute={recompute}", ranks=1) < 1e-5


@pytest.mark.dist
@pytest.mark.parametrize("plan", half(["dp_shard=2 recompute=full", "dp_replicate=2"]))
@pytest.mark.parametrize("name", ["gpt2", "llama", "t5", "mixtral", "vit"])
def test_an_unmodified_model_trains_like_one_process(pool: Pool, name: str, plan: str) -> None:
    # A rank's mean is over its own tokens; here all have as many, so the means agree.
    assert max(pool.run(difference, name, plan, world_size=2)) < 1e-5


def cached_split(name: str) -> tuple[float, float, bool]:
    """Largest differences of loss and gradients between tp=2 and one process, relative, and
    whether the blocks are split.

    The model is as its authors made it, and fills the cache that it fills by default.
    """
    from tests import zoo

    torch.manual_seed(0)
    make, batch = zoo.ARCHITECTURES[name]
    model = make().eval()
    reference = copy.deepcopy(model)
    output = reference(**batch)
    assert output.past_key_values is not None
    output.loss.backward()
    parallel = auto_parallelize(
        model, sample=batch, plan="tp=2", cluster=cpu_ranks(2), learns=False
    )
    loss = parallel.forward_backward(batch)
    got = parallel.full_gradients()
    wanted = {n: p.grad for n, p in reference.named_parameters() if p.grad is not None}
    assert got.keys() == wanted.keys()
    largest = max(gradient.abs().max().item() for gradient in wanted.values())
    return (
        abs(loss.item() - output.loss.item()) / output.loss.item(),
        max((got[n] - wanted[n]).abs().max().item() for n in wanted) / largest,
        {"column", "row"} <= {style for _, style in parallel.plan.tensor_styles},
    )


@pytest.mark.dist
@pytest.mark.parametrize("name", half(["T5", "Mistral", "Gemma 2"], of=3))
def test_a_model_that_fills_its_cache_is_split_and_trains_like_one_process(
    pool: Pool, name: str
) -> None:
    for loss, gradient, is_split in pool.run(cached_split, name, world_size=2, timeout_s=120):
        assert loss < 1e-6
        assert gradient < 1e-5
        assert is_split
