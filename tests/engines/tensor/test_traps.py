"""Unmodified models with the known traps of tensor parallelism, split over ranks, beside whole."""

from __future__ import annotations

from functools import partial

import pytest

from tests.engines.tensor.ranks import parity
from tests.nightly import nightly
from tests.workers import Pool

pytest.importorskip("transformers")

TRAPS = {
    "GPT-2": 2,  # fused qkv, transposed weights, tied head, biases on rows, odd vocabulary
    "BLOOM": 2,  # ALiBi, fused qkv head by head
    "T5": 2,  # a shared table of relative positions
    "Llama": 4,  # two key heads for four ranks
    "Qwen 3": 2,  # norms of query and key heads
    "OPT": 4,  # heads counted in an attribute
    "Falcon": 2,  # fused qkv with fewer key heads; its own class of linear layer
    "BART": 2,  # a scaled embedding tied to the head
    "Gemma 2": 2,  # capped logits
    "Mixtral": 2,  # experts by routing
    "ResNet": 2,  # convolutions
}


BY_TOKENS = {"Llama": 2, "GPT-2": 4, "BERT": 2, "Qwen 3": 2}


@pytest.mark.dist
@pytest.mark.parametrize("name", [*[*BY_TOKENS][::2], *nightly(*[*BY_TOKENS][1::2])])
def test_norms_and_residuals_may_be_split_by_tokens(pool: Pool, name: str) -> None:
    for result in pool.run(partial(parity, by_tokens=True), name, world_size=BY_TOKENS[name]):
        assert result.by_tokens == 1
        assert result.loss < 1e-6
        assert result.gradient < 1e-5, result.worst


@pytest.mark.dist
@pytest.mark.parametrize("name", [*[*TRAPS][::2], *nightly(*[*TRAPS][1::2])])
def test_loss_and_gradients_are_those_of_the_whole_model(pool: Pool, name: str) -> None:
    size = TRAPS[name]
    for result in pool.run(parity, name, world_size=size):
        assert result.loss < 1e-6
        assert result.gradient < 1e-5, result.worst
        assert result.share < 0.93
        assert result.few_heads == 2 * (name == "Llama")  # of keys and of values, each on two ranks
