"""Twenty models that most people know, as their config.json files say them, with a job for each."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

Config = Mapping[str, object]


def _decoder(
    width: int,
    wide: int,
    layers: int,
    heads: int,
    kv_heads: int,
    *,
    words: int,
    longest: int,
    kind: str = "llama",
    **more: object,
) -> Config:
    return {
        "model_type": kind,
        "hidden_size": width,
        "intermediate_size": wide,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "vocab_size": words,
        "max_position_embeddings": longest,
        **more,
    }


# Llama 3 (arXiv:2407.21783, table 3).
LLAMA_8B = _decoder(4096, 14336, 32, 32, 8, words=128256, longest=8192)
LLAMA_70B = _decoder(8192, 28672, 80, 64, 8, words=128256, longest=8192)
LLAMA_405B = _decoder(16384, 53248, 126, 128, 8, words=128256, longest=8192)
# arXiv:2401.04088, table 1.
MIXTRAL = _decoder(
    4096,
    14336,
    32,
    32,
    8,
    words=32000,
    longest=32768,
    kind="mixtral",
    num_local_experts=8,
    num_experts_per_tok=2,
)
# arXiv:2412.19437, section 4.2.
DEEPSEEK_V3 = _decoder(
    7168,
    18432,
    61,
    128,
    128,
    words=129280,
    longest=163840,
    kind="deepseek_v3",
    moe_intermediate_size=2048,
    first_k_dense_replace=3,
    q_lora_rank=1536,
    kv_lora_rank=512,
    qk_nope_head_dim=128,
    qk_rope_head_dim=64,
    v_head_dim=128,
    n_routed_experts=256,
    n_shared_experts=1,
    num_experts_per_tok=8,
    n_group=8,
    topk_group=4,
)


@dataclass(frozen=True, slots=True)
class Known:
    """A config, and the words of `advise` for a job that has been or could be run.

    Attributes:
        cluster: by name.
        batch: samples of a step.
        tokens: of a sample; None where it is an image.
    """

    name: str
    config: Config
    cluster: str
    batch: int
    tokens: int | None

    @property
    def options(self) -> str:
        length = "" if self.tokens is None else f" --seq {self.tokens}"
        return f"--cluster {self.cluster} --global-batch {self.batch}{length} --precision bf16"


_NODE, _EIGHT, _MANY = (f"{nodes}x8xH100-SXM-80GB" for nodes in (1, 8, 128))

KNOWN = (
    Known(
        "BERT-large",
        {
            "model_type": "bert",
            "architectures": ["BertForMaskedLM"],
            "hidden_size": 1024,
            "intermediate_size": 4096,
            "num_hidden_layers": 24,
            "num_attention_heads": 16,
            "vocab_size": 30522,
            "max_position_embeddings": 512,
        },
        _NODE,
        256,
        512,
    ),
    Known(
        "ViT-H/14",
        {
            "model_type": "vit",
            "architectures": ["ViTForImageClassification"],
            "hidden_size": 1280,
            "intermediate_size": 5120,
            "num_hidden_layers": 32,
            "num_attention_heads": 16,
            "image_size": 224,
            "patch_size": 14,
            "num_channels": 3,
        },
        _NODE,
        4096,
        None,
    ),
    Known(
        "GPT-2 XL",
        {
            "model_type": "gpt2",
            "n_embd": 1600,
            "n_layer": 48,
            "n_head": 25,
            "n_positions": 1024,
            "vocab_size": 50257,
        },
        _NODE,
        512,
        1024,
    ),
    Known(
        "T5-11B",
        {
            "model_type": "t5",
            "architectures": ["T5ForConditionalGeneration"],
            "d_model": 1024,
            "d_ff": 65536,
            "d_kv": 128,
            "num_heads": 128,
            "num_layers": 24,
            "vocab_size": 32128,
            "decoder_start_token_id": 0,
        },
        _EIGHT,
        2048,
        512,
    ),
    Known(
        "GPT-NeoX-20B",
        {
            "model_type": "gpt_neox",
            "hidden_size": 6144,
            "intermediate_size": 24576,
            "num_hidden_layers": 44,
            "num_attention_heads": 64,
            "vocab_size": 50432,
            "max_position_embeddings": 2048,
        },
        _EIGHT,
        1536,
        2048,
    ),
    Known(
        "OPT-175B",
        {
            "model_type": "opt",
            "hidden_size": 12288,
            "word_embed_proj_dim": 12288,
            "ffn_dim": 49152,
            "num_hidden_layers": 96,
            "num_attention_heads": 96,
            "vocab_size": 50272,
            "max_position_embeddings": 2048,
        },
        _MANY,
        1024,
        2048,
    ),
    Known(
        "BLOOM-176B",
        {
            "model_type": "bloom",
            "hidden_size": 14336,
            "n_layer": 70,
            "n_head": 112,
            "vocab_size": 250880,
        },
        _MANY,
        2048,
        2048,
    ),
    Known(
        "Llama 2 7B",
        _decoder(4096, 11008, 32, 32, 32, words=32000, longest=4096),
        _NODE,
        1024,
        4096,
    ),
    Known(
        "Llama 2 70B",
        _decoder(8192, 28672, 80, 64, 8, words=32000, longest=4096),
        _EIGHT,
        1024,
        4096,
    ),
    Known("Llama 3 8B", LLAMA_8B, _NODE, 512, 8192),
    Known("Llama 3 70B", LLAMA_70B, _EIGHT, 512, 8192),
    Known("Llama 3 405B", LLAMA_405B, _MANY, 2048, 8192),
    Known(
        "Mistral 7B",
        _decoder(4096, 14336, 32, 32, 8, words=32000, longest=32768, kind="mistral"),
        _NODE,
        512,
        8192,
    ),
    Known("Mixtral 8x7B", MIXTRAL, _EIGHT, 1024, 4096),
    Known(
        "Mixtral 8x22B",
        {
            **MIXTRAL,
            "hidden_size": 6144,
            "intermediate_size": 16384,
            "num_hidden_layers": 56,
            "num_attention_heads": 48,
            "max_position_embeddings": 65536,
        },
        _EIGHT,
        1024,
        4096,
    ),
    Known("DeepSeek-V3", DEEPSEEK_V3, "256x8xH800-SXM-80GB", 15360, 4096),
    Known(
        "Qwen2.5-72B",
        _decoder(8192, 29568, 80, 64, 8, words=152064, longest=32768, kind="qwen2"),
        _EIGHT,
        512,
        8192,
    ),
    Known(
        "Qwen3-32B",
        _decoder(5120, 25600, 64, 64, 8, words=151936, longest=40960, kind="qwen3", head_dim=128),
        _EIGHT,
        512,
        8192,
    ),
    Known(
        "Qwen3-235B-A22B",
        _decoder(
            4096,
            12288,
            94,
            64,
            4,
            words=151936,
            longest=40960,
            kind="qwen3_moe",
            head_dim=128,
            moe_intermediate_size=1536,
            num_experts=128,
            num_experts_per_tok=8,
        ),
        _MANY,
        4096,
        4096,
    ),
    Known(
        "Gemma 7B",
        _decoder(3072, 24576, 28, 16, 16, words=256000, longest=8192, kind="gemma", head_dim=256),
        _NODE,
        512,
        8192,
    ),
)
"""Two kinds have no closed form and are captured (BLOOM, and T5 with transformers at hand)."""
