"""Tensors that cross each cut of a pipeline, in bytes a microbatch. No torch here."""

from __future__ import annotations

from pydantic import NonNegativeInt, PositiveInt

from engines.plan import Plan
from profiles.model.flow import Flow, Terms
from profiles.record import Record
from profiles.units import format_gib


class Crossing(Record):
    """A tensor that crosses a cut.

    Attributes:
        unit: whose output it is, or the last term of a sum of outputs; `terms`: of how many.
        shape: at the batch size of the profile's sample.
        dtype: as the model was built.
        forward_bytes: of a microbatch; backward_bytes: of its gradient, 0 where none comes back.
        is_passing: made before the stage in front of the cut, which only forwards it.
    """

    unit: str
    shape: tuple[NonNegativeInt, ...]
    dtype: str
    forward_bytes: NonNegativeInt
    backward_bytes: NonNegativeInt
    is_passing: bool = False
    terms: PositiveInt = 1


class Cut(Record):
    """Between two stages, before the first call of the unit `border`.

    Attributes:
        stage: the one that begins here, from 1.
        tensors: in the order in which they are sent.
    """

    border: str
    stage: NonNegativeInt
    tensors: tuple[Crossing, ...]

    @property
    def forward_bytes(self) -> int:
        return sum(tensor.forward_bytes for tensor in self.tensors)

    @property
    def backward_bytes(self) -> int:
        return sum(tensor.backward_bytes for tensor in self.tensors)

    def __str__(self) -> str:
        sums = (f" (sum of {tensor.terms})" * (tensor.terms > 1) for tensor in self.tensors)
        names = ", ".join(t.unit + of for t, of in zip(self.tensors, sums, strict=True))
        return (
            f"cut at {self.border}: {names}; {format_gib(self.forward_bytes)} forward,"
            f" {format_gib(self.backward_bytes)} backward"
        )


def cuts(plan: Plan, flow: Flow, *, samples: float) -> tuple[Cut, ...]:
    """The cuts of a legal plan, in order; none without a pipeline.

    Every stage sends what any later one needs, so that a value may cross several cuts. Whether
    bytes go over a link depends on where the stages are: under ZBV the middle one stays on a rank.

    Args:
        samples: in a microbatch.
    """
    crossing = []
    before = 0
    for stage, border in enumerate(plan.stages, start=1):
        position = flow.first_call(border)
        assert position is not None  # the plan is legal
        tensors = tuple(
            _crossing(flow, terms, samples, is_passing=terms[-1][0] < before)
            for terms in flow.crossing_terms(position)
        )
        crossing.append(Cut(border=border, stage=stage, tensors=tensors))
        before = position
    return tuple(crossing)


def _crossing(flow: Flow, terms: Terms, samples: float, *, is_passing: bool) -> Crossing:
    call = flow.calls[terms[-1][0]]
    value = call.values[terms[-1][1]]
    size = round(value.bytes.at(samples))
    return Crossing(
        unit=call.unit,
        shape=value.shape,
        dtype=value.dtype,
        forward_bytes=size,
        backward_bytes=size if value.needs_gradient else 0,
        is_passing=is_passing,
        terms=len(terms),
    )
