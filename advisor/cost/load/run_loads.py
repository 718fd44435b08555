"""Loads of a model's runs on one rank before experts are split, the same for all degrees of ep."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import fields, replace
from typing import NamedTuple

from advisor.cost.load.axes import over_tokens, split_experts
from advisor.cost.load.casts import EAGER, FUSED, with_casts
from advisor.cost.load.runs import UnitRun, divided
from advisor.cost.load.tensor import UNSTYLED, Styled, Styles, cut, is_split, with_biases
from advisor.cost.load.unit_load import UnitLoad, with_less
from advisor.cost.load.work import unit_work
from engines.tensor.styles import Kind, Style
from engines.tensor.token_rules import SPLIT, tokens_of
from profiles.model.layers import LayerCost, LayerKind
from profiles.model.profile import GLUE, ModelProfile, Numerics, UnitCost, UnitProfile
from profiles.workload.new_memory import mapped
from profiles.workload.stack import TORCH, Stack


class RunLoad(NamedTuple):
    """A run of equal units on one rank of the tp and cp axes.

    Attributes:
        unit: one of the run, with the rank's part of its experts' matrices.
        styled: as of `styled_units`.
        glue: code between units that runs before it.
    """

    run: UnitRun
    unit: UnitProfile
    styled: Styled
    load: UnitLoad
    glue: UnitLoad | None


def run_loads(
    model: ModelProfile,
    *,
    numerics: Numerics,
    samples: int,
    tp: int,
    cp: int,
    runs: Sequence[UnitRun],
    styled: Sequence[Styled],
    stack: Stack = TORCH,
) -> tuple[RunLoad, ...]:
    """Load of every run of `model`; arguments as those of `advisor.cost.load.loads.loads_of`."""
    separate, late = {unit.name for unit in model.shard_units()}, model.reduced_at_end
    if tp > 1:
        runs = divided(runs, styled)
    glue = model.glue.get(numerics, {})
    glue_styles = next((styled[run.first] for run in runs if run.unit.name == GLUE), UNSTYLED)

    def loaded(unit: UnitProfile, place: Styled, count: int = 1) -> UnitLoad:
        load = _load(
            unit,
            count,
            numerics,
            samples / cp,
            is_separate=unit.name in separate and unit.name != "",
            is_late=unit.name in late and unit.gradient_bytes > 0,
            styled=place,
            tp=tp,
            stack=stack,
        )
        if stack.casts_apart and unit.is_block:
            load = with_casts(load, FUSED if stack.compiled else EAGER)
        if cp == 1:
            return load
        width, cost = element_bytes(model, numerics), unit.cost(numerics)
        return over_tokens(load, cost, cp=cp, samples=samples / cp, element_bytes=width)

    def of_run(run: UnitRun) -> RunLoad:
        unit, place, code = run.unit, styled[run.first], None
        if unit.name == GLUE and glue:
            unit = unit.model_copy(update={"costs": {numerics: glue.get(GLUE, UnitCost())}})
        load = loaded(unit, place, run.count)
        if stack.splits_experts and tp > 1 and unit.experts:
            unit = split_experts(unit, tp=tp)
            load = with_less(load, run.unit.parameter_bytes - unit.parameter_bytes)
        if unit.name in glue and unit.name != GLUE:
            before = UnitProfile(name=GLUE, kind="", costs={numerics: glue[unit.name]})
            code = loaded(before, glue_styles)
        return RunLoad(run, unit, place, load, code)

    return tuple(map(of_run, runs))


def styled_units(
    model: ModelProfile, *, numerics: Numerics, styles: Iterable[tuple[str, str]]
) -> list[Styled]:
    """Styles applied to each unit of `model`."""
    wanted = Styles(styles)
    applied = (wanted.of_unit(unit, unit.cost(numerics).layers) for unit in model.units)
    known: dict[tuple[Styled, int], Styled] = {}

    def with_tokens(unit: UnitProfile, styled: Styled) -> Styled:
        if SPLIT not in styled[0].styles:
            return styled
        tokens = tokens_of(model, unit.name) or 0
        made = (styled[0]._replace(tokens=tokens), *styled[1:])
        return known.setdefault((styled, tokens), made)

    return with_biases(model, map(with_tokens, model.units, applied), numerics=numerics)


def split_head(runs: Sequence[RunLoad], numerics: Numerics) -> LayerCost | None:
    """Layer that outputs split logits, if any."""
    split = Style(kind=Kind.VOCAB)
    for run in runs:
        layers = run.run.unit.cost(numerics).layers
        for layer, place in zip(layers, run.styled[1:], strict=True):
            if split in place.styles and layer.kind is not LayerKind.EMBEDDING:
                return layer
    return None


def _load(
    unit: UnitProfile,
    count: int,
    numerics: Numerics,
    samples: float,
    *,
    is_separate: bool,
    is_late: bool,
    styled: Styled,
    tp: int,
    stack: Stack,
) -> UnitLoad:
    cost = unit.cost(numerics)
    load = UnitLoad(
        name=unit.name,
        is_block=unit.is_block,
        # A model that is one unit is its own root: there is nothing to release.
        is_separate=is_separate,
        is_late=is_separate and is_late,
        # A table of embeddings is looked up; one that is tied is a head's weight too.
        is_multiplied=unit.is_shared or cost.forward_flop.at(1) > 0,
        parameter_bytes=unit.parameter_bytes,
        gradient_bytes=unit.gradient_bytes,
        forward_flop=cost.forward_flop.at(samples),
        backward_flop=cost.backward_flop.at(samples),
        forward_moved_bytes=cost.forward_moved_bytes.at(samples),
        backward_moved_bytes=cost.backward_moved_bytes.at(samples),
        forward_kernels=cost.forward_kernels,
        backward_kernels=cost.backward_kernels,
        forward_cycles=cost.forward_cycles.at(samples),
        backward_cycles=cost.backward_cycles.at(samples),
        activation_bytes=cost.activation_bytes.at(samples),
        selective_bytes=cost.selective_activation_bytes.at(samples),
        input_bytes=cost.input_bytes.at(samples),
        output_bytes=cost.output_bytes.at(samples),
        forward_transient_bytes=cost.forward_transient_bytes.at(samples),
        backward_transient_bytes=cost.backward_transient_bytes.at(samples),
        count=count,
        layer_bytes=sum(layer.output_bytes.at(samples) for layer in cost.layers),
        tensors=_tensors(unit),
        new_gradient_bytes=_new_gradient_bytes(unit),
        work=unit_work(cost, styled, tp=tp, samples=samples),
    )
    if tp == 1 or not is_split(styled):
        return load
    own = cut(cost, unit, styled, tp=tp, samples=samples, stack=stack)
    share = own.gradient_bytes / unit.gradient_bytes if unit.gradient_bytes else 1.0
    load = replace(load, new_gradient_bytes=_new_gradient_bytes(unit, share=share))
    return replace(load, **{field.name: getattr(own, field.name) for field in fields(own)})


def _new_gradient_bytes(unit: UnitProfile, *, share: float = 1.0) -> float:
    """See `UnitLoad`; `share`: of its gradients that a rank of the tp axis has."""
    return sum(mapped(share * shape.nbytes) * shape.count for shape in unit.shapes)


def _tensors(unit: UnitProfile) -> int:
    """Trainable parameters of a unit; 1 if its shapes are unknown."""
    return sum(shape.count for shape in unit.shapes) or int(unit.gradient_bytes > 0)


def element_bytes(model: ModelProfile, kind: Numerics) -> int:
    """Bytes per element of attention inputs."""
    is_half = kind is not Numerics.AS_BUILT or model.dtype in ("bfloat16", "float16")
    return 2 if is_half else 4
