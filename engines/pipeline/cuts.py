"""Tensors that cross each cut of a pipeline, in bytes a microbatch. No torch here."""

from __future__ import annotations

from pydantic import NonNegativeInt

from engines.plan import Plan
from profiles.model.flow import Flow
from profiles.record import Record
from profiles.units import format_gib


class Crossing(Record):
    """A tensor that crosses a cut.

    Attributes:
        unit: whose output it is.
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
        names = ", ".join(tensor.unit for tensor in self.tensors)
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
            _crossing(flow, key, samples, is_passing=key[0] < before)
            for key in flow.crossing_keys(position)
        )
        crossing.append(Cut(border=border, stage=stage, tensors=tensors))
        before = position
    return tuple(crossing)


def _crossing(flow: Flow, key: tuple[int, int], samples: float, *, is_passing: bool) -> Crossing:
    call = flow.calls[key[0]]
    value = call.values[key[1]]
    size = round(value.bytes.at(samples))
    return Crossing(
        unit=call.unit,
        shape=value.shape,
        dtype=value.dtype,
        forward_bytes=size,
        backward_bytes=size if value.needs_gradient else 0,
        is_passing=is_passing,
    )
