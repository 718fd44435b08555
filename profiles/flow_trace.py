"""Follows values from the calls that make them to the calls that take them, during a forward."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from torch import Tensor

from profiles.affine import Affine
from profiles.flow import GLUE, Call, Edge, Flow, Value
from profiles.storages import Storages
from profiles.torch_compat import tensors_in

Source = tuple[int, int]  # call, value


@dataclass(slots=True)
class Trail:
    """A call as it goes on.

    Attributes:
        taken: what its arguments are made of.
        first_made: number of the first memory that it makes.
        uses_parameters: its own code does, or what it takes depends on some.
        is_closed: so far it took nothing but its arguments, changed nothing that it did not make,
            and called no other unit: what it does follows from its module and its arguments.
    """

    unit: str
    taken: frozenset[Source]
    first_made: int
    uses_parameters: bool = False
    is_closed: bool = True
    values: list[Value] = field(default_factory=list)


class FlowTrace:
    """Where the contents of each memory come from.

    Glue hands on what it is made of: a sum of two outputs stands for both. Memory is known by its
    number in the timeline, which is never given twice, so views stand for what they are views of.

    Attributes:
        has_escaped: a tensor made in a call that was `close`d was used outside it.
    """

    def __init__(self, storages: Storages) -> None:
        self.has_escaped = False
        self._storages = storages
        self._calls: list[Trail] = []
        self._edges: dict[Edge, None] = {}
        self._sources: dict[int, frozenset[Source]] = {}
        self._inside: dict[tuple[str, str], None] = {}
        self._current: Trail | None = None
        self._glue: Trail | None = None  # the stretch of glue that used parameters
        self._closed: set[int] = set()

    @property
    def current(self) -> Trail | None:
        """The outermost call that is going on."""
        return self._current

    def begin(self, unit: str, inputs: object) -> None:
        """An outermost call of `unit` with these inputs."""
        taken = self._all_from(tensors_in(inputs))
        self._current, self._glue = Trail(unit, taken, self._storages.timeline.next_number), None
        self._calls.append(self._current)
        self._take(taken)

    def begin_inside(self, unit: str) -> None:
        """A call of `unit` within the current one."""
        assert self._current is not None
        self._inside[unit, self._current.unit] = None
        self._current.is_closed = False

    def end(self, output: object) -> None:
        """The current call hands on `output`."""
        assert self._current is not None
        number, call = len(self._calls) - 1, self._current
        for tensor in tensors_in(output):
            call.values.append(_value(tensor, depends_on_parameters=call.uses_parameters))
            memory = self._storages.number_of(tensor)
            if memory is not None:
                self._sources[memory] = frozenset({(number, len(call.values) - 1)})
        self._current = None

    def operation(
        self, inputs: Sequence[Tensor], outputs: Sequence[Tensor], written: Sequence[Tensor]
    ) -> None:
        """An operation of the forward; `written` are the inputs that it changes."""
        if self._closed and not self.has_escaped:
            numbers = (self._storages.number_of(tensor) for tensor in inputs)
            self.has_escaped = any(number in self._closed for number in numbers)
        if self._current is not None:
            self._operation_in(self._current, inputs, written)
            return
        made_of = self._made_of(inputs)
        for tensor in written:
            self._overwrite(tensor)
        for tensor in (*outputs, *written):
            number = self._storages.number_of(tensor)
            if number is not None:
                self._sources[number] = self._sources.get(number, frozenset()) | made_of

    def close(self, call: Trail, outputs: Sequence[Tensor]) -> None:
        """The current call is at its end: what it made beside its outputs is its own affair."""
        handed_on = {self._storages.number_of(tensor) for tensor in outputs}
        made = range(call.first_made, self._storages.timeline.next_number)
        self._closed.update(number for number in made if number not in handed_on)

    def flow(self) -> Flow:
        """All that was followed."""
        return Flow(
            calls=tuple(Call(unit=call.unit, values=tuple(call.values)) for call in self._calls),
            edges=tuple(sorted(self._edges, key=lambda e: (e.target, e.source, e.value))),
            inside=tuple(self._inside),
        )

    def _operation_in(
        self, call: Trail, inputs: Sequence[Tensor], written: Sequence[Tensor]
    ) -> None:
        sources = self._all_from(inputs)
        if not sources <= call.taken:
            call.is_closed = False
            self._take(sources)
        if not call.uses_parameters:
            call.uses_parameters = any(self._storages.holders_of(tensor) for tensor in inputs)
        for tensor in written:
            number = self._storages.number_of(tensor)
            if number is None or number < call.first_made:
                call.is_closed = False
                self._overwrite(tensor)

    def _take(self, sources: Iterable[Source]) -> None:
        call, target = self._calls[-1], len(self._calls) - 1
        for source, value in sources:
            self._edges.setdefault(Edge(source=source, value=value, target=target))
            call.uses_parameters |= self._calls[source].values[value].depends_on_parameters

    def _all_from(self, tensors: Iterable[Tensor]) -> frozenset[Source]:
        found: frozenset[Source] = frozenset()
        for tensor in tensors:
            found |= self._from(tensor)
        return found

    def _from(self, tensor: Tensor) -> frozenset[Source]:
        number = self._storages.number_of(tensor)
        return self._sources.get(number, frozenset()) if number is not None else frozenset()

    def _made_of(self, inputs: Sequence[Tensor]) -> frozenset[Source]:
        found = self._all_from(inputs)
        for tensor in inputs:
            if self._storages.holders_of(tensor):
                found |= {self._glue_with(tensor)}
        return found

    def _glue_with(self, parameter: Tensor) -> Source:
        if self._glue is None:
            self._glue = Trail(GLUE, frozenset(), self._storages.timeline.next_number)
            self._calls.append(self._glue)
        self._glue.values.append(_value(parameter, depends_on_parameters=True))
        return len(self._calls) - 1, len(self._glue.values) - 1

    def _overwrite(self, tensor: Tensor) -> None:
        for call, value in self._from(tensor):
            values = self._calls[call].values
            values[value] = values[value].model_copy(update={"is_overwritten": True})


def _value(tensor: Tensor, *, depends_on_parameters: bool) -> Value:
    return Value(
        shape=tuple(tensor.shape),
        dtype=str(tensor.dtype).removeprefix("torch."),
        bytes=Affine(fixed=tensor.nbytes),
        needs_gradient=tensor.requires_grad,
        depends_on_parameters=depends_on_parameters,
    )
