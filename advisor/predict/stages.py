"""Stages: the layers and parameters that a pipeline stage holds, and what it has in flight."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from math import ceil

from advisor.predict.activations import MAMBA_STATES, expert_ranks, mamba_width, transformer_of
from advisor.predict.setup import Layout, Setup, Shape
from advisor.predict.work import KEY_LATENT, QUERY_LATENT, ROTARY

# Megatron-LM pads its vocabulary to a multiple of 128 for each tensor rank
# (--make-vocab-size-divisible-by); so do the programs that grew from it.
PADDING = 128


@dataclass(frozen=True, slots=True)
class Stage:
    """What one rank of a stage holds.

    Attributes:
        layers: how many of each kind; a key of `activations.LAYERS`.
        dense, experts: its parameters outside and inside experts.
        largest_layer: parameters of the largest layer, whole over its shards.
        ends: parameters of embedding and head.
        vocab: rows of them on one tensor rank, as padded.
    """

    index: int
    layers: Mapping[str, float]
    dense: float
    experts: float
    largest_layer: float
    ends: float
    vocab: float
    first: bool
    last: bool


def padded_vocabulary(shape: Shape, tp: int) -> int:
    multiple = PADDING * tp
    return ceil(shape.vocab / multiple) * multiple


def stage_of(setup: Setup, index: int) -> Stage:
    """The stage at `index`. Layers are spread as evenly as they go."""
    shape, layout = transformer_of(setup), setup.layout
    layers = _layers(shape, layout, index)
    dense = experts = largest = 0.0
    for kind, count in layers.items():
        own, in_experts = layer_parameters(setup, kind)
        dense += count * own
        experts += count * in_experts
        largest = max(largest, own + in_experts)
    first, last = index == 0, index == layout.pp - 1
    rows = padded_vocabulary(shape, layout.tp) / layout.tp
    ends = 0.0
    learned = shape.kind in ("dense_gpt", "bert", "t5")
    if first:
        ends += rows * shape.hidden + (shape.length * shape.hidden if learned else 0)
    if last:
        ends += shape.hidden * (2 if learned else 1)
        if not (first and shape.tied):
            ends += rows * shape.hidden
        if shape.kind == "bert":
            ends += 2 * shape.hidden**2  # the pooler and the head's own layer
    return Stage(
        index=index,
        layers=layers,
        dense=dense + ends,
        experts=experts,
        largest_layer=largest,
        ends=ends,
        vocab=rows,
        first=first,
        last=last,
    )


def contenders(setup: Setup) -> list[int]:
    """Stages of which one is the fullest: the ends, the second, and the first with a layer more.

    All others have as many layers as one of these and fewer microbatches in flight.
    """
    shape, stages = transformer_of(setup), setup.layout.pp
    parts = stages * setup.layout.virtual
    over = (shape.layers * (2 if shape.kind == "t5" else 1)) % parts
    longer = (ceil(parts / over) - 1) % stages if over else 0
    return sorted({0, min(1, stages - 1), longer, stages - 1})


def layer_parameters(setup: Setup, kind: str) -> tuple[float, float]:
    """Parameters of a layer on one tensor and expert rank: outside experts, and inside."""
    shape, layout = transformer_of(setup), setup.layout
    h, tp = shape.hidden, layout.tp
    biased = shape.kind in ("dense_gpt", "bert", "t5")
    queries, values = shape.heads * shape.head_width, 2 * shape.kv_heads * shape.head_width
    norm = 2 * h if biased else h
    attention = (2 * h * queries + h * values) / tp + norm
    if biased:
        attention += (queries + values) / tp + h
    if shape.latent:
        # Down to the latents on every rank; up to queries with a rotary part, keys and values.
        rotary = shape.heads * ROTARY
        attention = h * (QUERY_LATENT + KEY_LATENT + ROTARY) + norm
        attention += QUERY_LATENT * (queries + rotary) / tp
        attention += (2 * KEY_LATENT * queries + h * queries) / tp
    matrices = 3 if shape.gated else 2
    mlp = matrices * h * shape.ffn / tp + norm + ((shape.ffn / tp + h) if biased else 0)
    inner = shape.expert_width or h
    within = expert_ranks(setup)
    expert = matrices * inner * shape.expert_ffn * shape.experts / (layout.ep * within)
    routed = h * shape.experts + norm + matrices * h * shape.shared_ffn / tp
    routed += 2 * h * shape.expert_width
    mamba = (h * (3 * mamba_width(shape) + MAMBA_STATES)) / tp + norm
    return {
        "dense": (attention + mlp, 0.0),
        "expert": (attention + routed, expert),
        "decoder": (2 * attention + mlp, 0.0),
        "attention": (attention, 0.0),
        "experts": (routed, expert),
        "mamba": (mamba, 0.0),
    }[kind]


def _layers(shape: Shape, layout: Layout, index: int) -> Mapping[str, float]:
    if shape.is_hybrid:
        share = 1 / layout.pp
        return {
            "attention": shape.attention_layers * share,
            "mamba": shape.mamba_layers * share,
            "experts": (shape.layers - shape.attention_layers - shape.mamba_layers) * share,
        }
    total = shape.layers * (2 if shape.kind == "t5" else 1)
    parts = layout.pp * layout.virtual
    found: Counter[str] = Counter()
    for chunk in range(layout.virtual):
        part = chunk * layout.pp + index
        begin, end = part * total // parts, (part + 1) * total // parts
        if shape.kind == "t5":
            encoder = max(0, min(end, shape.layers) - begin)
            found["dense"] += encoder
            found["decoder"] += end - begin - encoder
        elif shape.experts:
            dense = max(0, min(end, shape.dense_layers) - begin)
            found["dense"] += dense
            found["expert"] += end - begin - dense
        else:
            found["dense"] += end - begin
    return found


def in_flight(layout: Layout, index: int) -> float:
    """Microbatches whose activations a stage holds at its fullest, in whole stages.

    1F1B: a stage is ahead of its backward by the stages after it. Interleaved: of
    (p - 1 - i) * 2 + (v - 1) * group chunks in the warm-up and one more (Megatron-LM
    schedules.py); a group is the stages, or the next number of microbatches that divides a step's.
    """
    stages, microbatches = layout.pp, layout.accumulation
    if stages == 1:
        return 1.0
    if layout.schedule == "gpipe":
        return float(microbatches)
    if layout.schedule == "interleaved" and layout.virtual > 1:
        group = next(
            (n for n in range(stages, microbatches + 1) if microbatches % n == 0), microbatches
        )
        chunks = (stages - 1 - index) * 2 + (layout.virtual - 1) * group + 1
        return min(chunks / layout.virtual, float(microbatches))
    return float(min(stages - index, microbatches))
