"""Memory of a row: the fullest moment of a step on each pipeline stage, and the worst of them.

A stage holds its states all the time. Beside them, the fullest moment is one of: the loss, the
backward of its last layer (with what recompute brings back), the optimizer's step.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from advisor.predict.activations import (
    Tokens,
    expert_ranks,
    kept_by,
    tokens_of,
    transformer_of,
)
from advisor.predict.loss import DEEPSPEED, loss_work
from advisor.predict.memory_constants import FITTED, MemoryConstants
from advisor.predict.setup import Range, Setup, Software
from advisor.predict.stages import Stage, contenders, in_flight, stage_of

# DeepSpeed's defaults: buckets of 5e8 numbers to gather and to reduce, 1e9 parameters alive
# (deepspeed.ai configuration pages). With ZeRO-3 its examples and Transformers' "auto" size the
# buckets as a square matrix of the model.
BUCKET = 5e8
LIVE = 1e9
# Programs with torch's own Adam; its default became one kernel for a list of tensors with 2.0
# (March 2023), with one list of temporaries as large as the parameters; before, it went tensor by
# tensor, of which the embedding's is the largest.
_TORCH_ADAM = ("ddp", "fsdp", "internevo")
FOREACH_DEFAULT = 2023.2
# Inside the allocator: a workspace of cuBLAS for each of the two threads that run forward and
# backward, and one of the library of fused layers; 32 MiB each on Hopper (torch, Reproducibility
# notes; Transformer Engine, module/base.py).
WORKSPACE = 3 * 32 * 2**20
# The allocator's slack is half where blocks fit each other: FSDP's units are of one size, and since
# torch 2.1 (October 2023) NVIDIA's recipes let segments grow (expandable_segments:True). 1.08 to
# 1.10 of what is allocated (Mist's README; Megatron-Bridge's notes on recompute).
EXPANDABLE = 2024.0
TIDY_SLACK = 0.5
# Of the slack, what an allocator in need cannot give back: a block that is used in part. Of runs on
# full devices those that ended wanted up to 0.93 of them and those that failed 0.935 and more,
# caches given back (LLM Foundry's largest batches; BigScience's on V100 and A100).
NOT_GIVEN_BACK = 1 / 3
_OF_UNITS = ("fsdp", "foundry", "torchtitan")


@dataclass(frozen=True, slots=True, kw_only=True)
class StageMemory:
    """Bytes on a rank of one stage, at its fullest moment.

    `allocated` is what the framework's allocator counts as used, `reserved` what the process takes
    of the device: cached blocks, context and communicators too; `wanted` what it would take of a
    device without end. `fits`: what an allocator in need gives back given back, there is enough.
    """

    index: int
    moment: str
    states: float
    activations: float
    work: float
    allocated: float
    reserved: float
    wanted: float
    fits: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryPrediction:
    """Of the worst rank, with every stage that can be it, the worst first."""

    allocated: Range
    reserved: Range
    fits: bool
    stages: tuple[StageMemory, ...]


def predict_memory(setup: Setup, constants: MemoryConstants = FITTED) -> MemoryPrediction:
    """Peak memory of a transformer's rank, on the worst stage.

    Raises:
        ValueError: the setup is not of a transformer.
    """
    stages = [stage_memory(setup, i, constants) for i in contenders(setup)]
    stages.sort(key=lambda stage: -stage.wanted)
    allocated = max(stage.allocated for stage in stages)
    reserved = max(stage.reserved for stage in stages)
    low, high = constants.range_of(experts=transformer_of(setup).experts > 0)
    high *= _doubt(setup, stages, constants)
    return MemoryPrediction(
        allocated=Range(value=allocated, low=low * allocated, high=high * allocated),
        reserved=Range(value=reserved, low=low * reserved, high=high * reserved),
        fits=all(stage.fits for stage in stages),
        stages=tuple(stages),
    )


def _doubt(setup: Setup, stages: Sequence[StageMemory], constants: MemoryConstants) -> float:
    """How much more it is if attention keeps scores after all.

    Programs of the recipes with dropout come with both kinds of kernels; where a row does not say
    which one ran, the other bounds the range.
    """
    software = setup.software
    if software.attention_said or not (software.flash and software.dropout):
        return 1.0
    other = replace(setup, software=replace(software, flash=False))
    most = max(stage_memory(other, stage.index, constants).allocated for stage in stages)
    return max(1.0, most / max(stage.allocated for stage in stages))


def stage_memory(setup: Setup, index: int, constants: MemoryConstants = FITTED) -> StageMemory:
    """The fullest moment of a rank of the stage at `index`."""
    stage, tokens, software = stage_of(setup, index), tokens_of(setup), setup.software
    states = _states(setup, stage)
    flying = in_flight(setup.layout, index)
    kept = _kept(setup, stage, tokens) * flying
    gathered, step = _gathered(setup, stage, tokens), _step(setup, stage)
    moments = {"backward": (kept, gathered + _layer_work(setup, stage))}
    if stage.last:
        moments["loss"] = (kept, gathered + loss_work(setup, stage, tokens))
    moment, (activations, work) = max(moments.items(), key=lambda item: sum(item[1]))
    # Blocks that were cut for activations do not hold the optimizer's long ones: both stay cached.
    cached = states + activations + work + step + WORKSPACE
    if step > activations + work:
        moment, activations, work = "optimizer step", 0.0, step
    allocated = states + activations + work + WORKSPACE
    layout = setup.layout
    groups = sum(n > 1 for n in (layout.dp, layout.tp, layout.pp, layout.cp, layout.ep))
    outside = constants.context_bytes + groups * constants.group_bytes
    capacity = setup.cluster.device.memory_bytes.value
    slack = constants.slack_share * (TIDY_SLACK if _tidy(software) else 1)
    wanted = cached * (1 + slack) + outside
    return StageMemory(
        index=index,
        moment=moment,
        states=states,
        activations=activations,
        work=work,
        allocated=allocated,
        # Before the allocator fails it gives back what it only caches.
        reserved=max(allocated + outside, min(wanted, capacity)),
        wanted=wanted,
        fits=allocated * (1 + NOT_GIVEN_BACK * slack) + outside <= capacity,
    )


def _tidy(software: Software) -> bool:
    recipes = software.family == "megatron" and software.year >= EXPANDABLE
    return recipes or software.family in _OF_UNITS


def _shards(setup: Setup) -> tuple[float, float]:
    """Over how many ranks optimizer states are split: outside experts, and inside."""
    layout = setup.layout
    if layout.zero == 0:
        return 1.0, 1.0
    ranks = layout.dp * layout.cp * layout.tp
    return float(layout.shard), max(1.0, ranks / (layout.ep * expert_ranks(setup)))


def _states(setup: Setup, stage: Stage) -> float:
    """Weights, gradients, masters and moments; the buffers that gradients are exchanged in."""
    software, zero = setup.software, setup.layout.zero
    weights, gradients = software.weight_bytes, software.gradient_bytes
    optimizer = software.master_bytes + software.moment_bytes
    if software.offload.startswith("optimizer"):
        # The update runs on the host, so the shards of gradients go there too.
        optimizer, gradients = 0.0, 0.0 if zero >= 2 else gradients
    if software.offload.endswith("params"):
        weights = 0.0
    # FSDP that shards "grad and op" gathers its weights once, and keeps the shards beside them.
    split = zero == 3 or (zero == 2 and software.family in _OF_UNITS)
    total = 0.0
    for parameters, shards in zip((stage.dense, stage.experts), _shards(setup), strict=True):
        total += parameters * (
            weights / (shards if split else 1)
            + gradients / (shards if zero >= 2 else 1)
            + optimizer / (shards if zero >= 1 else 1)
        )
    parameters = stage.dense + stage.experts
    if software.family in DEEPSPEED and setup.layout.dp > 1 and setup.layout.pp == 1:
        bucket = transformer_of(setup).hidden ** 2 if zero == 3 else BUCKET
        total += min(bucket, parameters) * software.reduce_bytes * 2
    if software.family == "ddp" and setup.layout.dp > 1:
        total += parameters * software.reduce_bytes
    return total


def _kept(setup: Setup, stage: Stage, tokens: Tokens) -> float:
    """What one microbatch leaves in the stage's layers until its backward."""
    recompute, total = setup.software.recompute, 0.0
    for kind, count in stage.layers.items():
        kept = kept_by(setup, kind)
        each = {
            "full": 0.0 if setup.software.inputs_on_host else kept.input,
            "selective": kept.all - kept.selective,
            "selective-ops": kept.matrices,
        }.get(recompute, kept.all)
        total += count * each
    if stage.first and setup.software.dropout:
        total += tokens.split * transformer_of(setup).hidden
    return total


def _layer_work(setup: Setup, stage: Stage) -> float:
    """Beside what is kept, while a layer runs its backward: what is computed again, gradients."""
    recompute, most = setup.software.recompute, 0.0
    for kind, count in stage.layers.items():
        if not count:
            continue
        kept = kept_by(setup, kind)
        again = {
            "full": kept.all - kept.input,
            "selective": kept.selective,
            "selective-ops": kept.all - kept.matrices,
        }.get(recompute, 0.0)
        most = max(most, again + kept.gradients)
    return most


def _gathered(setup: Setup, stage: Stage, tokens: Tokens) -> float:
    """Whole parameters and gradients of the layers in work, where states are split."""
    software = setup.software
    if setup.layout.zero == 3:
        if software.family in DEEPSPEED:
            return min(LIVE, stage.dense + stage.experts) * tokens.element
        if setup.layout.pp > 1:
            # Gathered once for all microbatches; their gradients add up whole, in the type in which
            # they are reduced (torchtitan's reshard_after_forward, FSDP2's accumulated gradients).
            return (stage.dense + stage.experts) * (tokens.element + software.reduce_bytes)
        # The layer in work, its gradients, the layer that is fetched next; the root's. Gradients
        # that are exchanged in a wider type are copied for it.
        whole = 3 * stage.largest_layer + stage.ends
        copy = software.reduce_bytes if software.reduce_bytes > tokens.element else 0.0
        return whole * tokens.element + stage.largest_layer * copy
    gathered = setup.layout.zero == 2 and software.family in _OF_UNITS
    if gathered or software.weight_bytes > tokens.element:
        return (stage.dense + stage.experts) * tokens.element  # or autocast's copies
    return 0.0


def _step(setup: Setup, stage: Stage) -> float:
    """What the update makes for itself: fp32 copies of 16-bit gradients, or one list of tensors."""
    software = setup.software
    if software.offload.startswith("optimizer"):
        return 0.0
    shards = _shards(setup)
    local = stage.dense / shards[0] + stage.experts / shards[1]
    found = 4 * local if software.master_bytes and software.gradient_bytes < 4 else 0.0
    if software.family in _TORCH_ADAM:
        table = stage.vocab * transformer_of(setup).hidden / shards[0]
        found += 4 * (local if software.year >= FOREACH_DEFAULT else table)
    return found
