"""Configs that have no closed form, or that cannot be: refused by name."""

from __future__ import annotations

import pytest

from profiles.closed_forms.families import family_of, profile_from_config
from profiles.errors import FileError, InputError, UnknownNameError
from profiles.model.profile import ModelProfile
from tests.profiles.closed_forms.family_configs import CONFIGS, VIT

LLAMA = CONFIGS["llama"]


class TestRefusals:
    def profile(self, tokens: int | None = 8, /, **changes: object) -> ModelProfile:
        config = {name: value for name, value in {**LLAMA, **changes}.items() if value != ...}
        return profile_from_config(
            config, samples=1, sequence_length=tokens, name="x", where="conf/config.json"
        )

    def test_all_missing_sizes_are_named_with_the_file(self) -> None:
        with pytest.raises(FileError, match="`vocab_size`, `hidden_size` are missing") as caught:
            self.profile(vocab_size=..., hidden_size=...)
        assert caught.value.where == "conf/config.json"

    def test_an_unknown_family_gets_the_near_miss(self) -> None:
        with pytest.raises(UnknownNameError, match="did you mean `llama`") as caught:
            self.profile(model_type="lama")
        assert "pip install 'parallel-advisor[hf]'" in str(caught.value)

    def test_a_family_that_is_not_near_any_gets_the_list(self) -> None:
        with pytest.raises(UnknownNameError, match="known: bert, deepseek_v3, distilbert, gemma, "):
            self.profile(model_type="zzz")

    def test_a_config_without_a_family_is_refused(self) -> None:
        with pytest.raises(FileError, match="`model_type` is missing"):
            self.profile(model_type=...)

    @pytest.mark.parametrize(
        ("field", "value", "said"),
        [
            ("hidden_act", "gelu_neww", "did you mean `gelu_new`"),
            ("architectures", ["LlamaForSequenceClassification"], "known: LlamaForCausalLM"),
            ("architectures", "LlamaForCausalLM", "a list of words is wanted"),
            ("quantization_config", {"bits": 4}, "leave it out to plan"),
            ("chunk_size_feed_forward", 64, "no closed form here"),
            ("attn_implementation", "eager", "no closed form here"),
            ("hidden_size", "32", "a whole number from 1 is wanted"),
            ("hidden_size", 0, "a whole number from 1 is wanted"),
            ("hidden_size", True, "a whole number from 1 is wanted"),
            ("num_attention_heads", 3, "does not divide `hidden_size` = 32"),
            ("num_key_value_heads", 3, "a divisor of 4 is wanted"),
            ("attention_dropout", 1.5, "a number from 0 to 1 is wanted"),
            ("tie_word_embeddings", "yes", "true or false is wanted"),
        ],
    )
    def test_a_field_that_is_not_understood_is_named(
        self, field: str, value: object, said: str
    ) -> None:
        with pytest.raises(InputError) as caught:
            self.profile(**{field: value})
        assert said in str(caught.value)
        assert field in str(caught.value)
        assert str(caught.value.where).startswith("conf/config.json")

    def test_heads_need_not_divide_the_width_where_they_have_one_of_their_own(self) -> None:
        """transformers' Llama wants it all the same."""
        three = {"num_attention_heads": 3, "num_key_value_heads": 3, "head_dim": 8}
        with pytest.raises(InputError, match="does not divide `hidden_size` = 32"):
            self.profile(**three)
        assert self.profile(model_type="qwen3", **three).parameters > 0

    @pytest.mark.parametrize(
        ("name", "field", "value"),
        [
            ("mixtral", "router_jitter_noise", 0.1),
            ("mixtral", "output_router_logits", True),
            ("opt", "layerdrop", 0.1),
            ("bert", "is_decoder", True),
            ("gpt2", "add_cross_attention", True),
            ("distilbert", "sinusoidal_pos_embds", True),
            ("gemma", "use_bidirectional_attention", True),
        ],
    )
    def test_fields_that_change_a_familys_forward_are_refused(
        self, name: str, field: str, value: object
    ) -> None:
        with pytest.raises(InputError, match="no closed form here"):
            family_of({**CONFIGS[name], field: value})

    def test_windows_without_a_width_are_refused_as_transformers_does(self) -> None:
        types = ["full_attention", "full_attention", "sliding_attention"]
        config = {**CONFIGS["qwen3"], "layer_types": types, "sliding_window": 8}
        with pytest.raises(InputError, match="`use_sliding_window`, `sliding_window` are wanted"):
            family_of(config)

    @pytest.mark.parametrize(
        ("field", "value", "said"),
        [
            ("kv_lora_rank", None, "`kv_lora_rank` is missing"),
            ("num_key_value_heads", 2, "4, one for each head, is wanted"),
            ("n_group", 3, "`n_group` = 3 does not divide `n_routed_experts` = 8"),
        ],
    )
    def test_latent_attention_and_groups_of_experts_have_to_add_up(
        self, field: str, value: object, said: str
    ) -> None:
        with pytest.raises(InputError, match=said):
            family_of({**CONFIGS["deepseek_v3"], field: value})

    def test_one_class_is_a_regression_and_refused(self) -> None:
        with pytest.raises(InputError, match="`num_labels` = 1: two or more are wanted"):
            family_of({**VIT, "num_labels": 1})

    def test_fields_that_change_nothing_are_taken(self) -> None:
        plain = self.profile()
        changed = self.profile(
            torch_dtype="bfloat16",
            rope_scaling={"rope_type": "llama3", "factor": 8.0},
            initializer_range=0.1,
            transformers_version="4.40.0",
        )
        assert changed.model_copy(update={"config": plain.config}) == plain

    def test_more_tokens_than_positions_are_refused(self) -> None:
        with pytest.raises(InputError, match="the positions of this model go to 64"):
            self.profile(65)

    def test_tokens_and_images_are_told_apart(self) -> None:
        with pytest.raises(InputError, match="takes tokens"):
            self.profile(None)
        with pytest.raises(InputError, match="takes images"):
            profile_from_config(VIT, samples=1, sequence_length=8, name="x")
