"""Small configs of every family with a closed form, and one of full size."""

from __future__ import annotations

Config = dict[str, object]

TOKENS = 24


DECODER: Config = {
    "vocab_size": 100,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "max_position_embeddings": 64,
    "pad_token_id": 0,
    "bos_token_id": 0,
    "eos_token_id": 0,
}
GROUPED = {**DECODER, "num_key_value_heads": 2}
GPT2: Config = {
    "model_type": "gpt2",
    "vocab_size": 100,
    "n_embd": 32,
    "n_layer": 3,
    "n_head": 4,
    "n_positions": 64,
    "bos_token_id": 0,
    "eos_token_id": 0,
}
OPT: Config = {**DECODER, "model_type": "opt", "ffn_dim": 48}
BERT: Config = {**DECODER, "model_type": "bert", "architectures": ["BertForMaskedLM"]}
T5: Config = {
    "model_type": "t5",
    "architectures": ["T5ForConditionalGeneration"],
    "vocab_size": 100,
    "d_model": 32,
    "d_ff": 48,
    "d_kv": 12,  # heads need not add up to the width
    "num_layers": 3,
    "num_heads": 4,
    "decoder_start_token_id": 0,
}
VIT: Config = {
    "model_type": "vit",
    "architectures": ["ViTForImageClassification"],
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "image_size": 32,
    "patch_size": 8,
}
MIXTRAL: Config = {**GROUPED, "model_type": "mixtral", "num_local_experts": 4}
QWEN3_MOE: Config = {
    **GROUPED,
    "model_type": "qwen3_moe",
    "head_dim": 8,
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 24,
}
DEEPSEEK_V3: Config = {
    **DECODER,
    "model_type": "deepseek_v3",
    "num_hidden_layers": 5,
    "num_key_value_heads": 4,
    "first_k_dense_replace": 2,
    "n_routed_experts": 8,
    "n_shared_experts": 1,
    "n_group": 4,
    "topk_group": 2,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 24,
    "q_lora_rank": 20,
    "kv_lora_rank": 12,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 16,
    "v_head_dim": 16,
}
DISTILBERT: Config = {
    "model_type": "distilbert",
    "architectures": ["DistilBertForMaskedLM"],
    "vocab_size": 100,
    "dim": 32,
    "hidden_dim": 48,
    "n_layers": 3,
    "n_heads": 4,
    "max_position_embeddings": 64,
}
NO_DROPOUT = {"attn_pdrop": 0.0, "resid_pdrop": 0.0, "embd_pdrop": 0.0}

CONFIGS: dict[str, Config] = {
    "llama": {**GROUPED, "model_type": "llama"},
    "llama, deeper": {**GROUPED, "model_type": "llama", "num_hidden_layers": 5},
    "llama, tied, with biases and dropout": {
        **DECODER,
        "model_type": "llama",
        "tie_word_embeddings": True,
        "attention_bias": True,
        "mlp_bias": True,
        "attention_dropout": 0.1,
    },
    "llama, grouped, with dropout": {
        **GROUPED,
        "model_type": "llama",
        "attention_dropout": 0.1,
    },
    "mistral": {**GROUPED, "model_type": "mistral"},
    "mistral without a window": {**GROUPED, "model_type": "mistral", "sliding_window": None},
    "mistral, a window shorter than the sequence": {
        **GROUPED,
        "model_type": "mistral",
        "sliding_window": TOKENS - 1,
    },
    "mistral, a window as long as the sequence": {
        **GROUPED,
        "model_type": "mistral",
        "sliding_window": TOKENS,
        "attention_dropout": 0.1,
    },
    "mistral, a window longer than the sequence": {
        **GROUPED,
        "model_type": "mistral",
        "sliding_window": TOKENS + 1,
    },
    "qwen2, windows from a layer on": {
        **GROUPED,
        "model_type": "qwen2",
        "num_hidden_layers": 6,
        "use_sliding_window": True,
        "sliding_window": 8,
        "max_window_layers": 3,
    },
    "qwen2, windows that bound nothing": {
        **GROUPED,
        "model_type": "qwen2",
        "use_sliding_window": True,
        "max_window_layers": 1,
    },
    "qwen3": {**GROUPED, "model_type": "qwen3", "head_dim": 16},
    "qwen3, a window in one layer": {
        **GROUPED,
        "model_type": "qwen3",
        "use_sliding_window": True,
        "sliding_window": 8,
        "layer_types": ["full_attention", "sliding_attention", "full_attention"],
    },
    "gemma": {**GROUPED, "model_type": "gemma", "head_dim": 16},
    "gemma, heads too wide to be shared": {**GROUPED, "model_type": "gemma", "head_dim": 258},
    "phi3": {**GROUPED, "model_type": "phi3"},
    "phi3, a window": {**GROUPED, "model_type": "phi3", "sliding_window": 8},
    "phi3, part of a head turned": {
        **GROUPED,
        "model_type": "phi3",
        "partial_rotary_factor": 0.5,
        "resid_pdrop": 0.1,
    },
    "gpt2": GPT2,
    "gpt2 without dropout": {
        **GPT2,
        **NO_DROPOUT,
        "n_inner": 80,
        "activation_function": "relu",
        "tie_word_embeddings": False,
    },
    "gpt_neox": {**DECODER, "model_type": "gpt_neox"},
    "gpt_neox, one after the other": {
        **DECODER,
        "model_type": "gpt_neox",
        "use_parallel_residual": False,
        "attention_bias": False,
        "hidden_dropout": 0.1,
        "rotary_pct": 0.5,
    },
    "opt": OPT,
    "opt, norms after": {
        **OPT,
        "word_embed_proj_dim": 16,
        "do_layer_norm_before": False,
        "attention_dropout": 0.1,
    },
    "bert": BERT,
    "bert, untied and without dropout": {
        **BERT,
        "hidden_dropout_prob": 0.0,
        "attention_probs_dropout_prob": 0.0,
        "hidden_act": "gelu_new",
        "tie_word_embeddings": False,
    },
    "roberta": {**BERT, "model_type": "roberta", "architectures": ["RobertaForMaskedLM"]},
    "distilbert": DISTILBERT,
    "t5": T5,
    "t5, deeper": {**T5, "num_layers": 6, "num_decoder_layers": 5},
    "t5 v1.1": {
        **T5,
        "num_decoder_layers": 2,
        "feed_forward_proj": "gated-gelu",
        "dropout_rate": 0.0,
        "tie_word_embeddings": False,
    },
    "vit": VIT,
    "vit with dropout": {
        **VIT,
        "hidden_dropout_prob": 0.1,
        "attention_probs_dropout_prob": 0.1,
        "qkv_bias": False,
        "id2label": {str(label): str(label) for label in range(5)},
    },
    "mixtral": MIXTRAL,
    "mixtral, three experts a token": {**MIXTRAL, "num_experts_per_tok": 3},
    "qwen3_moe, every other layer": {**QWEN3_MOE, "decoder_sparse_step": 2},
    "qwen3_moe": {**QWEN3_MOE, "norm_topk_prob": True},
    "deepseek_v3": DEEPSEEK_V3,
    "deepseek_v3, heads as wide as values": {**DEEPSEEK_V3, "v_head_dim": 24},
    "deepseek_v3, queries not compressed": {
        **DEEPSEEK_V3,
        "q_lora_rank": None,
        "rope_interleave": False,
        "norm_topk_prob": False,
        "attention_bias": True,
        "attention_dropout": 0.1,
        "n_shared_experts": 2,
    },
}


def tokens_of(config: Config) -> int | None:
    return None if config["model_type"] == "vit" else TOKENS


LLAMA_3_8B: Config = {
    "model_type": "llama",
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": 128_256,
    "hidden_size": 4096,
    "intermediate_size": 14_336,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "max_position_embeddings": 8192,
    "rope_theta": 500_000.0,
    "torch_dtype": "bfloat16",
}
