"""Units with one rank's part of the parameters along tp and ep, for the optimizer step."""

from __future__ import annotations

from collections.abc import Sequence
from math import ceil

from advisor.cost.load.axes import split_experts, without_experts
from advisor.cost.load.runs import UnitRun
from advisor.cost.load.tensor import Styled, cut_share, is_split
from engines.plan import Plan
from engines.tensor.styles import Kind, cutting
from profiles.model.layers import LayerKind
from profiles.model.profile import (
    ModelProfile,
    Numerics,
    ParameterShape,
    UnitCost,
    UnitProfile,
)


def local_units(
    plan: Plan,
    model: ModelProfile,
    runs: Sequence[UnitRun],
    styled: Sequence[Styled],
    *,
    numerics: Numerics,
    shards: int,
    whole_shards: int = 0,
    splits_experts: bool = False,
) -> tuple[UnitProfile, ...]:
    """Return every unit of `model` on one rank; equal ones share an object.

    Args:
        styled: styles of each unit.
        shards: number of ranks that shard states, if experts are split.
        whole_shards: number of ranks that shard states, if some parameters stay whole.
        splits_experts: see `Stack`.
    """
    units: list[UnitProfile] = []
    for run in runs:
        known: dict[Styled, UnitProfile] = {}
        for place in range(run.first, run.last):
            how = styled[place]
            if how not in known:
                unit = run.unit
                if is_split(how):
                    unit = _cut_unit(unit, model.units[place].cost(numerics), how, tp=plan.tp)
                if splits_experts and plan.tp > 1:
                    unit = split_experts(unit, tp=plan.tp)
                if plan.ep > 1 and not plan.shards_experts:
                    unit = without_experts(unit, ep=plan.ep, shards=shards)
                if whole_shards and unit.whole_shapes:
                    unit = _with_whole(unit, shards=whole_shards)
                known[how] = unit
            units.append(known[how])
    return tuple(units)


def _cut_unit(unit: UnitProfile, cost: UnitCost, styled: Styled, *, tp: int) -> UnitProfile:
    """Return `unit` with the parameters on one of `tp` ranks, for the optimizer step."""
    shapes = list(unit.shapes)
    parameter_bytes, gradient_bytes = float(unit.parameter_bytes), float(unit.gradient_bytes)
    for layer, place in zip(cost.layers, styled[1:], strict=True):
        style = cutting(place.styles)
        if style is None or style.kind is Kind.HEADS:
            continue
        share = cut_share(layer, style, tp)
        is_rows = layer.kind is LayerKind.EMBEDDING and style.kind is not Kind.COLUMN
        row = style.kind is Kind.ROW or layer.kind is LayerKind.EMBEDDING
        parameter_bytes -= (layer.weight_bytes + (0 if row else layer.bias_bytes)) * (1 - share)
        gradient_bytes -= layer.weight_gradient_bytes * (1 - share)
        gradient_bytes -= (0 if row else layer.bias_gradient_bytes) * (1 - share)
        outputs_first = layer.kind in (LayerKind.LINEAR, LayerKind.CONVOLUTION)
        sizes = (layer.outputs, layer.inputs) if outputs_first else (layer.inputs, layer.outputs)
        of_inputs = style.kind is Kind.ROW or is_rows
        dim = (1 if of_inputs else 0) if outputs_first else (0 if of_inputs else 1)
        _cut_shape(shapes, sizes, dim=dim, share=share)
        if not row and layer.bias_gradient_bytes:
            _cut_shape(shapes, (layer.outputs,), dim=0, share=share)
    return unit.model_copy(
        update={
            "shapes": tuple(shapes),
            "parameter_bytes": round(parameter_bytes),
            "gradient_bytes": round(gradient_bytes),
        }
    )


def _cut_shape(
    shapes: list[ParameterShape], sizes: tuple[int, ...], *, dim: int, share: float
) -> None:
    """Replace one shape that begins with `sizes` by its share along `dim`."""
    for place, shape in enumerate(shapes):
        if shape.sizes[: len(sizes)] != sizes or (len(sizes) == 1 and len(shape.sizes) != 1):
            continue
        local = list(shape.sizes)
        local[dim] = ceil(local[dim] * share)
        part = shape.model_copy(update={"sizes": tuple(local), "count": 1})
        rest = [shape.model_copy(update={"count": shape.count - 1})] if shape.count > 1 else []
        shapes[place : place + 1] = [*rest, part]
        return


def _with_whole(unit: UnitProfile, *, shards: int) -> UnitProfile:
    """Return `unit` with parameters that stay whole counted `shards` times, by which the optimizer
    step is later divided. Those that tp splits are taken for shards."""
    whole = {(shape.sizes, shape.element_bytes): shape.count for shape in unit.whole_shapes}
    shapes: list[ParameterShape] = []
    added = 0
    for shape in unit.shapes:
        count = min(shape.count, whole.get((shape.sizes, shape.element_bytes), 0))
        first, *rest = shape.sizes or (1,)
        sizes = (first * shards, *rest)
        if count:
            shapes.append(shape.model_copy(update={"sizes": sizes, "count": count}))
            added += count * (shapes[-1].nbytes - shape.nbytes)
        if count < shape.count:
            shapes.append(shape.model_copy(update={"count": shape.count - count}))
    update = {"gradient_bytes": unit.gradient_bytes + added, "shapes": tuple(shapes)}
    return unit.model_copy(update=update)
