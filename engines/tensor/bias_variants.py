"""Variants of the split of a pair of layers by which a rank takes its heads of biases by head.

The parameters, arguments and returned tensors with a number for every head are looked for from the
module around the column-wise layers outwards; those that the pair uses are found by trial.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import islice
from typing import Any

import torch
from torch import Tensor, nn

from engines.tensor.head_bias import has_heads, returned
from engines.tensor.layers import can_split
from engines.tensor.rules import SCORES_RANK, Pair
from engines.tensor.styles import Kind, Style, ordered
from engines.tensor.token_rules import around
from engines.tensor.unit_copy import UnitCopy
from engines.tensor.variants import Styles, variants
from profiles.torch_compat import tensors_in

Names = dict[str, tuple[str, ...]]
"""What has a number for every head, by module path."""


COUNTS = 3
"""Of the variants by counts (none, heads, and features too), those that are tried with each choice:
a pair that cannot be split at all would be tried for minutes."""


def split_variants(
    copy: UnitCopy, pair: Pair, styles: Mapping[str, Style], *, size: int
) -> Iterator[Styles]:
    """The variants of `pair`; then those by which a rank takes its heads of other tensors."""
    yield from variants(pair, styles, copy.unit, size=size)
    if pair.heads < 2 or pair.heads % size:
        return
    for names in _choices(copy, pair):
        bias = {
            path: (Style(kind=Kind.BIAS, packs=pair.heads, sizes=own),)
            for path, own in names.items()
        }
        for chosen in islice(variants(pair, styles, copy.unit, size=size), COUNTS):
            paths = {**chosen, **bias}
            yield {p: ordered((*chosen.get(p, ()), *bias.get(p, ()))) for p in paths}


def _choices(copy: UnitCopy, pair: Pair) -> list[Names]:
    """Tables, which cost no exchange; arguments; both; and with what is returned by head."""
    modules = _outwards(around(pair.columns))
    tables = [choice for module in modules for choice in _tables(copy.unit, module, pair.heads)]
    calls = _calls(copy, modules, pair.heads)
    given = [names for module in modules for names in _arguments(module, calls)]
    both = [_joined(table, names) for table in tables[:1] for names in given[:1]]
    choices = [*tables, *given, *both]
    if modules[0] in calls and calls[modules[0]].returned:
        handed_on = {modules[0]: calls[modules[0]].returned}
        choices += [_joined(handed_on, names) for names in ({}, *tables[:1], *given[:1], *both)]
    unique: list[Names] = []
    for names in choices:
        if names and names not in unique:
            unique.append(names)
    return unique


def _joined(one: Names, two: Names) -> Names:
    paths = sorted({*one, *two})
    return {p: tuple(sorted({*one.get(p, ()), *two.get(p, ())})) for p in paths}


def _outwards(path: str) -> list[str]:
    """The module at `path` and those that it lies in, up to the unit."""
    modules = [path]
    while path:
        path = path.rpartition(".")[0]
        modules.append(path)
    return modules


def _tables(unit: nn.Module, path: str, heads: int) -> list[Names]:
    """Parameters, then buffers too, within the module at `path` with a dimension of `heads`, but
    for those of layers."""
    own: Names = {}
    more: Names = {}
    for inner, module in unit.get_submodule(path).named_modules(prefix=path):
        if can_split(module):
            continue
        for tensors, names in (
            (module.named_parameters(recurse=False), own),
            (module.named_buffers(recurse=False), more),
        ):
            by_head = tuple(name for name, tensor in tensors if heads in tensor.shape)
            names |= {inner: by_head} if by_head else {}
    return [names for names in (own, _joined(own, more) if more else {}) if names]


@dataclass(slots=True)
class _Call:
    """Names of the tensors by head that a module takes and returns."""

    arguments: dict[str, Tensor] = field(default_factory=dict)
    returned: tuple[str, ...] = ()


def _arguments(path: str, calls: Mapping[str, _Call]) -> Iterator[Names]:
    """The arguments with the shape of scores; then all; then those with samples before the heads,
    each alone: hidden values of as many rows look alike."""
    by_head = calls[path].arguments if path in calls else {}
    scores = tuple(sorted(n for n, t in by_head.items() if t.dim() >= SCORES_RANK))
    others = [name for name in by_head if name not in scores]
    for names in (scores, tuple(sorted(by_head)), *((name,) for name in others)):
        if names:
            yield {path: names}


def _calls(copy: UnitCopy, paths: Sequence[str], heads: int) -> dict[str, _Call]:
    """The calls of the modules at `paths`, the innermost first, in a run of the unit. What one
    hands to the next is an argument of that alone."""
    calls: dict[str, _Call] = {}
    given: dict[str, dict[str, Tensor]] = {}
    unit = copy.fresh()

    def enter(path: str, module: nn.Module, args: Any, kwargs: Any) -> None:
        known = inspect.signature(module.forward).parameters
        named = {**dict(zip(known, args, strict=False)), **kwargs}
        given[path] = {n: t for n, t in named.items() if isinstance(t, Tensor) and n in known}

    def leave(path: str, output: object) -> None:
        taken = {id(tensor) for each in given.values() for tensor in each.values()}
        names = (
            returned(number)
            for number, tensor in enumerate(tensors_in(output))
            if tensor.dim() >= SCORES_RANK and has_heads(tensor, heads) and id(tensor) not in taken
        )
        calls[path] = _Call(returned=tuple(names))

    for path in paths:
        module = unit.get_submodule(path)
        module.register_forward_pre_hook(functools.partial(enter, path), with_kwargs=True)
        module.register_forward_hook(lambda _m, _a, output, path=path: leave(path, output))
    args, kwargs, _ = copy.inputs()
    with torch.no_grad(), copy.running():
        unit(*args, **kwargs)
    inside: set[int] = set()
    for path in (path for path in paths if path in calls):
        others = list(given[path].items())[1:]  # the first has the hidden values
        by_head = {n: t for n, t in others if has_heads(t, heads) and id(t) not in inside}
        inside |= {id(tensor) for tensor in given[path].values()}
        calls[path].arguments = by_head
    return calls
