"""Unmodified transformers models under sharding and recompute train like one process."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

from engines.hybrid import apply_plan
from engines.plan import Plan
from profiles.batch import Batch
from profiles.capture import capture
from tests.engines.cases import cpu_ranks
from tests.engines.parity import local_rows
from tests.workers import Pool

pytest.importorskip("transformers")


def build(name: str) -> tuple[nn.Module, Batch]:
    """A tiny model of the named architecture, without dropout and caches, and a batch of four."""
    import transformers as hf

    torch.manual_seed(0)
    ids = torch.randint(1, 90, (4, 12))
    words = {"input_ids": ids, "labels": ids}
    small = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4}
    match name:
        case "gpt2":  # fused qkv in Conv1D, tied head
            model = hf.GPT2LMHeadModel(
                hf.GPT2Config(
                    vocab_size=99,
                    n_embd=32,
                    n_layer=2,
                    n_head=4,
                    n_positions=32,
                    bos_token_id=1,
                    eos_token_id=2,
                )
            )
        case "llama":  # grouped-query heads, rotary positions
            model = hf.LlamaForCausalLM(
                hf.LlamaConfig(vocab_size=99, intermediate_size=64, num_key_value_heads=2, **small)
            )
        case "t5":  # one embedding in four places, position bias handed from block to block
            model = hf.T5ForConditionalGeneration(
                hf.T5Config(
                    vocab_size=99,
                    d_model=32,
                    d_kv=8,
                    d_ff=64,
                    num_layers=2,
                    num_heads=4,
                    decoder_start_token_id=0,
                    pad_token_id=0,
                )
            )
        case "mixtral":  # routing that depends on the data
            model = hf.MixtralForCausalLM(
                hf.MixtralConfig(
                    vocab_size=99,
                    intermediate_size=64,
                    num_key_value_heads=2,
                    num_local_experts=4,
                    **small,
                )
            )
        case _:
            config = hf.ViTConfig(
                intermediate_size=64, image_size=32, patch_size=8, num_labels=5, **small
            )
            model = hf.ViTForImageClassification(config)
            words = {"pixel_values": torch.randn(4, 3, 32, 32), "labels": torch.arange(4)}
    for module in model.modules():
        if hasattr(getattr(module, "config", None), "use_cache"):
            module.config.use_cache = False
    return model.eval(), words  # eval: no dropout; gradients flow all the same


def difference(name: str, plan: str) -> float:
    """Largest gradient difference against one process, relative to the largest gradient."""
    model, batch = build(name)
    reference = copy.deepcopy(model)
    reference(**batch).loss.backward()
    parallel = apply_plan(
        model,
        Plan.parse(plan),
        profile=capture(model, batch, name=name),
        cluster=cpu_ranks(2),
    )
    parallel.forward_backward(local_rows(parallel, batch, 4))
    got = parallel.full_gradients()
    wanted = {n: p.grad for n, p in reference.named_parameters() if p.grad is not None}
    assert got.keys() == wanted.keys()
    largest = max(gradient.abs().max().item() for gradient in wanted.values())
    return max((got[n] - wanted[n]).abs().max().item() for n in wanted) / largest


@pytest.mark.dist
@pytest.mark.parametrize("plan", ["dp_replicate=2", "dp_shard=2 recompute=full accumulation=2"])
@pytest.mark.parametrize("name", ["gpt2", "llama", "t5", "mixtral", "vit"])
def test_an_unmodified_model_trains_like_one_process(pool: Pool, name: str, plan: str) -> None:
    # A microbatch's mean is over its own tokens; here all have as many, so the means agree.
    assert max(pool.run(difference, name, plan, world_size=2)) < 1e-5


def cached_t5() -> str:
    from profiles.errors import ModelError

    model, batch = build("t5")
    model.get_submodule("decoder").config.use_cache = True  # type: ignore[union-attr]
    parallel = apply_plan(
        model,
        Plan.parse("dp_replicate=2 recompute=full"),
        profile=capture(model, batch),
        cluster=cpu_ranks(2),
    )
    try:
        parallel.forward_backward(batch)
    except ModelError as error:
        return str(error)
    return "no error"


@pytest.mark.dist
def test_recompute_of_a_block_that_fills_a_cache_is_explained(pool: Pool) -> None:
    text = pool.run(cached_t5, world_size=2)[0]
    assert "a block computes something else the second time" in text
    assert "use_cache=False" in text
