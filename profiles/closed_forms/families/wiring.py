"""Dataflow between the units of a run, with the layers that were not run put in."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from profiles.closed_forms.families.tape import Array, Node
from profiles.model.affine import Affine
from profiles.model.flow import GLUE, LOSS, Edge, Flow, UnitCall, Value

Source = tuple[int, int]
"""(call, value): which output of which call."""


@dataclass(frozen=True, slots=True)
class Sketch:
    """A call as it was seen: its unit, the outputs that reach it, and what it hands on."""

    unit: str
    sources: tuple[Source, ...]
    values: tuple[Value, ...]


class Wiring:
    """Notes calls while a model runs, and nothing that would keep memory alive.

    Outputs are followed where gradients pass: what no parameter feeds never crosses a border of
    stages, it is made anew on the other side.
    """

    def __init__(self) -> None:
        self.calls: list[Sketch] = []
        self._made_by: dict[tuple[float, int], Source] = {}

    def sources(self, arrays: Sequence[Array]) -> tuple[Source, ...]:
        """The outputs of earlier calls that reach these arrays, through glue alone."""
        waiting = [(array.node, array.index) for array in arrays if array.node is not None]
        seen: set[tuple[float, int]] = set()
        reached: set[Source] = set()
        while waiting:
            node, index = waiting.pop()
            key = (node.sequence, index)
            if key in seen:
                continue
            seen.add(key)
            if key in self._made_by:
                reached.add(self._made_by[key])
            elif node.scope.name == GLUE:
                waiting += _parents(node)
        return tuple(sorted(reached))

    def note(self, unit: str, sources: tuple[Source, ...], outputs: Sequence[Array]) -> None:
        """A call that is over."""
        for position, array in enumerate(outputs):
            if array.node is not None:
                self._made_by[array.node.sequence, array.index] = (len(self.calls), position)
        values = tuple(_value(array) for array in outputs)
        self.calls.append(Sketch(unit, sources, values))

    def finish(self, loss: Array) -> None:
        """The loss, which is made of what the last calls handed on."""
        sources = self.sources([loss])
        self.note(LOSS, sources, [loss])


def flow_of(once: Wiring, twice: Wiring, samples: int) -> Flow:
    """The flow of two runs, at a batch of `samples` and at twice it."""
    calls = [
        Sketch(
            one.unit,
            one.sources,
            tuple(_grown(a, b, samples) for a, b in zip(one.values, two.values, strict=True)),
        )
        for one, two in zip(once.calls, twice.calls, strict=True)
    ]
    calls = list(_with_all_layers(calls))
    return Flow(
        calls=tuple(UnitCall(unit=call.unit, values=call.values) for call in calls),
        edges=tuple(
            Edge(source=source, value=value, target=target)
            for target, call in enumerate(calls)
            for source, value in call.sources
        ),
    )


def _with_all_layers(calls: Sequence[Sketch]) -> Iterator[Sketch]:
    """Layers that were not run, between those that were: each takes from the one before it what
    the next one took in the run."""
    number: dict[int, int] = {}  # of a call, among all of them
    latest: dict[str, int] = {}  # layer of each stack
    count = 0
    for position, call in enumerate(calls):
        stack, index = _layer(call.unit)
        first = latest.get(stack, index - 1) + 1 if index >= 0 else index
        for layer in range(first, index + 1):
            sources = []
            for source, value in call.sources:
                is_own = index >= 0 and _layer(calls[source].unit)[0] == stack
                sources.append((count - 1 if is_own else number[source], value))
            unit = f"{stack}.{layer}" if index >= 0 else call.unit
            yield Sketch(unit, tuple(sources), call.values)
            count += 1
        number[position] = count - 1
        if index >= 0:
            latest[stack] = index


def _layer(unit: str) -> tuple[str, int]:
    """The stack and number of a layer; -1 for other units."""
    stack, _, number = unit.rpartition(".")
    return (stack, int(number)) if number.isdecimal() else (unit, -1)


def _parents(node: Node) -> list[tuple[Node, int]]:
    return [parent for parent in node.parents if parent is not None]


def _value(array: Array) -> Value:
    has_gradient = array.node is not None
    return Value(
        shape=array.shape,
        dtype=array.dtype.value,
        bytes=Affine(fixed=float(array.size_bytes)),
        needs_gradient=has_gradient,
        depends_on_parameters=has_gradient,
    )


def _grown(once: Value, twice: Value, samples: int) -> Value:
    more = twice.bytes.fixed - once.bytes.fixed
    size = Affine(fixed=once.bytes.fixed - more, per_sample=more / samples)
    return once.model_copy(update={"bytes": size})
