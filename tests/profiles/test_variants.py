"""The same model at another length or size, counted from its config.json."""

from __future__ import annotations

import pytest

from profiles.errors import InputError
from profiles.families import profile_from_config
from profiles.families.variants import at_length, head_step, scaled
from profiles.model import ModelProfile, Numerics
from tests.factories import chain

LLAMA = {
    "model_type": "llama",
    "vocab_size": 1000,
    "hidden_size": 512,
    "intermediate_size": 1376,
    "num_hidden_layers": 8,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "max_position_embeddings": 4096,
}
GPT2 = {
    "model_type": "gpt2",
    "vocab_size": 1000,
    "n_embd": 256,
    "n_head": 4,
    "n_layer": 4,
    "n_positions": 512,
}


def profile(config: dict[str, object], tokens: int = 128) -> ModelProfile:
    return profile_from_config(
        config, samples=2, sequence_length=tokens, name="small", numerics=tuple(Numerics)
    )


def test_another_length_is_what_the_file_gives_at_that_length() -> None:
    assert at_length(profile(LLAMA, 128), 256) == profile(LLAMA, 256)
    assert at_length(at_length(profile(GPT2, 128), 256), 128) == profile(GPT2, 128)


def test_a_length_beyond_the_positions_is_refused() -> None:
    with pytest.raises(InputError, match="the positions of this model go to 512"):
        at_length(profile(GPT2), 513)


def test_the_same_number_of_heads_is_the_same_model() -> None:
    assert scaled(profile(LLAMA), 8) == profile(LLAMA)


def test_twice_the_heads_are_twice_the_width_and_the_depth() -> None:
    doubled = {
        **LLAMA,
        "hidden_size": 1024,
        "intermediate_size": 2752,
        "num_hidden_layers": 16,
        "num_attention_heads": 16,
        "num_key_value_heads": 4,
    }
    assert scaled(profile(LLAMA), 16) == profile(doubled)
    # 2 x wide, 2 x deep: eight times the weights of a layer's matrices, 512 x 1000 twice stay x 2.
    blocks = [sum(u.parameters for u in p.blocks()) for p in (profile(LLAMA), profile(doubled))]
    assert blocks[1] / blocks[0] == pytest.approx(8, rel=0.01)


def test_heads_come_in_groups_that_share_keys() -> None:
    assert head_step(profile(LLAMA)) == 4
    assert head_step(profile(GPT2)) == 1
    with pytest.raises(InputError, match="6 heads of small cannot share keys as its 8 do"):
        scaled(profile(LLAMA), 6)


def test_a_profile_of_a_module_is_known_at_one_size() -> None:
    with pytest.raises(InputError, match="known at one size only: its profile is of a module"):
        at_length(chain(), 128)


def test_a_profile_keeps_its_config_in_its_file() -> None:
    again = ModelProfile.from_json(profile(LLAMA).to_json())
    assert at_length(again, 64) == profile(LLAMA, 64)
