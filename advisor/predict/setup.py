"""Setup: a row with all blanks resolved."""

from __future__ import annotations

from dataclasses import dataclass

from profiles.closed_forms.convnets.layers import Convnet
from profiles.closed_forms.transformer import TransformerShape
from profiles.machine.cluster import ClusterProfile
from profiles.workload.stack import Stack


@dataclass(frozen=True, slots=True, kw_only=True)
class ParallelLayout:
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
    """Software of a row: a stack, and its options.

    Attributes:
        family: "megatron", "megatron-deepspeed", "deepspeed", "fsdp", "torchtitan", "foundry",
            "internevo", "nanotron", "tensorflow" or "ddp"; the key of `software.PRESETS`.
        year: of the release, with the month as a fraction.
        recompute: "none", "selective" or "full".
        offload: "none", "optimizer" or "optimizer+params".
    """

    family: str
    year: float
    stack: Stack
    recompute: str
    offload: str = "none"


@dataclass(frozen=True, slots=True, kw_only=True)
class Setup:
    """All inputs of a prediction.

    Attributes:
        shape: None for networks of convolutions, which have a `network` instead.
        dtype: of the matrix products: "bfloat16", "float16", "float32", "tfloat32",
            "float8_e4m3fn", "float4".
        assumed: values assumed for blank cells; the prediction's note.
        optimizer: a name of `profiles.workload.optimizers`.
        filled: no batch is given, so the largest that fits is used.
    """

    row_id: str
    shape: TransformerShape | None
    network: Convnet | None
    cluster: ClusterProfile
    dtype: str
    layout: ParallelLayout
    software: Software
    optimizer: str = "adamw"
    assumed: tuple[str, ...] = ()
    filled: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Refusal:
    """Reason why a row has no prediction: the violated rule, with its numbers."""

    row_id: str
    reason: str
