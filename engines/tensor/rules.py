"""Rules for splitting the layers of a model over the tp axis, read off its profile. No torch here.

The advisor prices the split that they give; `engines.tensor.proposal` proves it on the modules, and
falls back by the same rules where a module's own code cannot run on a share of its features.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from math import isclose
from typing import NamedTuple

from engines.tensor.styles import Kind, Style, as_pairs, without_numbers
from engines.tensor.tie_rules import joined, layers_of, owner, split_differently
from profiles.model.layers import INPUT, LayerCost, LayerKind
from profiles.model.profile import (
    GLUE,
    LOSS,
    SMALLEST_SHARD_FRACTION,
    ModelProfile,
    Numerics,
    UnitProfile,
)

USED_ELSEWHERE = "its weight is used in another way too"
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


@dataclass(frozen=True, slots=True)
class Pair:
    """Layers `columns` that nothing but `rows` takes, and that alone feed them, by their paths.

    Attributes:
        tables: layers with a column for every head, which bias the scores of attention.
        counts: of heads of the columns, from few to many; 1 where the features have none.
    """

    columns: tuple[str, ...]
    rows: tuple[str, ...]
    tables: tuple[str, ...] = ()
    counts: tuple[int, ...] = (1,)

    @property
    def heads(self) -> int:
        """Heads of the queries."""
        return self.counts[-1]

    @property
    def layers(self) -> tuple[str, ...]:
        return *self.columns, *self.tables, *self.rows


@dataclass(frozen=True, slots=True)
class UnitSplit:
    """A unit's layers, by their paths in it.

    Attributes:
        pairs: those that may be split column-wise and row-wise, with their `styles`.
        alone: styles of layers outside a pair, also of those in `pairs` if a pair is not taken.
        why: reasons against a pair or, of a layer that is not in `alone`, against any split.
    """

    pairs: tuple[Pair, ...] = ()
    styles: Mapping[str, Style] = field(default_factory=dict)
    alone: Mapping[str, Style] = field(default_factory=dict)
    why: Mapping[str, str] = field(default_factory=dict)

    def without(self, whole: Collection[str]) -> UnitSplit:
        """The same with the layers `whole` left whole, and thus no pair with one of them."""
        if not whole:
            return self
        return UnitSplit(
            tuple(p for p in self.pairs if not set(p.layers) & set(whole)),
            {path: style for path, style in self.styles.items() if path not in whole},
            {path: style for path, style in self.alone.items() if path not in whole},
            {**self.why, **dict.fromkeys(whole, USED_ELSEWHERE)},
        )

    def with_pairs(self, pairs: Sequence[Pair]) -> tuple[dict[str, Style], dict[str, str]]:
        """The styles of all layers if only `pairs` are taken, and why others are in none."""
        paired = {path for pair in pairs for path in pair.layers}
        styles = {path: style for path, style in self.styles.items() if path in paired}
        styles |= {path: style for path, style in self.alone.items() if path not in paired}
        why = {path: reason for path, reason in self.why.items() if path not in paired}
        for path, style in styles.items():
            if style.kind is Kind.GATHER and path:
                why.setdefault(path, "in no pair of layers")
        return styles, why


def proposed_styles(model: ModelProfile, tp: int) -> tuple[tuple[str, str], ...]:
    """`proposed_split(model, tp).styles`; empty where nothing can be split."""
    return proposed_split(model, tp).styles


def proposed_split(model: ModelProfile, tp: int) -> Split:
    """Column and row pairs where the flow of a unit has them; embeddings and the head by the
    vocabulary; other large layers with gathered outputs; tied weights alike or not at all."""
    units, splits = split_units(model), unit_splits(model, tp)
    whole: dict[str, set[str]] = {}  # layers by their unit
    while True:
        styles: dict[str, Style] = {}
        why: dict[str, str] = {}
        for name, split in splits.items():
            inside = split.without(whole.get(name, ()))
            inner, reasons = inside.with_pairs(inside.pairs)
            styles |= {joined(name, path): style for path, style in inner.items()}
            why |= {joined(name, path): reason for path, reason in reasons.items()}
        leave_logits_split(model, styles)
        before = {unit: set(paths) for unit, paths in whole.items()}
        for path in split_differently(model, units, styles):
            unit = owner(path, [unit.name for unit in units])
            whole.setdefault(unit, set()).add(path.removeprefix(unit).removeprefix("."))
        if whole == before:
            break
    notes = {
        Whole(without_numbers(path), str(styles.get(path, "whole")), reason): None
        for path, reason in why.items()
    }
    names = (joined(unit.name, layer.path) for unit in units for layer in layers_of(unit))
    each = {path: (style,) for path, style in styles.items()}
    return Split(as_pairs(each, names, blocks=block_names(model)), tuple(notes))


def split_units(model: ModelProfile) -> list[UnitProfile]:
    """The units whose layers may be split: a proof holds for the path that was followed."""
    whole = {GLUE, LOSS, *(read.unit for read in model.reads)}
    return [unit for unit in model.units if unit.name not in whole]


def unit_splits(model: ModelProfile, tp: int) -> dict[str, UnitSplit]:
    """Splits of the layers of every unit, each unit by itself."""
    units = split_units(model)
    sizes = (_elements(layer, unit) for unit in units for layer in layers_of(unit))
    smallest = SMALLEST_SHARD_FRACTION * max(sizes, default=0)
    given = _heads_given(model)
    known: dict[tuple[int, frozenset[int]], UnitSplit] = {}
    splits = {}
    for unit in units:
        layers, heads = layers_of(unit), given.get(unit.name, frozenset())
        key = id(layers), heads  # of equal blocks the layers are one object
        if key not in known:
            known[key] = _split_unit(unit, layers, tp=tp, smallest=smallest, given=heads)
        splits[unit.name] = known[key]
    return splits


def pairs_of(model: ModelProfile, unit: str) -> list[Pair]:
    """The column and row pairs that the flow of a unit has, whether or not they can be split."""
    layers = next((layers_of(each) for each in split_units(model) if each.name == unit), ())
    given = _heads_given(model).get(unit, frozenset())
    return [each.pair for each in _pairs(layers, given)]


def _heads_given(model: ModelProfile) -> dict[str, frozenset[int]]:
    """By unit, the sizes that may count heads of tensors that it takes from an earlier call.

    Scores get a bias of (1, heads, queries, keys), which T5 hands from block to block.
    """
    by_unit: dict[str, set[int]] = {}
    for edge in model.flow.edges:
        shape = model.flow.value(edge).shape
        if len(shape) == SCORES_RANK:
            by_unit.setdefault(model.flow.calls[edge.target].unit, set()).add(shape[1])
    return {unit: frozenset(sizes - {1}) for unit, sizes in by_unit.items()}


SCORES_RANK = 4  # (samples, heads, queries, keys)


def _split_unit(
    unit: UnitProfile,
    layers: Sequence[LayerCost],
    *,
    tp: int,
    smallest: float,
    given: frozenset[int],
) -> UnitSplit:
    pairs: list[Pair] = []
    styles: dict[str, Style] = {}
    alone: dict[str, Style] = {}
    why: dict[str, str] = {}
    for costs in _pairs(layers, given):
        pair, columns = costs.pair, costs.columns
        reason = _why_no_pair(columns, costs.rows, tp)
        if reason:
            why |= dict.fromkeys(pair.layers, reason)
            continue
        pairs.append(pair)
        styles |= dict.fromkeys(pair.rows, Style(kind=Kind.ROW))
        styles |= dict.fromkeys(pair.tables, Style(kind=Kind.COLUMN))
        for layer in columns:
            style = Style(kind=Kind.COLUMN, packs=len(layer.pieces) or 1)
            if _is_repeated(layer, columns, tp):
                style = Style(kind=Kind.HEADS, packs=layer.heads)
            styles[layer.path] = style
    for layer in layers:
        reason = _too_small(layer, unit, tp, smallest)
        if reason:
            why[layer.path] = reason
        else:
            is_table = layer.kind is LayerKind.EMBEDDING
            alone[layer.path] = Style(kind=Kind.VOCAB if is_table else Kind.GATHER)
    return UnitSplit(tuple(pairs), styles, alone, why)


class _PairCosts(NamedTuple):
    """The layers of a `Pair`."""

    columns: tuple[LayerCost, ...]
    rows: tuple[LayerCost, ...]
    tables: tuple[LayerCost, ...]

    @property
    def pair(self) -> Pair:
        columns, rows, tables = (tuple(layer.path for layer in part) for part in self)
        return Pair(columns, rows, tables, tuple(sorted({layer.heads for layer in self.columns})))


def _pairs(layers: Sequence[LayerCost], given: frozenset[int]) -> Iterator[_PairCosts]:
    """Layers that nothing but the second ones take, and that alone feed them, but for biases by
    head: those of tables, and those of the arguments where `given` has the number of heads.

    Layers join in the order of their calls; one that is a row already is nobody's column.
    """
    rows: dict[frozenset[int], list[int]] = {}
    taken: set[int] = set()
    for number, layer in enumerate(layers):
        sources = frozenset(layer.sources)
        if _heads_of(layers, sources) in given:
            sources -= {INPUT}
        if not sources or INPUT in sources or sources & taken or number in sources:
            continue
        feeds_others = any(
            sources & set(other.sources) and set(layer.sources) != set(other.sources)
            for other in layers
        )
        tables = _tables(layers, sources)
        if feeds_others or any(layers[source].reaches_output for source in sources - tables):
            continue
        rows.setdefault(sources, []).append(number)
        taken.add(number)
    for sources, fed in rows.items():
        if not sources & taken:
            tables = _tables(layers, sources)
            parts = sorted(sources - tables), fed, sorted(tables)
            yield _PairCosts(*(tuple(layers[n] for n in part) for part in parts))


def _heads_of(layers: Sequence[LayerCost], sources: Collection[int]) -> int:
    """The most heads that the layers `sources` have; 1 where there are none."""
    return max((layers[source].heads for source in sources if source != INPUT), default=1)


def _tables(layers: Sequence[LayerCost], sources: frozenset[int]) -> frozenset[int]:
    """Those of `sources` that have a column for every head of the others."""
    heads = _heads_of(layers, sources)
    if heads == 1:
        return frozenset()
    return frozenset(n for n in sources if layers[n].heads == 1 and layers[n].outputs == heads)


def _why_no_pair(columns: Sequence[LayerCost], rows: Sequence[LayerCost], tp: int) -> str:
    """The reason why this column and row split would be wrong; empty if it is right."""
    taken = rows[0].inputs
    for layer in (*columns, *rows):
        if layer.kind not in (LayerKind.LINEAR, LayerKind.TRANSPOSED):
            return f"a pair with a layer of kind {layer.kind}"
    for layer in columns:
        pieces = set(layer.pieces) or {layer.outputs}
        if len(pieces) > 1 or len(layer.pieces) not in (0, *_FUSED):
            return f"its outputs are split into {' + '.join(map(str, layer.pieces))}"
        (piece,) = pieces
        is_repeated = _is_repeated(layer, columns, tp)
        if layer.heads % tp and layer.heads > 1 and not is_repeated:
            return f"{layer.heads} heads for {tp} ranks"
        if piece < tp:
            return f"{piece} features for {tp} ranks"
        if layer.heads == 1 and piece != taken:
            return f"{piece} features become {taken}"
        width = piece // layer.heads if layer.heads > 1 else 1
        heads = max(layer.heads for layer in columns)
        if any(used > width and not is_by_head(used, heads, piece) for used in _used(layer)):
            return "parameters between the layers span all features"
    return ""


def is_by_head(elements: float, heads: int, features: int) -> bool:
    """True if a parameter of so many elements has a number for each of the heads, as a table of
    positions: a norm has one for each of the features, or of a head's."""
    is_of_head = elements == features // heads
    return heads > 1 and not elements % heads and bool(elements % features) and not is_of_head


def _is_repeated(layer: LayerCost, columns: Sequence[LayerCost], tp: int) -> bool:
    """True if each of its heads, of keys or values, is read by the queries of several ranks."""
    is_plain = layer.kind is LayerKind.LINEAR and not layer.pieces
    is_few = 1 < layer.heads < tp and tp % layer.heads == 0
    return is_plain and is_few and any(other.heads % tp == 0 for other in columns)


def _used(layer: LayerCost) -> list[float]:
    """Elements of the parameters between this layer and the next; all count as of the dtype of its
    weight."""
    element_bytes = layer.weight_gradient_bytes / (layer.inputs * layer.outputs) or 1.0
    return [nbytes / element_bytes for nbytes in layer.after.parameter_gradient_bytes]


def _elements(layer: LayerCost, unit: UnitProfile) -> float:
    """Elements of its weight; a convolution has more than one for each pair of channels."""
    each = unit.parameter_bytes / unit.parameters if unit.parameters else 1.0
    return max(layer.inputs * layer.outputs, layer.weight_bytes / each)


def _too_small(layer: LayerCost, unit: UnitProfile, tp: int, smallest: float) -> str:
    """The reason why it is not worth the traffic, or cannot be cut; else empty."""
    if layer.kind is LayerKind.EMBEDDING and not _takes_ids(layer, unit):
        return "it takes more than token ids"
    cut = layer.inputs if layer.kind is LayerKind.EMBEDDING else layer.outputs
    if _elements(layer, unit) < smallest:
        return f"a small layer ({layer.inputs} x {layer.outputs})"
    return f"{cut} features for {tp} ranks" if cut < tp else ""


def block_names(model: ModelProfile) -> frozenset[str]:
    """Paths of the repeated blocks, for `as_pairs`."""
    return frozenset(unit.name for unit in model.units if unit.is_block)


def _takes_ids(table: LayerCost, unit: UnitProfile) -> bool:
    """One row for every id; some tables of positions take masks, or make other sizes."""
    is_whole = Numerics.AS_BUILT in unit.costs and unit.parameters
    each = unit.parameter_bytes / unit.parameters if is_whole else BF16_BYTES
    wanted = table.input_bytes.at(1) / INDEX_BYTES * table.outputs * each
    return isclose(table.output_bytes.at(1), wanted) or not table.weight_bytes


BF16_BYTES = 2
INDEX_BYTES = 8  # torch looks up rows by int64


def leave_logits_split(model: ModelProfile, styles: dict[str, Style]) -> None:
    """The head of a language model keeps its logits split, if only the loss takes them."""
    if model.reads:  # it may be the logits that other code acts on
        return
    units = split_units(model)
    tables = {
        layer.inputs
        for unit in units
        for layer in layers_of(unit)
        if layer.kind is LayerKind.EMBEDDING
    }
    for place, unit in enumerate(units):
        layers = layers_of(unit)
        if len(layers) != 1 or layers[0].path or styles.get(unit.name) != Style(kind=Kind.GATHER):
            continue
        head = layers[0]
        is_head = head.kind is LayerKind.LINEAR and head.outputs in tables and head.calls == 1
        if is_head and model.has_loss and _only_loss_takes(model, units, place):
            styles[unit.name] = Style(kind=Kind.VOCAB)


def _only_loss_takes(model: ModelProfile, units: Sequence[UnitProfile], place: int) -> bool:
    """By the flow; of a profile without one, if it is the last unit."""
    called = [call.unit for call in model.flow.calls]
    if not called:
        return place == len(units) - 1
    return {
        called[edge.target] for edge in model.flow.edges if called[edge.source] == units[place].name
    } <= {LOSS}
