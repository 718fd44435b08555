"""Unmodified transformers models, tiny, with random weights; import it after `importorskip`.

`ARCHITECTURES` has one of each kind, in training mode, deep enough for equal blocks in the middle.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch
import transformers
from torch import nn

from profiles.capture.batch.call import Batch

IDS = torch.arange(2 * 16).reshape(2, 16) % 90 + 3  # none of the special tokens
TOKENS: Batch = {"input_ids": IDS, "labels": IDS}
FEW: Batch = {name: ids[:, :6].clone() for name, ids in TOKENS.items()}
"""For recurrent models: they run position after position."""
PIXELS: Batch = {
    "pixel_values": torch.randn(4, 3, 64, 64, generator=torch.Generator().manual_seed(0)),
    "labels": torch.tensor([1, 2, 0, 3]),
}
SMALL = {
    "vocab_size": 99,
    "hidden_size": 32,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "intermediate_size": 64,
    "bos_token_id": 1,
    "eos_token_id": 2,
}


def gpt2() -> nn.Module:
    config = transformers.GPT2Config(
        vocab_size=99,
        n_embd=32,
        n_layer=3,
        n_head=4,
        n_positions=64,
        bos_token_id=1,
        eos_token_id=2,
    )
    return transformers.GPT2LMHeadModel(config)


def llama() -> nn.Module:
    return transformers.LlamaForCausalLM(transformers.LlamaConfig(**SMALL, num_key_value_heads=2))


def bert() -> nn.Module:
    return transformers.BertForMaskedLM(transformers.BertConfig(**SMALL))


def t5() -> nn.Module:
    config = transformers.T5Config(
        vocab_size=99, d_model=32, d_kv=8, d_ff=64, num_layers=3, num_heads=4,
        decoder_start_token_id=0, pad_token_id=0,
    )  # fmt: skip
    return transformers.T5ForConditionalGeneration(config)


def mixtral() -> nn.Module:
    config = transformers.MixtralConfig(**SMALL, num_key_value_heads=2, num_local_experts=4)
    return transformers.MixtralForCausalLM(config)


def vit() -> nn.Module:
    config = transformers.ViTConfig(
        hidden_size=32, num_hidden_layers=3, num_attention_heads=4, intermediate_size=64,
        image_size=64, patch_size=8, num_labels=5,
    )  # fmt: skip
    return transformers.ViTForImageClassification(config)


def swin() -> nn.Module:
    config = transformers.SwinConfig(
        image_size=64, patch_size=4, embed_dim=16, depths=[2, 2], num_heads=[2, 4], window_size=4,
        num_labels=5,
    )  # fmt: skip
    return transformers.SwinForImageClassification(config)


def resnet() -> nn.Module:
    config = transformers.ResNetConfig(
        embedding_size=16, hidden_sizes=[16, 32, 32, 64], depths=[2, 2, 2, 2], num_labels=5
    )
    return transformers.ResNetForImageClassification(config)


# One of each kind: (model, batch). Four layers at least.

DEEP = {**SMALL, "num_hidden_layers": 4, "pad_token_id": 0}
GROUPED = {**DEEP, "num_key_value_heads": 2}
HEADS_OF_8 = {**GROUPED, "head_dim": 8}
VISION = {
    "hidden_size": 32,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "intermediate_size": 64,
    "image_size": 64,
    "patch_size": 8,
}
SEQ2SEQ = {
    "vocab_size": 99,
    "d_model": 32,
    "encoder_layers": 4,
    "decoder_layers": 4,
    "encoder_attention_heads": 4,
    "decoder_attention_heads": 4,
    "encoder_ffn_dim": 64,
    "decoder_ffn_dim": 64,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "decoder_start_token_id": 2,
}
SEEDED = torch.Generator().manual_seed(1)
SPEECH: Batch = {"input_features": torch.randn(2, 8, 64, generator=SEEDED), "labels": IDS}
WAVES: Batch = {
    "input_values": torch.randn(2, 1600, generator=SEEDED),
    "labels": torch.tensor([0, 1]),
}
SEGMENTS: Batch = {
    "pixel_values": torch.randn(2, 3, 64, 64, generator=SEEDED),
    "labels": torch.zeros(2, 64, 64, dtype=torch.long),
}
PICTURES: Batch = {"pixel_values": torch.randn(2, 3, 64, 64, generator=SEEDED)}
CAPTIONS: Batch = {**PICTURES, **TOKENS}
PAIRS = {**PICTURES, "input_ids": IDS, "return_loss": True}


def _built(name: str, settings: Mapping[str, object], **further: object) -> nn.Module:
    """The class `name` of transformers with the config that belongs to it."""
    kind = getattr(transformers, name)
    model: nn.Module = kind(kind.config_class(**{**settings, **further}))
    return model.train()


def _bart() -> nn.Module:
    return _built("BartForConditionalGeneration", SEQ2SEQ, max_position_embeddings=64)


def _blip() -> nn.Module:
    text = {**DEEP, "encoder_hidden_size": 32, "sep_token_id": 2}
    return _built("BlipForConditionalGeneration", {"text_config": text, "vision_config": VISION})


def _checkpointed() -> nn.Module:
    model = _built("LlamaForCausalLM", GROUPED, use_cache=False)
    model.gradient_checkpointing_enable()  # type: ignore[operator]
    return model


def _clip() -> nn.Module:
    text = {**DEEP, "max_position_embeddings": 64}
    return _built("CLIPModel", {"text_config": text, "vision_config": VISION}, projection_dim=16)


def _deepseek() -> nn.Module:
    return _built(
        "DeepseekV3ForCausalLM", DEEP, num_hidden_layers=5, num_key_value_heads=4,
        moe_intermediate_size=32, n_routed_experts=4, num_experts_per_tok=2, n_group=1,
        topk_group=1, first_k_dense_replace=1, q_lora_rank=16, kv_lora_rank=16, v_head_dim=8,
        qk_rope_head_dim=8, qk_nope_head_dim=8, n_shared_experts=1,
    )  # fmt: skip


def _jamba() -> nn.Module:
    return _built(
        "JambaForCausalLM", GROUPED, num_hidden_layers=8, num_experts=4, attn_layer_period=4,
        attn_layer_offset=2, expert_layer_period=2, expert_layer_offset=1, use_cache=False,
    )  # fmt: skip


def _mamba2() -> nn.Module:
    return _built(
        "Mamba2ForCausalLM",
        {"vocab_size": 99, "hidden_size": 32, "num_hidden_layers": 4, "state_size": 8},
        num_heads=8, head_dim=8, expand=2, n_groups=1, chunk_size=8, use_cache=False,
    )  # fmt: skip


def _segformer() -> nn.Module:
    return _built(
        "SegformerForSemanticSegmentation",
        {"hidden_sizes": [16, 16, 32, 32], "depths": [3, 3, 3, 3], "num_labels": 5},
        num_attention_heads=[1, 1, 2, 2], decoder_hidden_size=16,
    )  # fmt: skip


def _t5() -> nn.Module:
    return _built(
        "T5ForConditionalGeneration",
        {"vocab_size": 99, "d_model": 32, "d_kv": 8, "d_ff": 64, "num_layers": 4, "num_heads": 4},
        decoder_start_token_id=0, pad_token_id=0,
    )  # fmt: skip


def _vit_mae() -> nn.Module:
    return _built(
        "ViTMAEForPreTraining", VISION, decoder_hidden_size=32, decoder_num_hidden_layers=4,
        decoder_num_attention_heads=4, decoder_intermediate_size=64,
    )  # fmt: skip


def _wav2vec2() -> nn.Module:
    return _built(
        "Wav2Vec2ForSequenceClassification", DEEP, conv_dim=[16, 16], conv_stride=[5, 2],
        conv_kernel=[10, 3], num_conv_pos_embeddings=16, num_conv_pos_embedding_groups=4,
        apply_spec_augment=False,
    )  # fmt: skip


def _whisper() -> nn.Module:
    return _built(
        "WhisperForConditionalGeneration", SEQ2SEQ, max_source_positions=32,
        max_target_positions=64, num_mel_bins=8,
    )  # fmt: skip


def _of(name: str, settings: dict[str, object], **further: object) -> Callable[[], nn.Module]:
    return lambda: _built(name, settings, **further)


_EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
_PLAIN = {"vocab_size": 99, "hidden_size": 32}
_GPT2 = {
    "vocab_size": 99,
    "n_embd": 32,
    "n_layer": 4,
    "n_head": 4,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
ARCHITECTURES: dict[str, tuple[Callable[[], nn.Module], Batch]] = {
    "ALBERT": (_of("AlbertForMaskedLM", DEEP, embedding_size=16), TOKENS),
    "BART": (_bart, TOKENS),
    "BERT": (_of("BertForMaskedLM", DEEP), TOKENS),
    "BLIP": (_blip, CAPTIONS),
    "BLOOM": (_of("BloomForCausalLM", {**_PLAIN, "n_layer": 4, "n_head": 4}), TOKENS),
    "CLIP": (_clip, PAIRS),
    "Cohere": (_of("CohereForCausalLM", GROUPED), TOKENS),
    "ConvNeXt": (
        _of(
            "ConvNextForImageClassification",
            {"depths": [4] * 4, "num_labels": 5},
            hidden_sizes=[16, 32, 32, 64],
        ),
        PIXELS,
    ),
    "DeBERTa v2": (
        _of("DebertaV2ForMaskedLM", DEEP, relative_attention=True, pos_att_type=["p2c", "c2p"]),
        TOKENS,
    ),
    "DeepSeek-V3": (_deepseek, TOKENS),
    "DeiT": (_of("DeiTForImageClassification", VISION, num_labels=5), PIXELS),
    "DistilBERT": (
        _of(
            "DistilBertForMaskedLM",
            {"vocab_size": 99, "dim": 32, "n_heads": 4, "hidden_dim": 64},
            n_layers=4,
        ),
        TOKENS,
    ),
    "ELECTRA": (_of("ElectraForMaskedLM", DEEP, embedding_size=16), TOKENS),
    "Falcon": (
        _of("FalconForCausalLM", {**_PLAIN, "num_hidden_layers": 4, "num_attention_heads": 4}),
        TOKENS,
    ),
    "Gemma 2": (_of("Gemma2ForCausalLM", HEADS_OF_8, sliding_window=8), TOKENS),
    "Gemma 3": (_of("Gemma3ForCausalLM", HEADS_OF_8, sliding_window=8), TOKENS),
    "GPT-2": (_of("GPT2LMHeadModel", _GPT2), TOKENS),
    "GPT-2, no cache": (_of("GPT2LMHeadModel", _GPT2, use_cache=False), TOKENS),
    "GPT-NeoX": (_of("GPTNeoXForCausalLM", DEEP), TOKENS),
    "GPT-NeoX, no cache": (_of("GPTNeoXForCausalLM", DEEP, use_cache=False), TOKENS),
    "GPT-OSS": (
        _of("GptOssForCausalLM", HEADS_OF_8, num_local_experts=4, num_experts_per_tok=2),
        TOKENS,
    ),
    "Jamba": (_jamba, FEW),
    "Llama": (_of("LlamaForCausalLM", GROUPED), TOKENS),
    "Llama, no cache": (_of("LlamaForCausalLM", GROUPED, use_cache=False), TOKENS),
    "Llama, checkpointed": (_checkpointed, TOKENS),
    "Mamba": (
        _of(
            "MambaForCausalLM", {**_PLAIN, "num_hidden_layers": 4, "state_size": 8}, use_cache=False
        ),
        FEW,
    ),
    "Mamba 2": (_mamba2, TOKENS),
    "Mistral": (_of("MistralForCausalLM", GROUPED, sliding_window=8), TOKENS),
    "Mistral, no cache": (
        _of("MistralForCausalLM", GROUPED, sliding_window=8, use_cache=False),
        TOKENS,
    ),
    "Mistral, no cache, wide window": (
        _of("MistralForCausalLM", GROUPED, sliding_window=17, use_cache=False),
        TOKENS,
    ),
    "Mixtral": (_of("MixtralForCausalLM", GROUPED, num_local_experts=4), TOKENS),
    "Mixtral, router loss": (
        _of("MixtralForCausalLM", GROUPED, num_local_experts=4, output_router_logits=True),
        TOKENS,
    ),
    "MPT": (
        _of(
            "MptForCausalLM",
            {"vocab_size": 99, "d_model": 32, "n_layers": 4, "n_heads": 4},
            max_seq_len=64,
        ),
        TOKENS,
    ),
    "OLMo 2": (_of("Olmo2ForCausalLM", GROUPED), TOKENS),
    "OPT": (
        _of(
            "OPTForCausalLM",
            {**_PLAIN, "num_hidden_layers": 4, "num_attention_heads": 4},
            ffn_dim=64,
            word_embed_proj_dim=32,
            max_position_embeddings=64,
        ),
        TOKENS,
    ),
    "Phi 3": (_of("Phi3ForCausalLM", GROUPED), TOKENS),
    "Qwen 3": (_of("Qwen3ForCausalLM", HEADS_OF_8), TOKENS),
    "Qwen 3 MoE": (_of("Qwen3MoeForCausalLM", HEADS_OF_8, **_EXPERTS), TOKENS),
    "Qwen 3 MoE, no cache": (
        _of("Qwen3MoeForCausalLM", HEADS_OF_8, **_EXPERTS, use_cache=False),
        TOKENS,
    ),
    "ResNet": (
        _of(
            "ResNetForImageClassification",
            {"embedding_size": 16, "depths": [4] * 4},
            hidden_sizes=[16, 32, 32, 64],
            num_labels=5,
        ),
        PIXELS,
    ),
    "RoBERTa": (_of("RobertaForMaskedLM", DEEP), TOKENS),
    "RWKV": (
        _of(
            "RwkvForCausalLM",
            {**_PLAIN, "num_hidden_layers": 4, "intermediate_size": 64},
            attention_hidden_size=32,
            use_cache=False,
        ),
        FEW,
    ),
    "SegFormer": (_segformer, SEGMENTS),
    "StableLM": (_of("StableLmForCausalLM", GROUPED), TOKENS),
    "Swin": (
        _of(
            "SwinForImageClassification",
            {"image_size": 64, "embed_dim": 16, "depths": [4, 4]},
            num_heads=[2, 4],
            window_size=4,
            num_labels=5,
        ),
        PIXELS,
    ),
    "T5": (_t5, TOKENS),
    "ViT": (_of("ViTForImageClassification", VISION, num_labels=5), PIXELS),
    "ViT MAE": (_vit_mae, PICTURES),
    "wav2vec 2.0": (_wav2vec2, WAVES),
    "Whisper": (_whisper, SPEECH),
}
