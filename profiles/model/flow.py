"""Dataflow between units: which outputs feed which later calls, and what crosses a cut."""

from __future__ import annotations

import bisect
from collections import Counter
from functools import cached_property
from typing import TYPE_CHECKING, NamedTuple, Self

from pydantic import NonNegativeInt, model_validator

from profiles.errors import InputError
from profiles.model.affine import Affine
from profiles.record import Record

if TYPE_CHECKING:
    import networkx as nx
    import numpy as np
    from numpy.typing import NDArray

GLUE = "(glue)"
"""The pseudo-unit of operations that run outside every unit: residual sums, views, masks."""
LOSS = "(loss)"
"""The pseudo-unit of the loss function."""

# Viewers of mermaid stop at 500 edges by default (its `maxEdges`).
EDGES_DRAWN = 500


class Value(Record):
    """A tensor that a call hands on.

    Attributes:
        shape: at the sample's batch size.
        bytes: of the tensor; one that is the same for every batch has nothing per sample.
        is_overwritten: later code changes it in place (an in-place ReLU on a residual).
        needs_gradient: a gradient comes back for it.
        depends_on_parameters: or on random numbers that its call draws; else it follows from the
            batch alone (rotary tables, masks).
        kept_by: call that autograd keeps it for, the first; of code between units, the call that
            comes next. None where it is not kept, or not known to be.
        is_returned: else the call left it behind in an attribute, a buffer or an argument.
    """

    shape: tuple[NonNegativeInt, ...]
    dtype: str
    bytes: Affine
    is_overwritten: bool = False
    needs_gradient: bool = True
    depends_on_parameters: bool = True
    kept_by: NonNegativeInt | None = None
    is_returned: bool = True


class UnitCall(Record):
    """One call of a unit, in the order of the forward.

    Its values are the tensors that it returns, in order, then what it left behind for later code.
    A unit that is called by another one is part of that one's call. `GLUE` stands for code between
    units that uses parameters; its values are those parameters.

    Attributes:
        parameters: names of parameters that it uses and its unit does not hold; those of `GLUE`
            are named in the order of its values.
        changes_others: it writes to tensors that it did not make and its unit does not hold: to its
            arguments, mostly.
    """

    unit: str
    values: tuple[Value, ...] = ()
    parameters: tuple[str, ...] = ()
    changes_others: bool = False


class Edge(Record):
    """Value `value` of call `source` is taken by call `target`, itself or through glue.

    `is_summed`: only as a term of sums, see `Flow.sums`.
    """

    source: NonNegativeInt
    value: NonNegativeInt
    target: NonNegativeInt
    is_summed: bool = False


Key = tuple[int, int]
"""A tensor: the number of a call, and of one of its values."""
Terms = tuple[Key, ...]
"""Tensors of one shape that are added to one another, in the order in which they were made."""


class TakenSum(Record):
    """The sum of `terms`, two or more, is taken by call `target`, itself or through glue."""

    terms: tuple[tuple[NonNegativeInt, NonNegativeInt], ...]
    target: NonNegativeInt


class TakenLater(NamedTuple):
    """Tensors that later calls take: (call, value), the call, and the last one that takes it."""

    keys: list[Key]
    made: NDArray[np.int64]
    taken: NDArray[np.int64]


class Flow(Record):
    """Calls in forward order, and edges from earlier to later ones.

    Attributes:
        sums: what calls take of the sums that glue makes of values, and of nothing else.
        inside: (unit, caller): units that were called within a call of another unit.
        written: names of parameters that the forward itself changes.
        buffers_between: buffers that code between units changes by what units gave.
        attributes_between: other attributes that it leaves tensors in that it made of that.
    """

    calls: tuple[UnitCall, ...] = ()
    edges: tuple[Edge, ...] = ()
    sums: tuple[TakenSum, ...] = ()
    inside: tuple[tuple[str, str], ...] = ()
    written: tuple[str, ...] = ()
    buffers_between: tuple[str, ...] = ()
    attributes_between: tuple[str, ...] = ()

    @model_validator(mode="after")
    def _require_ends(self) -> Self:
        values = [len(call.values) for call in self.calls]
        for edge in self.edges:
            if max(edge.source, edge.target) >= len(values) or edge.value >= values[edge.source]:
                raise InputError(
                    f"value {edge.value} of call {edge.source} is taken by call {edge.target}, and"
                    f" there are {len(values)} calls and no such value"
                )
        if self.sums or any(edge.is_summed for edge in self.edges):
            self._require_terms()
        return self

    def _require_terms(self) -> None:
        edges = {(e.source, e.value, e.target): e.is_summed for e in self.edges}
        terms = {(*term, taken.target) for taken in self.sums for term in taken.terms}
        for source, value, target in sorted(terms - edges.keys()):
            raise InputError(
                f"call {target} takes a sum with value {value} of call {source}, which is no edge"
            )
        for source, value, target in sorted({e for e in edges if edges[e]} - terms):
            raise InputError(
                f"call {target} takes value {value} of call {source} in sums, and is in none"
            )

    def value(self, edge: Edge) -> Value:
        return self.calls[edge.source].values[edge.value]

    @property
    def changing_others(self) -> frozenset[str]:
        """Units with a call that `changes_others`, and those that are called within one."""
        changing = {call.unit for call in self.calls if call.changes_others}
        return frozenset(changing | {unit for unit, caller in self.inside if caller in changing})

    @cached_property
    def hidden(self) -> tuple[tuple[int, int], ...]:
        """(source, target): calls that take what an earlier one left behind. No cut fits."""
        pairs = {(e.source, e.target) for e in self.edges if not self.value(e).is_returned}
        return tuple(sorted(pairs))

    @cached_property
    def order(self) -> dict[str, int]:
        """Units in the order of their first calls, numbered, without glue and loss."""
        units = dict.fromkeys(c.unit for c in self.calls if c.unit not in (GLUE, LOSS))
        return {unit: number for number, unit in enumerate(units)}

    def first_call(self, unit: str) -> int | None:
        """Number of the first call of `unit`; None if it is not called by itself."""
        return self.first_calls.get(unit)

    @cached_property
    def first_calls(self) -> dict[str, int]:
        """Numbers of the first calls, in their order."""
        numbers: dict[str, int] = {}
        for number, call in enumerate(self.calls):
            numbers.setdefault(call.unit, number)
        return numbers

    def crossing(self, position: int) -> tuple[Value, ...]:
        """Values that cross a cut before call `position`: each once, however many calls take it.

        Those that later calls take in the same sums alone, as in a residual stream, cross as one:
        their sum, in place of the last of them. Parameters that glue uses do not cross, whoever
        needs one keeps a copy; nor does what depends on no parameter, it is made anew on the other
        side.
        """
        keys = (terms[-1] for terms in self.crossing_terms(position))
        return tuple(self.calls[source].values[value] for source, value in keys)

    def crossing_terms(self, position: int) -> tuple[Terms, ...]:
        """Of each tensor in `crossing` the values that it is the sum of: itself, mostly."""
        keys, made, taken = self.carried
        present = [keys[n] for n in ((made < position) & (position <= taken)).nonzero()[0]]
        if not self.sums:
            return tuple((key,) for key in present)
        sums: dict[object, list[Key]] = {}
        targets, masks = self._uses
        first = bisect.bisect_left(targets, position)
        for key in present:
            value = self.calls[key[0]].values[key[1]]
            alike = masks.get(key, 0) >> first, value.shape, value.dtype, value.needs_gradient
            sums.setdefault(alike, []).append(key)
        return tuple(sorted(map(tuple, sums.values()), key=lambda terms: terms[-1]))

    @cached_property
    def _uses(self) -> tuple[list[int], dict[Key, int]]:
        """Calls that take something, ascending, one for each sum or value that it takes; and of
        each value those of them that take it, as bits."""
        uses: list[tuple[int, Terms]] = [
            (edge.target, ((edge.source, edge.value),)) for edge in self.edges if not edge.is_summed
        ]
        uses += [(taken.target, taken.terms) for taken in self.sums]
        uses.sort()
        masks: dict[Key, int] = {}
        for number, (_, terms) in enumerate(uses):
            for key in terms:
                masks[key] = masks.get(key, 0) | 1 << number
        return [target for target, _ in uses], masks

    @cached_property
    def carried(self) -> TakenLater:
        """Tensors that `crossing` selects from."""
        import numpy as np

        last: dict[Key, int] = {}
        for edge in self.edges:
            key = edge.source, edge.value
            if self.calls[edge.source].unit != GLUE and self.value(edge).depends_on_parameters:
                last[key] = max(edge.target, last.get(key, 0))
        keys = sorted(last)
        made, taken = [source for source, _ in keys], [last[key] for key in keys]
        return TakenLater(keys, np.array(made, dtype=np.int64), np.array(taken, dtype=np.int64))

    def called_again(self) -> tuple[str, ...]:
        """Units with more than one call, in the order of their first."""
        names = [call.unit for call in self.calls if call.unit != GLUE]
        names += [unit for unit, _ in self.inside]
        return tuple(name for name, count in Counter(names).items() if count > 1)

    def graph(self, *, samples: float = 1) -> nx.DiGraph:
        """Units as nodes (`calls`: how many), edges with the `bytes` of `samples`.

        Calls of a unit are one node, so a unit that is called again may lie on a cycle.
        """
        import networkx as nx

        drawn = nx.DiGraph()
        for call in self.calls:
            drawn.add_node(call.unit)
            drawn.nodes[call.unit].setdefault("calls", 0)
            drawn.nodes[call.unit]["calls"] += 1
        for edge in self.edges:
            ends = self.calls[edge.source].unit, self.calls[edge.target].unit
            before = drawn.edges[ends]["bytes"] if drawn.has_edge(*ends) else 0
            drawn.add_edge(*ends, bytes=before + round(self.value(edge).bytes.at(samples)))
        return drawn

    def mermaid(self, *, samples: float = 1) -> str:
        """`graph` as a flow chart for READMEs and notebooks.

        Raises:
            InputError: more edges than viewers draw.
        """
        graph = self.graph(samples=samples)
        if graph.number_of_edges() > EDGES_DRAWN:
            raise InputError(
                f"{graph.number_of_edges()} edges are too many to draw, viewers stop at"
                f" {EDGES_DRAWN}",
                hints=["draw a model with fewer layers, or read the flow in `--json`"],
            )
        numbers = {unit: f"u{number}" for number, unit in enumerate(graph)}
        lines = ["flowchart TD"]
        lines += [f'    {numbers[unit]}["{unit or "(model)"}"]' for unit in graph]
        for source, target, size in graph.edges(data="bytes"):
            lines.append(f'    {numbers[source]} -->|"{size:,} B"| {numbers[target]}')
        return "\n".join(lines)
