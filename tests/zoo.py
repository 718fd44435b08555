"""Unmodified transformers models, tiny, with random weights; import it after `importorskip`."""

from __future__ import annotations

import torch
import transformers
from torch import nn

from profiles.batch import Batch

IDS = torch.arange(2 * 16).reshape(2, 16) % 90 + 3  # none of the special tokens
TOKENS: Batch = {"input_ids": IDS, "labels": IDS}
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
