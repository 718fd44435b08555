"""A transformer in numbers: what a closed form needs to know of it."""

from __future__ import annotations

from profiles.record import Record

# Latents of multi-head latent attention: queries, keys and values, and the rotary part of a head
# (DeepSeek-V3, config.json).
QUERY_LATENT, KEY_LATENT, ROTARY = 1536, 512, 64
# Mamba-2: B and C of 8 groups of 128 states (nemotron-3 configurations).
STATE = 128
MAMBA_STATES = 2 * 8 * STATE
# A T5's decoder sees a quarter of the encoder's tokens: 128 of 512 (Megatron-LM and NeMo T5 runs).
DECODER_SHARE = 4


class TransformerShape(Record):
    """Sizes of a decoder, an encoder, or both.

    Attributes:
        kind: dense_gpt (learned positions, GELU), llama (RMSNorm, gated, rotary), moe,
            hybrid_mamba_moe, bert, t5, transformer_xl.
        layers: of a t5, those of the encoder; its decoder has as many.
        head_width: of queries, keys and values; `heads * head_width` may differ from `hidden`.
        kv_heads: heads of keys and values; `heads` where all have their own.
        ffn: inner width of a dense layer; `gated` doubles the first of its matrices.
        experts, topk, expert_ffn: 0 where there are none.
        shared_ffn: inner width of what every token passes beside its experts; 0: nothing.
        dense_layers: layers without experts in a model that has them.
        latent: queries, keys and values come out of narrow latents (DeepSeek's MLA).
        attention_layers, mamba_layers: of a hybrid, whose layers hold one thing each; what is left
            of `layers` holds the experts. 0 and 0 elsewhere.
        mamba_width: inner width of a state-space layer.
        expert_width: what experts take in where it is not `hidden` (latent experts); 0: `hidden`.
        tied: whether the head uses the embedding's matrix.
        length: tokens of a sample.
        dropout: of activations and attention.
    """

    kind: str
    layers: int
    hidden: int
    heads: int
    kv_heads: int
    ffn: int
    vocab: int
    length: int
    gated: bool
    tied: bool
    head_width: int
    experts: int = 0
    topk: int = 0
    expert_ffn: int = 0
    shared_ffn: int = 0
    dense_layers: int = 0
    latent: bool = False
    attention_layers: int = 0
    mamba_layers: int = 0
    mamba_width: int = 0
    expert_width: int = 0
    dropout: bool = False

    @property
    def causal(self) -> bool:
        """True if a token sees only those before it."""
        return self.kind not in ("bert", "t5")

    @property
    def is_hybrid(self) -> bool:
        return self.mamba_layers > 0

    @property
    def is_rotary(self) -> bool:
        return self.kind not in ("dense_gpt", "bert", "t5", "transformer_xl")

    @property
    def depth(self) -> int:
        """Blocks in all: an encoder-decoder has two stacks."""
        return self.layers * (2 if self.kind == "t5" else 1)
