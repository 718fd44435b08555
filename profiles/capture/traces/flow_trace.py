"""Follows values from the calls that make them to the calls that take them, during a forward."""

from __future__ import annotations

import bisect
import weakref
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from profiles.capture.traces.storages import Storages
from profiles.capture.traces.sum_trace import SumTrace, TermSet
from profiles.model.affine import Affine
from profiles.model.flow import GLUE, Edge, Flow, Key, TakenSum, UnitCall, Value
from profiles.torch_compat import tensors_in


@dataclass(slots=True)
class Trail:
    """A call as it goes on.

    Attributes:
        given: the tensors among its arguments.
        taken: what they are made of; `sums`: as sums, and with what it took since.
        first_made: number of the first memory that it makes.
        changed: memories that were there before, which it wrote to.
        uses_parameters: its own code does, or random numbers, or what it takes depends on some.
        is_closed: so far it took nothing but its arguments, changed nothing that it did not make,
            and called no other unit: what it does follows from its module and its arguments.
    """

    unit: str
    given: Sequence[Tensor]
    taken: frozenset[Key]
    first_made: int
    sums: frozenset[TermSet] = frozenset()
    uses_parameters: bool = False
    is_closed: bool = True
    changed: set[int] = field(default_factory=set)
    values: list[Value] = field(default_factory=list)
    parameters: list[str] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class _Region:
    """Elements of a memory."""

    start: int
    steps: tuple[tuple[int, int], ...]  # (stride, size), largest stride first

    def holds(self, element: int) -> bool:
        rest = element - self.start
        for stride, size in self.steps:
            rest -= stride * min(max(rest, 0) // stride, size - 1)
        return rest == 0


class FlowTrace:
    """Tracks the calls that the contents of each memory come from.

    Glue hands on what it is made of: a sum of two outputs stands for both. Memory is known by its
    number (`Storages.memory_of`), which is never given twice, so views stand for what they are
    views of. What a call leaves behind without returning it (in an attribute, in a buffer, in an
    argument that it writes to) becomes a value of it when later code takes it.

    Attributes:
        has_escaped: a tensor made in a call that was `close`d was used outside it.
    """

    def __init__(self, storages: Storages) -> None:
        self.has_escaped = False
        self._storages = storages
        self._calls: list[Trail] = []
        self._edges: dict[Edge, bool] = {}  # False: in sums alone
        self._sums_taken: dict[tuple[int, TermSet], None] = {}
        self._sums = SumTrace(storages)
        self._sources: dict[int, frozenset[Key]] = {}
        self._values: dict[int, frozenset[Key]] = {}  # those that lie in a memory
        self._parts: dict[int, dict[Key, _Region]] = {}  # where in it, as they were returned
        # Of what calls returned of older memories: a tensor of one may be of any of them.
        self._views: dict[int, list[tuple[weakref.ref[Tensor], Key]]] = {}
        self._left: dict[int, int] = {}  # memory that a call changed and did not return, its number
        self._finished: list[int] = []  # calls of units that are over
        self._ends: list[int] = []  # of those
        self._inside: dict[tuple[str, str], None] = {}
        self._written: dict[str, None] = {}  # parameters
        self._left_between: dict[bool, dict[str, None]] = {True: {}, False: {}}
        self._current: Trail | None = None
        self._glue: Trail | None = None  # the stretch of glue that used parameters
        self._closed: set[int] = set()

    @property
    def current(self) -> Trail | None:
        """The outermost call that is going on."""
        return self._current

    def begin(self, unit: str, inputs: object) -> int:
        """An outermost call of `unit` with these inputs; its number."""
        given = tensors_in(inputs)
        taken = self._made_of(given)  # a parameter in them is one that glue uses
        first_made = self._storages.timeline.next_number
        sums = self._sums_of(given, taken)
        self._current, self._glue = Trail(unit, given, taken, first_made, sums), None
        self._calls.append(self._current)
        self._take(sums)
        return len(self._calls) - 1

    def release(self) -> None:
        """Let go of the inputs of a call that failed."""
        if self._current is not None:
            self._current.given = ()

    def begin_inside(self, unit: str) -> None:
        """A call of `unit` within the current one."""
        assert self._current is not None
        self._inside[unit, self._current.unit] = None
        self._current.is_closed = False

    def end(self, output: object) -> None:
        """The current call hands on `output`."""
        assert self._current is not None
        number, call = len(self._calls) - 1, self._current
        returned: dict[int, dict[int, Tensor]] = {}
        for tensor in tensors_in(output):
            passed = self._storages.number_of(tensor)
            if passed is not None and passed < call.first_made:
                self._depend(call, self._from(tensor))
        for tensor in tensors_in(output):
            holders = self._storages.holders_of(tensor)
            call.values.append(
                _value(tensor, depends_on_parameters=call.uses_parameters or bool(holders))
            )
            memory = self._storages.memory_of(tensor)
            # What was there before and is handed through as it was, comes from where it came from:
            # a parameter is one wherever it is used, and so is an argument.
            if memory is None or (memory < 0 and memory not in call.changed):
                continue
            value, is_new = len(call.values) - 1, memory >= call.first_made
            if is_new or memory in call.changed:
                returned.setdefault(memory, {})[value] = tensor
            elif not _is_in(tensor, call.given):
                self._views.setdefault(memory, []).append((weakref.ref(tensor), (number, value)))
                self._values[memory] = self._values.get(memory, frozenset()) | {(number, value)}
        for memory, tensors in returned.items():
            whole = next(iter(tensors.values())) if memory >= call.first_made else None
            self._put(memory, [(number, value) for value in tensors], whole)
            self._parts[memory] = {(number, v): _region(t) for v, t in tensors.items()}
        self._left |= dict.fromkeys(call.changed - set(returned), number)
        self._finished.append(number)
        self._ends.append(self._storages.timeline.next_number)
        call.given, self._current = (), None

    def operation(
        self,
        inputs: Sequence[Tensor],
        outputs: Sequence[Tensor],
        written: Sequence[Tensor],
        *,
        draws: bool = False,
        adds: bool = False,
    ) -> None:
        """An operation of the forward.

        Args:
            written: the inputs that it changes.
            adds: it makes the sum of its two inputs.
            draws: it takes random numbers; what a call makes of them cannot be made anew.
        """
        for tensor in written:
            if self._storages.holders_of(tensor):
                self._written[self._storages.parameter_name(tensor)] = None
        if self._closed and not self.has_escaped:
            numbers = (self._storages.number_of(tensor) for tensor in inputs)
            self.has_escaped = any(number in self._closed for number in numbers)
        if self._current is not None:
            self._current.uses_parameters |= draws
            self._operation_in(self._current, inputs, written)
            return
        made_of = self._made_of(inputs)
        total = self._sums.added(inputs, made_of) if adds else None
        sums = self._sums_of(inputs, made_of)
        for tensor in written:
            self._overwrite(tensor)
        for tensor in (*outputs, *written):
            memory = self._storages.memory_of(tensor)
            is_written = memory is not None and (memory >= 0 or _is_in(tensor, written))
            if memory is not None and is_written:
                viewed = {source for _, source in self._views.pop(memory, [])}
                self._sources[memory] = self._sources.get(memory, frozenset()) | viewed | made_of
                if total is not None and not viewed:
                    self._sums.put_sum(tensor, total)
                else:
                    self._sums.mix(tensor, sums, is_written=_is_in(tensor, written))

    def close(self, call: Trail, outputs: Sequence[Tensor]) -> None:
        """The current call is at its end: what it made beside its outputs is its own affair."""
        handed_on = {self._storages.number_of(tensor) for tensor in outputs}
        made = range(call.first_made, self._storages.timeline.next_number)
        self._closed.update(number for number in made if number not in handed_on)

    def left(self, name: str, tensors: Iterable[Tensor], *, is_buffer: bool) -> None:
        """The forward is over, and code between units left these under `name`, a buffer or another
        attribute: noted if they were made of what units gave."""
        memories = map(self._storages.memory_of, tensors)
        if any(self._sources.get(m) or self._views.get(m) for m in memories if m is not None):
            self._left_between[is_buffer][name] = None

    def note_kept(self) -> None:
        """The forward is over: note which values autograd keeps, and for which call."""
        for memory, sources in self._values.items():
            scope = self._storages.first_saver(memory)
            if scope is None:
                continue
            for call, value in sources:
                values = self._calls[call].values
                values[value] = values[value].model_copy(update={"kept_by": scope.call})

    @property
    def taken(self) -> frozenset[Key]:
        """The values that later calls took."""
        return frozenset((edge.source, edge.value) for edge in self._edges)

    def flow(self) -> Flow:
        """All that was followed."""
        return Flow(
            calls=tuple(
                UnitCall(
                    unit=call.unit,
                    values=tuple(call.values),
                    parameters=tuple(call.parameters),
                    changes_others=any(memory >= 0 for memory in call.changed),
                )
                for call in self._calls
            ),
            edges=tuple(self._edges_in_order()),
            sums=tuple(
                TakenSum(terms=tuple(sorted(terms)), target=target)
                for target, terms in self._sums_taken
            ),
            inside=tuple(self._inside),
            written=tuple(self._written),
            buffers_between=tuple(self._left_between[True]),
            attributes_between=tuple(self._left_between[False]),
        )

    def _operation_in(
        self, call: Trail, inputs: Sequence[Tensor], written: Sequence[Tensor]
    ) -> None:
        sources = self._all_from(inputs)
        sums = self._sums_of(inputs, sources)
        if not sums <= call.sums:
            call.is_closed = False
            call.sums |= sums
            self._take(sums)
        self._depend(call, sources)
        for tensor in inputs:
            holders = self._storages.holders_of(tensor)
            call.uses_parameters |= bool(holders)
            if holders and call.unit not in holders:
                call.is_closed = False
                self._borrow(call, tensor)
        for tensor in written:
            memory = self._storages.memory_of(tensor)
            if memory is None or memory < call.first_made:
                call.is_closed = False
                self._overwrite(tensor)
                if memory is not None:
                    call.changed.add(memory)

    def _take(self, sums: Iterable[TermSet]) -> None:
        target = len(self._calls) - 1
        for terms in sums:
            is_alone = len(terms) == 1
            if not is_alone:
                self._sums_taken[target, terms] = None
            for source, value in terms:
                edge = Edge(source=source, value=value, target=target)
                self._edges[edge] = is_alone or self._edges.get(edge, False)

    def _edges_in_order(self) -> list[Edge]:
        edges = [
            edge if is_alone else edge.model_copy(update={"is_summed": True})
            for edge, is_alone in self._edges.items()
        ]
        return sorted(edges, key=lambda e: (e.target, e.source, e.value))

    def _sums_of(self, tensors: Iterable[Tensor], sources: TermSet) -> frozenset[TermSet]:
        """The sums that these tensors are made of; `sources`: their terms, and parameters."""
        if not sources:
            return frozenset()
        sums = [self._sums.of(tensor, self._from(tensor)) for tensor in tensors]
        known: frozenset[TermSet] = frozenset().union(*sums)
        return known | {frozenset({source}) for source in sources.difference(*known)}

    def _depend(self, call: Trail, sources: Iterable[Key]) -> None:
        """Note that the outputs of the call depend on these: taking a value is not yet using it."""
        call.uses_parameters |= any(
            self._calls[source].values[value].depends_on_parameters for source, value in sources
        )

    def _all_from(self, tensors: Iterable[Tensor]) -> frozenset[Key]:
        sources: frozenset[Key] = frozenset()
        for tensor in tensors:
            sources |= self._from(tensor)
        return sources

    def _from(self, tensor: Tensor) -> frozenset[Key]:
        memory = self._storages.memory_of(tensor)
        if memory is None:
            return frozenset()
        maker = self._left_by(memory)
        if maker is not None:
            self._left.pop(memory, None)
            call = self._calls[maker]
            value = _value(tensor, depends_on_parameters=call.uses_parameters)
            call.values.append(value.model_copy(update={"is_returned": False}))
            self._put(memory, [(maker, len(call.values) - 1)])
        views = self._views.get(memory, [])
        for view, source in views:
            if view() is tensor:
                return frozenset({source})
        sources = self._sources.get(memory, frozenset()) | {source for _, source in views}
        parts = self._parts.get(memory, {})
        if len(parts) > 1 and sources == frozenset(parts):  # one of the chunks that a call returned
            start = int(tensor.storage_offset())
            within = frozenset(part for part, region in parts.items() if region.holds(start))
            sources = within if len(within) == 1 else sources
        return frozenset(source for source in sources if not self._is_own(memory, source[0]))

    def _left_by(self, memory: int) -> int | None:
        """The call that made or changed this and did not return it, unless that is known."""
        maker = self._left.get(memory)
        if maker is None and memory >= 0 and memory not in self._sources:
            position = bisect.bisect_right(self._ends, memory)
            maker = self._finished[position] if position < len(self._ends) else None
            if maker is not None and memory < self._calls[maker].first_made:
                return None
        return None if maker is None or self._is_own(memory, maker) else maker

    def _is_own(self, memory: int, number: int) -> bool:
        """True if the memory is a buffer that the unit keeps from call to call."""
        current = self._current
        return memory < 0 and current is not None and self._calls[number].unit == current.unit

    def _put(self, memory: int, values: Iterable[Key], whole: Tensor | None = None) -> None:
        """The memory holds these values now; what it held before may be part of them. `whole`: the
        value that it was made for."""
        self._sources[memory] = frozenset(values)
        self._sums.put(memory, self._sources[memory], whole)
        self._values[memory] = self._values.get(memory, frozenset()) | self._sources[memory]
        self._parts.pop(memory, None)
        self._views.pop(memory, None)

    def _made_of(self, inputs: Iterable[Tensor]) -> frozenset[Key]:
        inputs = list(inputs)
        sources = self._all_from(inputs)
        for tensor in inputs:
            if self._storages.holders_of(tensor) and not self._from(tensor):
                sources |= {self._glue_with(tensor)}
        return sources

    def _glue_with(self, parameter: Tensor) -> Key:
        if self._glue is None:
            self._glue = Trail(GLUE, (), frozenset(), self._storages.timeline.next_number)
            self._calls.append(self._glue)
        self._glue.values.append(_value(parameter, depends_on_parameters=True))
        self._glue.parameters.append(self._storages.parameter_name(parameter))
        return len(self._calls) - 1, len(self._glue.values) - 1

    def _borrow(self, call: Trail, parameter: Tensor) -> None:
        name = self._storages.parameter_name(parameter)
        if name not in call.parameters:
            call.parameters.append(name)

    def _overwrite(self, tensor: Tensor) -> None:
        memory = self._storages.memory_of(tensor)
        for call, value in self._values.get(memory, ()) if memory is not None else ():
            values = self._calls[call].values
            values[value] = values[value].model_copy(update={"is_overwritten": True})


def _region(tensor: Tensor) -> _Region:
    if tensor.layout is not torch.strided or not tensor.numel():
        return _Region(-1, ())
    steps = zip(tensor.stride(), tensor.shape, strict=True)
    return _Region(
        int(tensor.storage_offset()), tuple(sorted((s for s in steps if s[0] > 0), reverse=True))
    )


def _is_in(tensor: Tensor, tensors: Iterable[Tensor]) -> bool:
    return any(tensor is other for other in tensors)


def _value(tensor: Tensor, *, depends_on_parameters: bool) -> Value:
    return Value(
        shape=tuple(tensor.shape),
        dtype=str(tensor.dtype).removeprefix("torch."),
        bytes=Affine(fixed=tensor.nbytes),
        needs_gradient=tensor.requires_grad,
        depends_on_parameters=depends_on_parameters,
    )
