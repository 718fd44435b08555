"""Weights that several layers share, by the profile: split in all places alike, or in none."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from engines.tensor.styles import Kind, Style
from profiles.model.layers import LayerCost, LayerKind
from profiles.model.profile import GLUE, ModelProfile, Numerics, UnitCost, UnitProfile


def split_differently(
    model: ModelProfile, units: Sequence[UnitProfile], styles: Mapping[str, Style]
) -> list[str]:
    """The layers in `styles` with a weight that another place has whole or otherwise split."""
    layers = {joined(u.name, layer.path): (u.name, layer) for u in units for layer in layers_of(u)}
    called = {unit.name for unit in units if any(c != UnitCost() for c in unit.costs.values())}
    elsewhere = {name for call in model.flow.calls for name in call.parameters}
    groups = [list(names) for names in model.tied]
    groups += [[name] for name in elsewhere if not any(name in names for names in model.tied)]
    return [
        path
        for names in groups
        if elsewhere & set(names) or not _is_cut_alike(names, styles, layers, called)
        for path in (name.rpartition(".")[0] for name in names)
        if path in styles
    ]


def _is_cut_alike(
    names: Sequence[str],
    styles: Mapping[str, Style],
    layers: Mapping[str, tuple[str, LayerCost]],
    called: set[str],
) -> bool:
    """True if every unit that holds a parameter cuts it, and all in the same way."""
    cuts: dict[str, set[tuple[int, int] | None]] = {}
    for name in names:
        path, _, own = name.rpartition(".")
        unit = layers[path][0] if path in layers else owner(path, called)
        if unit not in called:
            continue
        here = cuts.setdefault(unit, set())
        if path in layers and path in styles:
            here.add(_cut(layers[path][1].kind, styles[path], own))
    return len(set().union(*(here or {None} for here in cuts.values()))) <= 1


def owner(path: str, units: Iterable[str]) -> str:
    """The innermost of `units` that the module at `path` lies in; else `GLUE`."""
    fitting = (unit for unit in units if not unit or f"{path}.".startswith(f"{unit}."))
    return max(fitting, key=len, default=GLUE)


def _cut(kind: LayerKind, style: Style, own: str) -> tuple[int, int] | None:
    """Dimension and packs of the cut of a layer's parameter; None if it stays whole."""
    if style.kind is Kind.HEADS:
        return None
    if kind is LayerKind.EMBEDDING:
        return (1 if style.kind is Kind.COLUMN else 0), 1
    inputs = 0 if kind is LayerKind.TRANSPOSED else 1
    if style.kind is Kind.ROW:
        return (inputs, style.packs) if own == "weight" else None
    return (1 - inputs if own == "weight" else 0), style.packs


def layers_of(unit: UnitProfile) -> tuple[LayerCost, ...]:
    """The weight layers of a unit, in the order of their calls."""
    first = next(iter(unit.costs.values()), UnitCost())
    return unit.costs.get(Numerics.AS_BUILT, first).layers


def joined(unit: str, path: str) -> str:
    """The path of what lies at `path` in `unit`."""
    return ".".join(part for part in (unit, path) if part)
