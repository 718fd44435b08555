"""Settings of a plan: the mesh axes and the choices. No torch here."""

from __future__ import annotations

from enum import StrEnum
from typing import Annotated, Any

from pydantic import BeforeValidator, PlainSerializer

AXES = ("pp", "dp_replicate", "dp_shard", "cp", "tp")
"""Mesh axes from the slowest links to the fastest; ep lies inside the data axes."""
MODEL_AXES = ("pp", "tp", "cp", "ep")
"""Those along which a rank has a part of a replica, or of its work."""


class DataParallel(StrEnum):
    """The state that data-parallel ranks shard besides the batch."""

    NONE = "none"  # one replica
    THREADS = "threads"  # one process drives several devices (nn.DataParallel)
    REPLICATE = "replicate"  # DDP: everything whole on every rank
    ZERO1 = "zero1"  # optimizer states sharded; gradients whole until the step
    ZERO2 = "zero2"  # + gradients, reduce-scattered after every microbatch
    FULL_SHARD = "full_shard"  # + parameters, gathered unit by unit (ZeRO-3, FSDP)
    HYBRID_SHARD = "hybrid_shard"  # full_shard inside a group, replicas of the group (HSDP)

    @property
    def is_sharded(self) -> bool:
        """True if the engine is FSDP2: parameters are shards between steps."""
        return self in _SHARDED


_SHARDED = (
    DataParallel.ZERO1,
    DataParallel.ZERO2,
    DataParallel.FULL_SHARD,
    DataParallel.HYBRID_SHARD,
)


class Schedule(StrEnum):
    """Order of forwards and backwards in a pipeline."""

    NAIVE = "naive"  # one microbatch: the stages take turns
    GPIPE = "gpipe"  # all forwards, then all backwards
    ONE_F_ONE_B = "1f1b"
    INTERLEAVED = "interleaved"
    ZERO_BUBBLE = "zero_bubble"
    ZBV = "zbv"


class Recompute(StrEnum):
    """Activation checkpointing: the activations that the backward pass computes again."""

    NONE = "none"
    SELECTIVE = "selective"  # keep outputs of matmuls, convolutions and attention of every block
    FULL = "full"  # keep only the input of every block


class Precision(StrEnum):
    """The dtype of forward and backward.

    A model built in that dtype runs as it is. An fp32 model under `BF16` and `FP16` keeps fp32
    parameters, gradients and optimizer states (the masters) and computes in 16 bits; under `FP16`
    with a loss scale. `FP8` is `BF16` but for products of linear layers in blocks: torchao casts
    both factors to 8 bits, with one scale a tensor, and the gradients of the backward too
    (arXiv:2209.05433). CPUs emulate it, which takes longer.
    """

    FP32 = "fp32"
    BF16 = "bf16"
    FP16 = "fp16"
    FP64 = "fp64"
    FP8 = "fp8"

    @property
    def dtype(self) -> str:
        """torch's name of the dtype; under `FP8` that of all but the products of linear layers."""
        return _DTYPES[self.value]

    @property
    def product_dtype(self) -> str:
        """torch's name of the dtype that linear layers in blocks multiply in."""
        return "float8_e4m3fn" if self is Precision.FP8 else self.dtype


_DTYPES = {
    "fp32": "float32",
    "bf16": "bfloat16",
    "fp16": "float16",
    "fp64": "float64",
    "fp8": "bfloat16",
}


class Aggregation(StrEnum):
    """Gradient sums of DDP over replicas; messages: `engines.optional.aggregation.rounds`."""

    BACKEND = "backend"  # one all-reduce of NCCL or gloo
    GATHER = "gather"  # all to one parameter device, and back
    GATHER_PARTS = "gather_parts"  # the same with every rank the parameter device of a part
    REDUCE_BROADCAST = "reduce_broadcast"  # halving the ranks that still have something to send
    ALL_TO_ALL = "all_to_all"  # everyone sends everything to everyone
    RING = "ring"  # reduce-scatter, then all-gather, between neighbours
    TREE = "tree"  # two binary trees, half of the gradients up and down each, in pieces
    HIERARCHICAL = "hierarchical"  # rings inside nodes, then between, then inside again


class Compression(StrEnum):
    """Gradient compression of DDP."""

    NONE = "none"
    BF16 = "bf16"  # rounded to 8 significant bits, and summed up so: 2^-8 of a value each time
    POWERSGD = "powersgd"  # factors of low rank; their error is added to the next gradient


class Updates(StrEnum):
    """The update rule: when parameters are updated, and by whose gradients.

    With `servers` the first ranks hold the parameters and step them, the others are workers.
    Without, each rank is a replica.
    """

    SYNCHRONOUS = "synchronous"  # every step, by the mean of all replicas' gradients
    ASYNCHRONOUS = "asynchronous"  # servers step by each worker's gradient as it comes
    LOCAL = "local"  # each replica by its own; every `sync_every` steps parameters are averaged
    DILOCO = "diloco"  # the same, with their change as the gradient of an outer optimizer

    @property
    def is_periodic(self) -> bool:
        """True if replicas step alone, and average every `sync_every` steps."""
        return self in (Updates.LOCAL, Updates.DILOCO)


CHUNK_BYTES = 32 * 2**20
"""Parameters whose states are on the device together: enough to fill its copies and kernels, and
little against a model's states."""


class Offload(StrEnum):
    """The tensors that wait outside the device between uses."""

    NONE = "none"
    STATES = "states"  # parameter shards, gradient shards and optimizer states; the step runs there
    OPTIMIZER = "optimizer"  # optimizer states; the step has a few parameters' on the device
    ACTIVATIONS = "activations"  # tensors that a block saves for its backward
    STATES_ACTIVATIONS = "states,activations"
    OPTIMIZER_ACTIVATIONS = "optimizer,activations"

    @property
    def states(self) -> bool:
        """True if FSDP2 keeps all states of its shards in main memory."""
        return "states" in self.value.split(",")

    @property
    def optimizer(self) -> bool:
        """True if optimizer states alone leave the device."""
        return "optimizer" in self.value.split(",")

    @property
    def activations(self) -> bool:
        """True if activations of blocks leave the device until their backward."""
        return "activations" in self.value.split(",")


class OffloadTo(StrEnum):
    """The place where offloaded tensors wait."""

    HOST = "host"  # main memory, page-locked for an accelerator
    DISK = "disk"  # files of a folder that the user names, mapped into memory


def _pairs(styles: Any) -> Any:
    """Pairs from a mapping; several styles of a pattern stand in one text.

    >>> _pairs({"a": "column joined"})
    (('a', 'column'), ('a', 'joined'))
    """
    if not isinstance(styles, dict):
        return styles
    return tuple(
        (pattern, style)
        for pattern, text in styles.items()
        for style in (text.split() if isinstance(text, str) else [text])
    )


def _map(pairs: tuple[tuple[str, str], ...]) -> dict[str, str]:
    """The reverse of `_pairs`."""
    styles: dict[str, list[str]] = {}
    for pattern, style in pairs:
        styles.setdefault(pattern, []).append(style)
    return {pattern: " ".join(each) for pattern, each in styles.items()}


TensorStyles = Annotated[
    tuple[tuple[str, str], ...], BeforeValidator(_pairs), PlainSerializer(_map)
]
"""(module pattern, style) pairs of tensor parallelism; a mapping in files."""


def format_setting(value: Any) -> str:
    """A setting's value as `PartialPlan.parse` reads it."""
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, tuple):
        return ",".join(item if isinstance(item, str) else ":".join(item) for item in value)
    return str(value)
