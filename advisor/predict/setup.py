"""Setup: a row with every blank filled in, so that it can be computed."""

from __future__ import annotations

from dataclasses import dataclass

from profiles.cluster import ClusterProfile
from profiles.convnets.layers import Network


@dataclass(frozen=True, slots=True, kw_only=True)
class Shape:
    """A transformer in numbers. `kind` as the column `arch`.

    Attributes:
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

    @property
    def causal(self) -> bool:
        """Whether a token sees only those before it."""
        return self.kind not in ("bert", "t5")

    @property
    def is_hybrid(self) -> bool:
        return self.mamba_layers > 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Layout:
    """Degrees, batch and schedule. `zero` is 0 to 3; `shard` the ranks of a shard group."""

    dp: int
    tp: int
    pp: int
    cp: int
    ep: int
    zero: int
    shard: int
    microbatch: int
    accumulation: int
    schedule: str
    virtual: int

    @property
    def world(self) -> int:
        return self.dp * self.tp * self.pp * self.cp

    @property
    def global_batch(self) -> int:
        return self.dp * self.microbatch * self.accumulation


@dataclass(frozen=True, slots=True, kw_only=True)
class Software:
    """How the software of a row carries a layout out: one value a fact that memory or time needs.

    Attributes:
        family: "megatron", "megatron-deepspeed", "deepspeed", "fsdp", "torchtitan", "foundry",
            "internevo", "tensorflow" or "ddp"; what the rules of `software` go by.
        year: of the release, with the month as a fraction.
        recompute: "none", "selective" (attention core), "selective-ops" (keep outputs of attention
            and every other matmul, as torchtitan does), "full" (keep each layer's input).
        keeps_gathered: what sequence parallelism gathers for a product is kept for its backward.
        inputs_on_host: with full recompute, those inputs wait in the host's memory.
        sequence_parallel: norms and dropout split over the tp ranks.
        flash: attention keeps no score matrix; `attention_said`: the row says which kernel ran.
        weight_bytes, gradient_bytes, master_bytes, moment_bytes: per parameter, as held between
            steps: the weights computed with, gradients, fp32 masters (0 where the weights are
            fp32), all optimizer moments together.
        reduce_bytes: per parameter, of the gradients that are exchanged.
        fused: elementwise chains run as one kernel and keep only their inputs.
        dropout: masks are kept.
        overlap_reduce, overlap_gather: data-parallel traffic runs beside the computing.
        overlap_tensor: part of tensor-parallel traffic runs beside matrix products.
        overlap_experts: the exchange of tokens with experts runs beside another microbatch.
        captured: CUDA graphs launch a layer but for its experts' part.
        fused_experts: grouped products of experts convert and activate what they compute, and CUDA
            graphs launch whole steps.
        blocking: each kernel is waited for before the next is launched.
        offload: "none", "optimizer" or "optimizer+params".
    """

    family: str
    year: float
    recompute: str
    sequence_parallel: bool
    flash: bool
    weight_bytes: float
    gradient_bytes: float
    master_bytes: float
    moment_bytes: float
    reduce_bytes: float
    fused: bool
    dropout: bool
    overlap_reduce: bool
    overlap_gather: bool
    overlap_tensor: bool
    overlap_experts: bool = False
    compiled: bool = False
    captured: bool = False
    fused_experts: bool = False
    blocking: bool = False
    keeps_gathered: bool = False
    inputs_on_host: bool = False
    attention_said: bool = True
    offload: str = "none"


@dataclass(frozen=True, slots=True, kw_only=True)
class Setup:
    """All that a prediction is computed from.

    Attributes:
        shape: None for networks of convolutions, which have a `network` instead.
        dtype: of the matrix products: "bfloat16", "float16", "float32", "tfloat32",
            "float8_e4m3fn", "float4".
        assumed: what blank cells were taken to be, in words; the prediction's note.
        filled: no batch was said, and it is what fits.
    """

    row_id: str
    shape: Shape | None
    network: Network | None
    cluster: ClusterProfile
    dtype: str
    layout: Layout
    software: Software
    assumed: tuple[str, ...] = ()
    filled: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Refusal:
    """Why a row has no prediction: what, and the rule that it breaks, with its numbers."""

    row_id: str
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Range:
    """A prediction and the range that should hold nine of ten true values."""

    value: float
    low: float
    high: float
