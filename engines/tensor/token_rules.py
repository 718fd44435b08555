"""Rules for splitting blocks by tokens over the tp axis, read off a profile. No torch here.

Sequence parallelism (arXiv:2205.05198). The advisor prices what they give, the engine proves it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence

from engines.tensor.rules import Pair, block_names, pairs_of, split_units
from engines.tensor.styles import (
    Kind,
    Style,
    as_pairs,
    by_pattern,
    cutting,
    matches,
    ordered,
    without_numbers,
)
from engines.tensor.tie_rules import joined, layers_of
from profiles.model.flow import Flow, Value
from profiles.model.profile import ModelProfile, UnitProfile

Pairs = tuple[tuple[str, str], ...]
"""As `Plan.tensor_styles`."""
SPLIT = Style(kind=Kind.SEQUENCE)
_HIDDEN_RANK = 3  # (rows, tokens, features)


def split_tokens(model: ModelProfile, pairs: Pairs, tp: int) -> Pairs:
    """The split of layers `pairs`, with the styles of sequence parallelism for the blocks that can
    have them.

    Those are blocks of which all split layers are columns and rows, on shares of the tokens.
    """
    if splits_tokens(pairs):
        return pairs
    styles: dict[str, tuple[Style, ...]] = {}
    known: dict[tuple[str, int], list[str] | None] = {}
    blocks = []
    for unit in split_units(model):
        key = without_numbers(unit.name), id(layers_of(unit))  # equal blocks are split alike
        if key not in known:
            known[key] = _joined(model, unit, pairs, tp)
        places = known[key]
        if places is not None:
            blocks.append(unit.name)
            for place in places:
                styles[joined(unit.name, place)] = (Style(kind=Kind.JOINED),)
    for path, borders in _borders(model, blocks).items():
        styles[path] = ordered((SPLIT, *borders))
    names = dict.fromkeys([*(unit.name for unit in model.units), *styles])
    in_order = {name: styles[name] for name in names if name in styles}
    return by_pattern((*pairs, *as_pairs(in_order, names, blocks=block_names(model))))


def splits_tokens(pairs: Pairs) -> bool:
    """True if the styles of a plan split blocks by tokens."""
    return any(text == Kind.SEQUENCE for _, text in pairs)


def around(paths: Sequence[str]) -> str:
    """The innermost module that all of `paths` lie in."""
    common: list[str] = []
    for parts in zip(*(path.split(".")[:-1] for path in paths), strict=False):
        if len(set(parts)) > 1:
            break
        common.append(parts[0])
    return ".".join(common)


def join_places(pair: Pair) -> tuple[str, ...]:
    """The modules that take the whole sequence for a pair: the one around its columns, which may
    read the length, or else these."""
    module = around(pair.columns)
    return (module,) if module else pair.columns


def _joined(model: ModelProfile, unit: UnitProfile, pairs: Pairs, tp: int) -> list[str] | None:
    """Modules of a block that take whole sequences; None if it cannot be split by tokens."""
    if not unit.is_block or unit.experts or _why_no_shares(model, unit.name, tp):
        return None
    if not pairs_take_one_tensor(model, unit.name):
        return None
    kinds = {}
    for layer in layers_of(unit):
        path = joined(unit.name, layer.path)
        style = cutting(Style.parse(text) for pattern, text in pairs if matches(pattern, path))
        if style is not None:
            kinds[layer.path] = style.kind
    if set(kinds.values()) - {Kind.HEADS} != {Kind.COLUMN, Kind.ROW}:
        return None
    split = [pair for pair in pairs_of(model, unit.name) if pair.columns[0] in kinds]
    return [place for pair in split for place in join_places(pair)]


def pairs_take_one_tensor(model: ModelProfile, unit: str) -> bool:
    """True if the columns of each pair take the same tensor.

    Where a decoder attends to an encoder, queries and keys are made of different ones, and the
    gradient of the second would have a part on every rank.
    """
    sources = {
        layer.path: layer.sources
        for each in split_units(model)
        if each.name == unit
        for layer in layers_of(each)
    }
    pairs = pairs_of(model, unit)
    return all(len({sources[path] for path in pair.columns}) == 1 for pair in pairs)


def why_whole_tokens(model: ModelProfile, tp: int) -> str:
    """The reason why no block of a model is split by tokens over `tp` ranks."""
    blocks = [unit for unit in split_units(model) if unit.is_block]
    reasons = [_why_no_shares(model, unit.name, tp) for unit in blocks]
    if blocks and all(unit.experts for unit in blocks):
        return f"the blocks of {model.name} have experts, which are not split by tokens"
    if blocks and all(reasons):
        return reasons[0]
    return f"no block of {model.name} has all its split layers in pairs of columns and rows"


def _why_no_shares(model: ModelProfile, unit: str, tp: int) -> str:
    """The reason why the tokens of a block have no shares; empty if they have."""
    tokens = tokens_of(model, unit)
    if tokens is None:
        return f"`{unit}` returns no hidden values of (rows, tokens, features)"
    if tokens < tp:
        return f"{tokens} tokens have no share for each of {tp} ranks"
    return ""


def tokens_of(model: ModelProfile, unit: str) -> int | None:
    """The tokens of a sample that a unit returns; None if it returns no hidden values."""
    call = model.flow.first_call(unit)
    if call is None:
        return int(model.tokens_per_sample or 0)
    hidden = hidden_value(model.flow, call)
    shape = () if hidden is None else model.flow.calls[call].values[hidden].shape
    return shape[1] if len(shape) == _HIDDEN_RANK else None


def hidden_value(flow: Flow, call: int) -> int | None:
    """The number of the hidden values among those of a call: its first floating-point tensor."""
    values = flow.calls[call].values
    return next((n for n, value in enumerate(values) if "float" in value.dtype), None)


def _borders(model: ModelProfile, blocks: Sequence[str]) -> dict[str, tuple[Style, ...]]:
    """`ENTRY` and `EXIT` of `blocks`, which are split by tokens, by the flow; without one a block
    follows the one before it."""
    follows = dict(_chain(model.flow, blocks) if model.flow.calls else _neighbours(model, blocks))
    hands_on = set(follows.values())
    return {
        block: (
            *([] if block in follows else [Style(kind=Kind.ENTRY)]),
            *([] if block in hands_on else [Style(kind=Kind.EXIT)]),
        )
        for block in blocks
    }


def _chain(flow: Flow, blocks: Sequence[str]) -> Iterator[tuple[str, str]]:
    """(block, the one whose hidden values it takes), where these go nowhere else.

    A profile does not show glue: a block that takes more than one tensor of that shape with a
    gradient may take a sum of them.
    """
    counts = Counter(call.unit for call in flow.calls)
    number = {block: flow.first_calls[block] for block in blocks if counts[block] == 1}
    block_of = {n: block for block, n in number.items()}
    taken: dict[int, list[Value]] = {}
    takers: dict[tuple[int, int], list[int]] = {}
    for edge in flow.edges:
        taken.setdefault(edge.target, []).append(flow.value(edge))
        takers.setdefault((edge.source, edge.value), []).append(edge.target)

    def takes_alone(target: int, value: Value) -> bool:
        alike = [v for v in taken[target] if v.needs_gradient and v.shape == value.shape]
        return target in block_of and len(alike) == 1

    for block, source in number.items():
        hidden = hidden_value(flow, source)
        if hidden is None:
            continue
        value = flow.calls[source].values[hidden]
        targets = takers.get((source, hidden), [])
        if all(takes_alone(target, value) for target in targets):
            yield from ((block_of[target], block) for target in targets)


def _neighbours(model: ModelProfile, blocks: Sequence[str]) -> Iterator[tuple[str, str]]:
    split = set(blocks)
    for before, unit in zip(model.units, model.units[1:], strict=False):
        is_pair = {before.name, unit.name} <= split
        if is_pair and without_numbers(before.name) == without_numbers(unit.name):
            yield unit.name, before.name
