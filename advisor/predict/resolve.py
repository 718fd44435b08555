"""Resolve rows to setups: each blank is filled by a rule, or the row is refused with a reason."""

from __future__ import annotations

import re
from dataclasses import replace
from math import ceil, gcd

from advisor.predict.architectures import parameters_of, shape_of
from advisor.predict.filled import filled, with_least_recompute
from advisor.predict.machines import cluster_of
from advisor.predict.rows import TableRow
from advisor.predict.setup import ParallelLayout, Refusal, Setup
from advisor.predict.software import (
    ATTENTIVE,
    CONVOLUTIONAL,
    OVERLAP_GRADIENTS,
    drops_out,
    eight_bit,
    family_of,
    folded,
    software_of,
    year_of,
)
from profiles.closed_forms.convnets.layers import Convnet
from profiles.closed_forms.convnets.registry import network_of
from profiles.closed_forms.transformer import TransformerShape as Shape
from profiles.errors import InputError
from profiles.machine.cluster import ClusterProfile

_DTYPES = {
    "bf16": "bfloat16",
    "bfloat16": "bfloat16",
    "fp16": "float16",
    "float16": "float16",
    "amp": "float16",
    "fp32": "float32",
    "float32": "float32",
    "tf32": "tfloat32",
    "fp8": "float8_e4m3fn",
    "mxfp8": "float8_e4m3fn",
    "fp4": "float4",
    "nvfp4": "float4",
}
# Model states that a device may hold if a table does not say how the model was split: 16 to 18
# bytes a parameter in half of the memory leave the other half to activations. Of each, replicas
# hold so many by ZeRO's stage (arXiv:1910.02054, section 5); they split the rest.
STATE_BYTES, STATE_SHARE = 18, 0.5
WHOLE_STATE_BYTES = {0: STATE_BYTES, 1: 6, 2: 2, 3: 0}
TOKENS_AT_ONCE = 16384
# Vision networks halve the image five times.
LEAST_PIXELS = 32


def resolve(row: TableRow) -> Setup | Refusal:
    """Resolve a row to a setup; returns a refusal instead of raising."""
    try:
        return _resolve(row)
    except InputError as error:
        return Refusal(row_id=row.row_id, reason="; ".join([error.what, *error.hints]))
    except _Impossible as reason:
        return Refusal(row_id=row.row_id, reason=str(reason))


class _Impossible(Exception):
    """Raised for a layout that no program can run, with the violated rule and its numbers."""


def _resolve(row: TableRow) -> Setup:
    cluster, assumed = cluster_of(row)
    notes = list(assumed)
    vision = row.arch in CONVOLUTIONAL
    shape: Shape | None = None
    network: Convnet | None = None
    if vision:
        if row.seq_len is not None and row.seq_len < LEAST_PIXELS:
            raise _Impossible(f"images of {row.seq_len} pixels; {LEAST_PIXELS} is the least")
        size = row.params_b * 1e9 if row.params_b else None
        network, unknown = network_of(
            row.model_name, kind=row.arch, parameters=size, pixels=row.seq_len or 0
        )
        notes += [unknown] if unknown else []
    else:
        shape_or_reason = shape_of(row)
        if isinstance(shape_or_reason, str):
            raise _Impossible(shape_or_reason)
        shape, assumed = shape_or_reason
        notes += assumed
    dtype_name = (row.dtype or "").lower()
    dtype = _DTYPES.get(dtype_name)
    if dtype is None and dtype_name:
        # "bf16 (amp)", "bf16-mixed": the first word is the dtype, the rest the method.
        dtype = _DTYPES.get(re.split(r"[\s(,/+-]+", dtype_name)[0])
        if dtype is not None:
            notes.append(f"dtype {dtype}, of `{row.dtype}`")
    if dtype is None:
        if row.dtype:
            raise _Impossible(f"`dtype` is `{row.dtype}`; known are {', '.join(_DTYPES)}")
        known = cluster.device.flop_per_s
        dtype = "float32" if vision else "bfloat16" if "bfloat16" in known else "float16"
        notes.append(f"dtype {dtype}")
    if dtype == "float32" and "tfloat32" in cluster.device.flop_per_s:
        # Since Ampere, float32 products run in TF32 by default (cuDNN's default; NVIDIA's
        # containers for cuBLAS), and tables call this fp32.
        dtype = "tfloat32"
    layout, assumed = _layout(row, shape, cluster)
    notes += assumed
    if network is not None:
        _check_network(network, layout)
    if shape is not None:
        year = year_of(row) or OVERLAP_GRADIENTS
        drops = drops_out(family_of(row), year, shape.kind, gated=shape.gated)
        shape = shape.model_copy(update={"dropout": drops})
    software, assumed_software = software_of(
        row,
        dtype=dtype,
        device=cluster.device.name,
        shape=shape,
    )
    notes += assumed_software
    if layout.ep > layout.dp * layout.cp:
        # More ranks than the data axes have: experts are sharded over tp ranks, too.
        software = replace(software, stack=folded(software.stack))
    setup = Setup(
        row_id=row.row_id,
        shape=shape,
        network=network,
        cluster=cluster,
        dtype=dtype,
        layout=layout,
        software=software,
        optimizer=_optimizer(row, vision=vision, notes=notes),
        assumed=tuple(notes),
    )
    if row.recompute is None:
        setup = _recomputed(setup)
    if network is None or row.microbatch or row.global_batch:
        return setup
    setup = filled(setup)
    filling = f"microbatch {setup.layout.microbatch}, as many as fit; its range begins with one"
    return replace(setup, assumed=(*(n for n in notes if n != "microbatch 1"), filling))


def _optimizer(row: TableRow, *, vision: bool, notes: list[str]) -> str:
    """Return a name of `profiles.workload.optimizers`, or LAMB; convolutional networks default to
    momentum."""
    requested = (row.optimizer or "").lower()
    if eight_bit(row):
        return "adamw-8bit"
    named = {"muon": "muon", "adafactor": "adafactor", "lamb": "lamb", "sgd": "sgd-momentum"}
    for word, name in named.items():
        if word in requested:
            return name
    if not requested and vision and row.arch not in ATTENTIVE:
        notes.append("SGD without momentum")
        return "sgd"
    if not requested and row.arch == "transformer_xl":
        notes.append("LAMB")  # NVIDIA's recipes of it
        return "lamb"
    return "adamw"


def _recomputed(setup: Setup) -> Setup:
    """Apply the least recompute that fits, with a note if that exceeds the program's default."""
    recomputed, default = with_least_recompute(setup), setup.software.recompute
    if recomputed.software.recompute == default:
        return setup
    more = f"recompute {recomputed.software.recompute}, the least that fits"
    notes = (more if note == f"recompute {default}" else note for note in setup.assumed)
    return replace(recomputed, assumed=tuple(notes))


def _layout(
    row: TableRow, shape: Shape | None, cluster: ClusterProfile
) -> tuple[ParallelLayout, tuple[str, ...]]:
    world, notes = cluster.world_size, []
    degrees = {"tp": row.tp, "pp": row.pp, "cp": row.cp}
    if shape is not None and row.dp is None and row.tp is None and row.pp is None:
        degrees["tp"], degrees["pp"] = _smallest(shape, cluster, _zero_stage(row))
        notes.append(f"tp={degrees['tp']} pp={degrees['pp']}, the fewest devices that hold it")
    tp, pp, cp = (degrees[axis] or 1 for axis in ("tp", "pp", "cp"))
    if row.dp is None:
        if world % (tp * pp * cp):
            raise _Impossible(f"tp={tp} * pp={pp} * cp={cp} does not divide {world} devices")
        dp = world // (tp * pp * cp)
        notes.append(f"dp={dp}")
    else:
        dp = row.dp
    if dp * tp * pp * cp != world:
        raise _Impossible(
            f"dp={dp} * tp={tp} * pp={pp} * cp={cp} is {dp * tp * pp * cp}, not the {world} devices"
        )
    ep = row.ep or 1
    if shape is not None:
        ep = _check(shape, tp, pp, ep, dp * cp * tp, notes)
    zero = _zero_stage(row)
    recent = family_of(row) in ("megatron", "nemo") and (year_of(row) or 0) >= OVERLAP_GRADIENTS
    if row.zero_stage is None and dp > 1 and shape is not None:
        # Megatron-DeepSpeed combines pipelines with ZeRO-1; later it became Megatron's default.
        zero = 1 if recent or family_of(row) == "megatron-deepspeed" else 0
        if eight_bit(row):
            zero = 0  # DeepSpeed and Megatron cannot shard this optimizer
        notes.append("optimizer states split over replicas" if zero else "no state sharding")
    microbatch, accumulation, assumed = _batch(row, dp, pp, shape)
    notes += assumed
    schedule = (row.pp_schedule or "1f1b").lower()
    virtual = row.virtual_stages or 1
    may_interleave = row.pp_schedule is None or "interleaved" in schedule
    if may_interleave and recent and row.virtual_stages is None and pp > 1 and shape is not None:
        # Since pipeline sends are overlapped, Megatron recommends one layer a chunk.
        virtual = max(1, shape.layers // pp)
        notes.append(f"{virtual} chunks a stage")
    chunks = pp * virtual
    if shape is not None and virtual > 1 and chunks > shape.layers * _depth(shape) + 2:
        raise _Impossible(
            f"{shape.layers} layers, embedding and head cannot fill pp={pp} * {virtual} chunks"
        )
    layout = ParallelLayout(
        dp=dp,
        tp=tp,
        pp=pp,
        cp=cp,
        ep=ep,
        zero=zero,
        shard=row.shard_group or dp * cp,
        microbatch=microbatch,
        accumulation=accumulation,
        schedule="gpipe" if "gpipe" in schedule else "interleaved" if virtual > 1 else "1f1b",
        virtual=virtual,
    )
    return layout, tuple(notes)


def _check_network(network: Convnet, layout: ParallelLayout) -> None:
    if layout.tp * layout.cp > 1:
        raise _Impossible(f"tp={layout.tp} cp={layout.cp}: networks on images are not split so")
    if layout.pp > len(network.blocks):
        raise _Impossible(
            f"{len(network.blocks)} blocks of {network.name} cannot be cut into pp={layout.pp}"
        )


def _check(shape: Shape, tp: int, pp: int, ep: int, ranks: int, notes: list[str]) -> int:
    layers = shape.layers * _depth(shape)
    if layers < pp:
        raise _Impossible(f"{layers} layers cannot be cut into pp={pp} stages")
    if shape.heads % tp:
        raise _Impossible(f"tp={tp} does not divide {shape.heads} heads")
    if not shape.experts:
        return 1
    if shape.experts % ep:
        raise _Impossible(f"ep={ep} does not divide {shape.experts} experts")
    if ranks % ep:
        inside = gcd(ep, ranks)
        notes.append(f"ep={inside}: {ep} does not divide the {ranks} ranks of a stage")
        return inside
    return ep


def _depth(shape: Shape) -> int:
    """Number of layer stacks: two for an encoder-decoder."""
    return 2 if shape.kind == "t5" else 1


def _zero_stage(row: TableRow) -> int:
    return {"1": 1, "2": 2, "3": 3, "hsdp": 3}.get((row.zero_stage or "").lower(), 0)


def _smallest(shape: Shape, cluster: ClusterProfile, zero: int) -> tuple[int, int]:
    """Grow tensor ranks within a node, then stages, until model states fit, of which ZeRO's stage
    `zero` splits some over the replicas."""
    room = cluster.device.memory_bytes.value * STATE_SHARE
    whole = WHOLE_STATE_BYTES[zero]
    if not whole:
        return 1, 1
    # All devices together split the rest, however many ranks tensors and stages take.
    room -= parameters_of(shape) * (STATE_BYTES - whole) / cluster.world_size
    need = parameters_of(shape) * whole
    tp = 1
    while need / tp > room and tp * 2 <= cluster.devices_per_node and shape.heads % (tp * 2) == 0:
        tp *= 2
    pp = 1
    while need / (tp * pp) > room:
        bigger = [
            p
            for p in range(pp + 1, shape.layers + 1)
            if shape.layers % p == 0 and cluster.world_size % (tp * p) == 0
        ]
        if not bigger:
            break
        pp = bigger[0]
    return (tp, pp) if cluster.world_size % (tp * pp) == 0 else (1, 1)


def _batch(row: TableRow, dp: int, pp: int, shape: Shape | None) -> tuple[int, int, list[str]]:
    """Return microbatch, microbatches a step, and assumptions."""
    batch, micro, accumulation = row.global_batch, row.microbatch, row.grad_accum
    if micro is None and batch is not None and accumulation is not None:
        micro = max(1, batch // (dp * accumulation))
        return micro, accumulation, [f"microbatch {micro}"]
    assumed = []
    if micro is None:
        micro = 1
        if pp == 1 and batch is not None and shape is not None:
            # Without a pipeline to fill: as many samples as make some ten thousand tokens.
            own = max(1, batch // dp)
            room = max(1, TOKENS_AT_ONCE // shape.length)
            micro = next(size for size in range(min(own, room), 0, -1) if own % size == 0)
        assumed.append(f"microbatch {micro}")
    if batch is None:
        if accumulation is None:
            accumulation = 4 * pp if pp > 1 else 1
            assumed.append(f"{accumulation} microbatches a step")
        return micro, accumulation, assumed
    if batch < dp:
        raise _Impossible(f"global_batch={batch} leaves some of dp={dp} replicas without a sample")
    steps = ceil(batch / (dp * micro))
    if steps * dp * micro != batch or (accumulation is not None and accumulation != steps):
        assumed.append(f"{steps} microbatches a step, from global_batch={batch}")
    return micro, steps, assumed
