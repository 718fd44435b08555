"""Which layers of a unit feed which: where column-wise layers may be followed by row-wise ones."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from torch import nn

from engines.tensor.layers import can_split
from engines.tensor.specimen import Specimen, mark
from profiles.torch_compat import map_tensors, tensors_in


@dataclass(frozen=True, slots=True)
class Pair:
    """Layers `columns` that nothing but `rows` takes, and that alone feed them, by their paths."""

    columns: tuple[str, ...]
    rows: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Wiring:
    """The layers that a call of a unit goes through, in order, and the pairs among them."""

    layers: tuple[str, ...]
    pairs: tuple[Pair, ...]


def wiring_of(specimen: Specimen) -> Wiring:
    """Run the specimen once and follow its graph of gradients from layer to layer."""
    unit = specimen.fresh()
    layers = {path: module for path, module in unit.named_modules() if can_split(module)}
    before: dict[str, list[Any]] = {}  # nodes at the inputs of each layer
    after: dict[Any, str] = {}  # nodes at the outputs
    hooks = []
    for path, module in layers.items():

        def enter(module: nn.Module, args: Any, *, path: str = path) -> Any:
            marked = map_tensors(mark, args)
            nodes = [tensor.grad_fn for tensor in tensors_in(marked) if tensor.requires_grad]
            before.setdefault(path, []).extend(nodes)
            return marked

        def leave(module: nn.Module, args: Any, output: Any, *, path: str = path) -> Any:
            marked = map_tensors(mark, output)
            after.update((tensor.grad_fn, path) for tensor in tensors_in(marked))
            return marked

        hooks += [module.register_forward_pre_hook(enter), module.register_forward_hook(leave)]
    args, kwargs, given = specimen.inputs()
    leaves = {id(tensor) for tensor in given}
    outputs = [t.grad_fn for t in specimen.outputs(unit(*args, **kwargs)) if t.requires_grad]
    feeds = {path: _sources(nodes, after, leaves) for path, nodes in before.items()}
    return Wiring(tuple(before), _pairs(feeds, _sources(outputs, after, leaves)))


_INPUT = ""
"""Stands for the arguments of the unit among the sources of a layer."""


def _sources(nodes: Sequence[Any], after: dict[Any, str], leaves: set[int]) -> frozenset[str]:
    """The layers whose outputs reach `nodes` without passing through another layer."""
    found, seen, left = set(), set(), list(nodes)
    while left:
        node = left.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        if node in after:
            found.add(after[node])
            continue
        if id(getattr(node, "variable", None)) in leaves:
            found.add(_INPUT)
        left += [following for following, _ in node.next_functions]
    return frozenset(found)


def _pairs(feeds: dict[str, frozenset[str]], of_outputs: frozenset[str]) -> tuple[Pair, ...]:
    """Layers join in the order of their calls; one that is a row already is nobody's column."""
    columns: dict[frozenset[str], list[str]] = {}
    taken: set[str] = set()
    for path, sources in feeds.items():
        if not sources or _INPUT in sources or sources & taken or path in sources:
            continue
        others = [p for p, s in feeds.items() if s & sources and s != sources]
        if others or sources & of_outputs:
            continue
        columns.setdefault(sources, []).append(path)
        taken.add(path)
    order = list(feeds)
    return tuple(
        Pair(tuple(sorted(found, key=order.index)), tuple(rows))
        for found, rows in columns.items()
        if not found & taken
    )
