"""How the layers of a model would be split over the tp axis, from its profile alone.

What `engines.tensor.proposal` finds on the modules and proves, as far as a profile tells it: enough
to weigh a plan. What the plan is carried out with is the engine's own, proved proposal; where the
model's code needs to be told its share of heads, that adds `sizes(...)`.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import isclose

from engines.tensor.styles import Kind, Style, without_numbers
from profiles.layers import INPUT, LayerCost, LayerKind
from profiles.model import (
    GLUE,
    LOSS,
    SMALLEST_SHARD_FRACTION,
    ModelProfile,
    Numerics,
    UnitCost,
    UnitProfile,
)

_FUSED = (2, 3)  # tensors side by side in one weight that the engine knows how to cut


@dataclass(frozen=True, slots=True)
class Whole:
    """A layer outside pairs; `style` is "whole" where every rank keeps all of it."""

    layer: str
    style: str
    why: str


@dataclass(frozen=True, slots=True)
class Split:
    """`styles` for `Plan.tensor_styles`, and the layers that are not half of a pair."""

    styles: tuple[tuple[str, str], ...]
    notes: tuple[Whole, ...]


def proposed_styles(model: ModelProfile, tp: int) -> tuple[tuple[str, str], ...]:
    """`proposed_split(model, tp).styles`; empty where nothing can be split."""
    return proposed_split(model, tp).styles


def proposed_split(model: ModelProfile, tp: int) -> Split:
    """Column and row pairs where the flow of a unit has them; embeddings and the head by the
    vocabulary; other large layers with gathered outputs; tied weights alike or not at all."""
    units = [unit for unit in model.units if unit.name not in (GLUE, LOSS)]
    sizes = (_elements(layer, unit) for unit in units for layer in _layers(unit))
    smallest = SMALLEST_SHARD_FRACTION * max(sizes, default=0)
    found: dict[str, Style] = {}
    why: dict[str, str] = {}
    known: dict[int, _Unit] = {}
    for unit in units:
        layers = _layers(unit)
        inside = known.get(id(layers)) or _split_unit(unit, layers, tp=tp, smallest=smallest)
        known[id(layers)] = inside  # of equal blocks the layers are one object
        found |= {_joined(unit.name, path): style for path, style in inside.styles.items()}
        why |= {_joined(unit.name, path): reason for path, reason in inside.why.items()}
    _leave_logits_split(model, units, found)
    _leave_ties_whole(model, units, found, why)
    notes = {
        Whole(without_numbers(path), str(found.get(path, "whole")), reason): None
        for path, reason in why.items()
    }
    return Split(tuple(_as_pairs(units, found)), tuple(notes))


@dataclass(slots=True)
class _Unit:
    """Styles of a unit's layers by their paths in it, and why others are in no pair."""

    styles: dict[str, Style]
    why: dict[str, str]


def _layers(unit: UnitProfile) -> tuple[LayerCost, ...]:
    first = next(iter(unit.costs.values()), UnitCost())
    return unit.costs.get(Numerics.AS_BUILT, first).layers


def _split_unit(
    unit: UnitProfile, layers: Sequence[LayerCost], *, tp: int, smallest: float
) -> _Unit:
    found = _Unit({}, {})
    for columns, rows in _pairs(layers):
        reason = _why_no_pair(columns, rows, tp)
        for layer in (*columns, *rows):
            if reason:
                found.why[layer.path] = reason
            else:
                kind = Kind.COLUMN if layer in columns else Kind.ROW
                packs = len(layer.pieces) if layer in columns and layer.pieces else 1
                found.styles[layer.path] = Style(kind=kind, packs=packs)
    for layer in layers:
        if layer.path in found.styles:
            continue
        reason = _too_small(layer, unit, tp, smallest)
        if reason:
            found.why[layer.path] = reason
            continue
        is_table = layer.kind is LayerKind.EMBEDDING
        found.styles[layer.path] = Style(kind=Kind.VOCAB if is_table else Kind.GATHER)
        if not is_table and layer.path:
            found.why.setdefault(layer.path, "in no pair of layers")
    return found


def _pairs(
    layers: Sequence[LayerCost],
) -> Iterator[tuple[tuple[LayerCost, ...], tuple[LayerCost, ...]]]:
    """Layers that nothing but the second ones take, and that alone feed them: see
    `engines.tensor.wiring`."""
    rows: dict[frozenset[int], list[int]] = {}
    taken: set[int] = set()
    for number, layer in enumerate(layers):
        sources = frozenset(layer.sources)
        if not sources or INPUT in sources or sources & taken or number in sources:
            continue
        feeds_others = any(
            sources & set(other.sources) and sources != set(other.sources) for other in layers
        )
        if feeds_others or any(layers[source].reaches_output for source in sources):
            continue
        rows.setdefault(sources, []).append(number)
        taken.add(number)
    for columns, found in rows.items():
        if not columns & taken:
            yield tuple(layers[n] for n in sorted(columns)), tuple(layers[n] for n in found)


def _why_no_pair(columns: Sequence[LayerCost], rows: Sequence[LayerCost], tp: int) -> str:
    """Why this column and row split would not be right; empty if it is."""
    width = rows[0].inputs
    for layer in (*columns, *rows):
        if layer.kind not in (LayerKind.LINEAR, LayerKind.TRANSPOSED):
            return f"a pair with a layer of kind {layer.kind}"
    for layer in columns:
        pieces = set(layer.pieces) or {layer.outputs}
        if len(pieces) > 1 or len(layer.pieces) not in (0, *_FUSED):
            return f"its outputs are taken apart into {' + '.join(map(str, layer.pieces))}"
        (piece,) = pieces
        if layer.heads % tp and layer.heads > 1:
            return f"{layer.heads} heads for {tp} ranks"
        if piece < tp:
            return f"{piece} features for {tp} ranks"
        if layer.heads == 1 and piece != width:
            return f"{piece} features become {width}"
        if _widest_used(layer) > (piece // layer.heads if layer.heads > 1 else 1):
            return "parameters between the layers span all features"
    return ""


def _widest_used(layer: LayerCost) -> float:
    """Elements of the largest parameter between this layer and the next; all count as of the dtype
    of its weight."""
    element_bytes = layer.weight_gradient_bytes / (layer.inputs * layer.outputs)
    return max(layer.after.parameter_gradient_bytes, default=0) / (element_bytes or 1.0)


def _elements(layer: LayerCost, unit: UnitProfile) -> float:
    """Of its weight; a convolution has more than one for each pair of channels."""
    each = unit.parameter_bytes / unit.parameters if unit.parameters else 1.0
    return max(layer.inputs * layer.outputs, layer.weight_bytes / each)


def _too_small(layer: LayerCost, unit: UnitProfile, tp: int, smallest: float) -> str:
    """Why it is not worth the traffic, or cannot be cut; empty if it is."""
    if layer.kind is LayerKind.EMBEDDING and not _takes_ids(layer, unit):
        return "it takes more than token ids"
    cut = layer.inputs if layer.kind is LayerKind.EMBEDDING else layer.outputs
    if _elements(layer, unit) < smallest:
        return f"a small layer ({layer.inputs} x {layer.outputs})"
    return f"{cut} features for {tp} ranks" if cut < tp else ""


def _as_pairs(
    units: Sequence[UnitProfile], found: Mapping[str, Style]
) -> Iterator[tuple[str, str]]:
    """Equal layers of repeated blocks as one pattern: a `*` for the number of the block."""
    patterns: dict[str, dict[str, Style | None]] = {}
    for unit in units:
        name = without_numbers(unit.name) if unit.is_block else unit.name
        for layer in _layers(unit):
            path = _joined(unit.name, layer.path)
            patterns.setdefault(_joined(name, layer.path), {})[path] = found.get(path)
    for pattern, styles in patterns.items():
        found_styles = set(styles.values())
        entries = dict.fromkeys([pattern], *found_styles) if len(found_styles) == 1 else styles
        yield from ((path, str(style)) for path, style in entries.items() if style is not None)


def _takes_ids(table: LayerCost, unit: UnitProfile) -> bool:
    """One row for every id; some tables of positions take masks, or make other sizes."""
    is_whole = Numerics.AS_BUILT in unit.costs and unit.parameters
    each = unit.parameter_bytes / unit.parameters if is_whole else BF16_BYTES
    wanted = table.input_bytes.at(1) / INDEX_BYTES * table.outputs * each
    return isclose(table.output_bytes.at(1), wanted) or not table.weight_bytes


BF16_BYTES = 2
INDEX_BYTES = 8  # torch looks up rows by int64


def _leave_logits_split(
    model: ModelProfile, units: Sequence[UnitProfile], found: dict[str, Style]
) -> None:
    """The head of a language model keeps its logits split, if only the loss takes them."""
    tables = {
        layer.inputs
        for unit in units
        for layer in _layers(unit)
        if layer.kind is LayerKind.EMBEDDING
    }
    for place, unit in enumerate(units):
        layers = _layers(unit)
        if len(layers) != 1 or layers[0].path or found.get(unit.name) != Style(kind=Kind.GATHER):
            continue
        head = layers[0]
        is_head = head.kind is LayerKind.LINEAR and head.outputs in tables and head.calls == 1
        if is_head and model.has_loss and _only_loss_takes(model, units, place):
            found[unit.name] = Style(kind=Kind.VOCAB)


def _only_loss_takes(model: ModelProfile, units: Sequence[UnitProfile], place: int) -> bool:
    """By the flow; of a profile without one, if it is the last unit."""
    called = [call.unit for call in model.flow.calls]
    if not called:
        return place == len(units) - 1
    return {
        called[edge.target] for edge in model.flow.edges if called[edge.source] == units[place].name
    } <= {LOSS}


def _leave_ties_whole(
    model: ModelProfile,
    units: Sequence[UnitProfile],
    found: dict[str, Style],
    why: dict[str, str],
) -> None:
    """A weight that several places use stays whole, unless all of them split it alike."""
    layers = {_joined(u.name, layer.path): (u.name, layer) for u in units for layer in _layers(u)}
    called = {unit.name for unit in units if any(c != UnitCost() for c in unit.costs.values())}
    elsewhere = {name for call in model.flow.calls for name in call.parameters}
    groups = [list(names) for names in model.tied]
    groups += [[name] for name in elsewhere if not any(name in names for names in model.tied)]
    while True:
        wrong = [
            path
            for names in groups
            if elsewhere & set(names) or not _is_cut_alike(names, found, layers, called)
            for path in (name.rpartition(".")[0] for name in names)
            if path in found
        ]
        if not wrong:
            return
        for path in wrong:
            found.pop(path, None)
            why[path] = "its weight is used in another way too"


def _is_cut_alike(
    names: Sequence[str],
    found: Mapping[str, Style],
    layers: Mapping[str, tuple[str, LayerCost]],
    called: set[str],
) -> bool:
    """Whether every unit that holds a parameter cuts it, and all in the same way."""
    cuts: dict[str, set[tuple[int, int] | None]] = {}
    for name in names:
        path, _, own = name.rpartition(".")
        unit = layers[path][0] if path in layers else _owner(path, called)
        if unit not in called:
            continue
        here = cuts.setdefault(unit, set())
        if path in layers and path in found:
            here.add(_cut(layers[path][1].kind, found[path], own))
    return len(set().union(*(here or {None} for here in cuts.values()))) <= 1


def _owner(path: str, units: set[str]) -> str:
    fitting = (unit for unit in units if f"{path}.".startswith(f"{unit}."))
    return max(fitting, key=len, default=GLUE)


def _cut(kind: LayerKind, style: Style, own: str) -> tuple[int, int] | None:
    """Dimension and packs of the cut of a layer's parameter; None if it stays whole."""
    if kind is LayerKind.EMBEDDING:
        return 0, 1
    inputs = 0 if kind is LayerKind.TRANSPOSED else 1
    if style.kind is Kind.ROW:
        return (inputs, style.packs) if own == "weight" else None
    return (1 - inputs if own == "weight" else 0), style.packs


def _joined(unit: str, path: str) -> str:
    return ".".join(part for part in (unit, path) if part)
