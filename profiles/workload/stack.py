"""Stack: the software that runs a step. A fact beside model, cluster and workload.

One model on one machine takes half or twice the time and the memory under another program: whether
attention keeps its scores, whether norms are one kernel, how many bytes a gradient has, what runs
beside what. Presets by name are in `profiles/workload/stacks.toml`, each flag with its source.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping
from enum import StrEnum
from importlib import resources
from types import MappingProxyType

from pydantic import Field, NonNegativeFloat, PositiveFloat, PositiveInt

from profiles.errors import UnknownNameError
from profiles.model.work import AttentionKernel, FusibleKind
from profiles.record import Record, toml_table

# torchtune's `LinearCrossEntropyLoss`: `num_output_chunks` = 8 by default.
LOSS_CHUNKS = 8


class States(Record):
    """Bytes of every trainable parameter that stay on the device between steps.

    Attributes:
        weight: what forwards compute with; sharded by ZeRO-3.
        gradient: sums of the microbatches; sharded by ZeRO-2 and ZeRO-3.
        master: fp32 weights that the optimizer steps, beside `weight`; sharded from ZeRO-1 on.
        moments: all of the optimizer together; sharded from ZeRO-1 on. None: as the optimizer says.
    """

    weight: PositiveFloat
    gradient: NonNegativeFloat
    master: NonNegativeFloat
    moments: NonNegativeFloat | None = None


class Selective(StrEnum):
    """Operations that selective recompute runs again."""

    OPERATORS = "operators"  # all but products and attention (torch's policy over operators)
    CORE = "core"  # scores and softmax of attention alone (Megatron-LM, arXiv:2205.05198)


class Loss(StrEnum):
    """Implementation of the cross-entropy of logits over a vocabulary."""

    MATERIALISED = "materialised"  # logits copied to fp32, and their log-softmax kept
    IN_PLACE = "in_place"  # softmax written over an fp32 copy of the logits, which are let go of
    FUSED = "fused"  # one kernel over logits; the gradient is written over them
    CHUNKED = "chunked"  # head and loss together, a part of the tokens at a time, torch's kernels
    HEAD = "head"  # head and loss in one kernel; no logits in memory


class Stack(Record):
    """Everything about the program that time or memory depends on.

    The default is stock torch as `engines` uses it: kernels are those that the model's own modules
    call, states are those of FSDP2 and DistributedDataParallel.

    Attributes:
        name: of the preset, with its version.
        attention: the kernel in place of the one that was captured; None keeps that.
        fused: kinds of elementwise chains that run as one kernel; `compiled` fuses all of them.
        loss: of a language model's head.
        loss_chunks: parts of the tokens that a chunked one takes in turn.
        states: None: fp32 parameters and gradients of FSDP2 or DDP, gathered or cast to the dtype
            of computing for the step.
        reduce_bytes: of a gradient on its way between replicas; None: as it is held.
        fused_optimizer: one kernel for the update, without temporaries.
        cuda_graphs: share of the launches that a replayed graph takes away.
        host_work: of a kernel, over torch's plain modules: functions of autograd in Python, hooks,
            checks and timers around each.
        blocking_launches: every kernel is waited for (CUDA_LAUNCH_BLOCKING=1).
        overlap_gradients, overlap_parameters: data-parallel traffic runs beside computing.
        overlap_tensor: share of tensor-parallel traffic that runs beside products.
        bucket_bytes: of gradients in one message; buffers of it are held where states are the
            stack's own.
        gather_bytes: of updated weights that are gathered at once, through a tensor beside them.
        holds_outputs: a pipeline's buffers keep what a stage took and made, in fp32 what the last
            one made, until they are used again; there is one more than microbatches in flight.
        workspaces: handles of libraries that keep one: cuBLAS has one for each thread that launches
            products, the forward's and the backward's; Transformer Engine has its own.
        sends_tokens_once: a token goes once to each node that holds experts of it, inside one node
            once to each rank, and is copied to them there (DeepEP, HybridEP), not once for each
            expert.
        folds_experts: experts lie on neighbouring ranks, those of the tp axis among them, whole
            (MoE parallel folding, arXiv:2504.14960); else on ranks of the data axes.
        splits_experts: the tp axis splits every expert's matrices as it does other layers'.
        sequence_parallel: norms and residuals are split over the tp axis (arXiv:2205.05198).
        keeps_gathered: inputs that sequence parallelism gathers stay until the backward.
        accumulates_in_product: a weight's gradient is added up inside the product that makes it.
        recomputes_whole: recompute runs a forward to its end; else it stops at the last tensor that
            the backward needs (torch.utils.checkpoint without reentrance, from torch 2.1).
        selective: what selective recompute repeats.
        allocator_slack: what the allocator holds over what is allocated, as a share.
        product_dtype: of products with weights, where it is not the plan's precision.
        tf32_convolutions: those in fp32 round their factors to TF32 where a device has units for it
            (`torch.backends.cudnn.allow_tf32`, on by default, where products by weights are exact).
        casts_apart: kernels of their own cast the factors of 8-bit products, and those of linear
            layers in blocks alone (torchao); else it is beside the products (Transformer Engine).
        is_generic: nobody said what ran: ranges are wider.
        sources: (flag, where it is from), of every flag that is not the default.
    """

    name: str = "torch"
    attention: AttentionKernel | None = None
    fused: tuple[FusibleKind, ...] = ()
    compiled: bool = False
    loss: Loss = Loss.MATERIALISED
    loss_chunks: PositiveInt = LOSS_CHUNKS
    states: States | None = None
    reduce_bytes: PositiveFloat | None = None
    fused_optimizer: bool = False
    cuda_graphs: float = Field(default=0.0, ge=0, le=1)
    host_work: PositiveFloat = 1.0
    blocking_launches: bool = False
    overlap_gradients: bool = True
    overlap_parameters: bool = True
    overlap_tensor: float = Field(default=0.0, ge=0, le=1)
    bucket_bytes: PositiveFloat | None = None
    gather_bytes: PositiveFloat | None = None
    holds_outputs: bool = False
    workspaces: int = Field(default=2, ge=0)
    sends_tokens_once: bool = False
    folds_experts: bool = False
    splits_experts: bool = False
    sequence_parallel: bool = False
    keeps_gathered: bool = True
    accumulates_in_product: bool = False
    recomputes_whole: bool = False
    selective: Selective = Selective.OPERATORS
    allocator_slack: NonNegativeFloat | None = None
    product_dtype: str | None = None
    tf32_convolutions: bool = True
    casts_apart: bool = False
    is_generic: bool = False
    sources: tuple[tuple[str, str], ...] = ()

    def fuses(self, kind: FusibleKind) -> bool:
        """True if a chain of this kind is one kernel. Blocks are compiled, the loss is not."""
        return kind in self.fused or (self.compiled and kind is not FusibleKind.LOSS)


TORCH = Stack()
COMPILED = "torch-compiled"


@functools.cache
def stacks() -> Mapping[str, Stack]:
    """The presets of the catalogue by name, the default among them."""
    text = resources.files("profiles.workload").joinpath("stacks.toml").read_text("utf-8")
    tables = toml_table(text, where="stacks.toml")
    known = {TORCH.name: TORCH}
    for name, table in tables.items():
        base = known[table.pop("extends")].model_dump() if "extends" in table else {}
        sources = (dict(base.get("sources", ())) | table.pop("sources", {})).items()
        known[name] = Stack.build(
            {**base, **table, "name": name, "sources": tuple(sources)}, where=f"stacks.toml: {name}"
        )
    return MappingProxyType(known)


def stack_named(name: str) -> Stack:
    """A preset by its name.

    Raises:
        UnknownNameError: there is none; near misses are named.
    """
    known = stacks()
    if name not in known:
        raise UnknownNameError("stack", name, known)
    return known[name]


def compiled(stack: Stack) -> Stack:
    """The stack with compiled blocks."""
    if stack.compiled:
        return stack
    if stack == TORCH:
        return stack_named(COMPILED)
    return stack.model_copy(update={"name": f"{stack.name}, compiled", "compiled": True})


def in_eight_bits(stack: Stack, dtype: str) -> Stack:
    """The stack with products in `dtype`, by torchao where its states are torch's."""
    if stack.product_dtype == dtype:
        return stack
    changes = {"name": f"{stack.name}, products in fp8", "product_dtype": dtype}
    return stack.model_copy(update={**changes, "casts_apart": stack.states is None})


def chunked(stack: Stack, chunks: int) -> Stack:
    """The stack with head and loss computed for one of `chunks` parts of the tokens at a time."""
    if stack.loss is Loss.CHUNKED and stack.loss_chunks == chunks:
        return stack
    name = f"{stack.name}, loss in {chunks} chunks"
    return stack.model_copy(update={"name": name, "loss": Loss.CHUNKED, "loss_chunks": chunks})
