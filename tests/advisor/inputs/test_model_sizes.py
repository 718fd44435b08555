"""The same model at another length or size, counted from what it was made from."""

from __future__ import annotations

import dataclasses
import json
import sys
from pathlib import Path
from typing import ClassVar

import pytest
import torch

from advisor.inputs.bundled.gpt_shapes import SHAPES
from advisor.inputs.model_sizes import at_length, head_step, scaled
from advisor.inputs.models import profile_model
from profiles.capture.capture import capture
from profiles.closed_forms.families import profile_from_config
from profiles.errors import InputError
from profiles.model.profile import LOSS, ModelProfile, Numerics
from tests.advisor.inputs.factory_of_sizes import POSITIONS, TOKENS, Small, calls, loss
from tests.factories import chain

FACTORIES = "tests.advisor.inputs.factory_of_sizes"
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


def test_another_length_equals_the_profile_of_the_config_at_that_length() -> None:
    assert at_length(profile(LLAMA, 128), 256) == profile(LLAMA, 256)
    assert at_length(at_length(profile(GPT2, 128), 256), 128) == profile(GPT2, 128)


@pytest.mark.parametrize("on_processor", [True, False])
def test_another_length_is_counted_for_the_same_kind_of_device(on_processor: bool) -> None:
    config = {"model_type": "gpt2", "vocab_size": 100, "n_embd": 64, "n_layer": 2, "n_head": 4}
    config["n_positions"] = 64
    short, long = (
        profile_from_config(
            config, samples=1, sequence_length=length, name="a", on_processor=on_processor
        )
        for length in (16, 32)
    )
    assert at_length(short, 32) == long


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


def test_a_profile_saves_its_config_in_its_file() -> None:
    again = ModelProfile.from_json(profile(LLAMA).to_json())
    assert at_length(again, 64) == profile(LLAMA, 64)


def profiled(model: str, tokens: int | None, numerics: tuple[Numerics, ...] = ()) -> ModelProfile:
    return profile_model(model, samples=1, sequence_length=tokens, numerics=numerics)


class TestFactories:
    """Against captures of the same module with a sample of that length, made by hand."""

    @pytest.mark.parametrize("name", ["alone", "with_sample"])
    def test_another_length_equals_a_capture_at_that_length(self, name: str) -> None:
        text = f"{FACTORIES}:{name}"
        first = profiled(text, TOKENS if name == "alone" else None)
        ids = torch.zeros(first.samples, 3 * TOKENS, dtype=torch.long)
        expected = capture(Small(), (ids, ids), loss_fn=loss, name=text, on_processor=False)
        longer = at_length(first, 3 * TOKENS)
        assert longer.tokens_per_sample == 3 * TOKENS
        # The head's product: 2 FLOP a weight and token forward, twice that backward.
        head = next(unit for unit in longer.units if unit.name == "head")
        assert head.flop(1) == 3 * 2 * 16 * 100 * 3 * TOKENS
        kinds = {unit.name: unit.costs for unit in longer.units if unit.name != LOSS}
        assert kinds == {unit.name: unit.costs for unit in expected.units if unit.name != LOSS}
        assert at_length(longer, TOKENS) == first

    def test_a_factory_is_not_called_for_every_length(self) -> None:
        first = profiled(f"{FACTORIES}:with_sample", None)
        at_length(first, TOKENS)
        before = len(calls)
        for length in (48, 64, 80):
            at_length(first, length)
        assert len(calls) == before

    def test_a_length_that_the_model_does_not_take_is_refused(self) -> None:
        first = profiled(f"{FACTORIES}:with_positions", None)
        assert at_length(first, POSITIONS).tokens_per_sample == POSITIONS
        with pytest.raises(InputError):
            at_length(first, 2 * POSITIONS)

    def test_a_factory_cannot_be_scaled(self) -> None:
        first = profiled(f"{FACTORIES}:alone", TOKENS)
        with pytest.raises(InputError, match=r"makes .* at one size") as caught:
            scaled(first, 2)
        assert "config.json, which is known at any size" in str(caught.value)

    def test_a_factory_is_saved_in_the_file(self) -> None:
        first = profiled(f"{FACTORIES}:alone", TOKENS)
        again = ModelProfile.from_json(first.to_json())
        assert at_length(again, 48) == at_length(first, 48)


class TestBundled:
    def test_another_length_equals_the_profile_of_the_name_at_that_length(self) -> None:
        both = tuple(Numerics)
        first = profiled("gpt-10m", None, both)
        assert at_length(first, 256) == profiled("gpt-10m", 256, both)

    def test_a_scaled_model_has_the_parameters_of_its_formula(self) -> None:
        shape = SHAPES["gpt-10m"]
        doubled = dataclasses.replace(
            shape,
            num_heads=2 * shape.num_heads,
            num_layers=2 * shape.num_layers,
            width=2 * shape.width,
        )
        larger = scaled(profiled("gpt-10m", None), 2 * shape.num_heads)
        assert larger.parameters == doubled.parameters
        assert at_length(larger, 64).parameters == doubled.parameters


class TestConfigsWithoutAClosedForm:
    """Configs of a type that only transformers builds."""

    CONFIG: ClassVar[dict[str, object]] = {**LLAMA, "model_type": "olmo", "num_hidden_layers": 2}

    def test_configs_are_built_again_at_another_size(self, tmp_path: Path) -> None:
        pytest.importorskip("transformers")
        path = tmp_path / "config.json"
        path.write_text(json.dumps(self.CONFIG))
        first = profiled(str(path), 64)
        again = ModelProfile.from_json(first.to_json())
        assert at_length(again, 128) == profiled(str(path), 128)
        deeper = scaled(again, 16)
        blocks = [unit for unit in deeper.units if unit.is_block]
        assert len(blocks) == 4  # 2 x the heads, and by the same factor the layers
        with pytest.raises(InputError, match="positions of this model go to 4096"):
            at_length(again, 4097)

    def test_without_transformers_the_error_names_the_package(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        pytest.importorskip("transformers")
        path = tmp_path / "config.json"
        path.write_text(json.dumps(self.CONFIG))
        first = profiled(str(path), 64)
        monkeypatch.setitem(sys.modules, "transformers", None)
        with pytest.raises(InputError, match="pip install"):
            at_length(first, 128)
