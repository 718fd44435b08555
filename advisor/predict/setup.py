"""Setup: a row with every blank filled in, so that it can be computed."""

from __future__ import annotations

from dataclasses import dataclass

from profiles.cluster import ClusterProfile


@dataclass(frozen=True, slots=True, kw_only=True)
class Shape:
    """A transformer in numbers. `kind` as the column `arch`.

    Attributes:
        kv_heads: heads of keys and values; `heads` where all have their own.
        ffn: inner width of a dense layer; `gated` doubles the first of its matrices.
        experts, topk, expert_ffn: 0 where there are none.
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
    experts: int = 0
    topk: int = 0
    expert_ffn: int = 0


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
        recompute: "none", "selective" (attention core), "selective-ops" (keep matmuls' outputs, as
            torch's selective checkpointing does), "full" (keep each layer's input).
        sequence_parallel: norms and dropout split over the tp ranks.
        flash: attention keeps no score matrix.
        weight_bytes, gradient_bytes, master_bytes, moment_bytes: per parameter, as held between
            steps: the weights computed with, gradients, fp32 masters (0 where the weights are
            fp32), all optimizer moments together.
        fused: elementwise chains run as one kernel and keep only their inputs.
        dropout: masks are kept.
        overlap_reduce, overlap_gather: data-parallel traffic runs beside the computing.
        overlap_tensor: part of tensor-parallel traffic runs beside matrix products.
    """

    name: str
    recompute: str
    sequence_parallel: bool
    flash: bool
    weight_bytes: float
    gradient_bytes: float
    master_bytes: float
    moment_bytes: float
    fused: bool
    dropout: bool
    overlap_reduce: bool
    overlap_gather: bool
    overlap_tensor: bool
    compiled: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Setup:
    """All that a prediction is computed from.

    Attributes:
        shape: None for networks of convolutions, which go by `network`.
        network: "resnet50" ...; with `pixels` the side of a square image.
        dtype: of the matrix products: "bfloat16", "float16", "float32", "tfloat32",
            "float8_e4m3fn", "float4".
        assumed: what blank cells were taken to be, in words; the prediction's note.
    """

    row_id: str
    shape: Shape | None
    network: str | None
    pixels: int | None
    cluster: ClusterProfile
    dtype: str
    layout: Layout
    software: Software
    assumed: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Range:
    """A prediction and the range that should hold nine of ten true values."""

    value: float
    low: float
    high: float
