"""The layers of a unit, all its calls together; and two runs fitted to costs that grow."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from profiles.affine import Affine
from profiles.layers import LayerCost, Stretch
from profiles.places import Layer, Part

Line = Callable[[int, int | None], Affine]
"""Through a figure at the batch and at twice it."""

_OF_STRETCH = tuple(
    n
    for n, field in Stretch.model_fields.items()
    if field.annotation is Affine and n != "core_bytes"
)
_OF_CALLS = ("input_bytes", "output_bytes")


@dataclass(slots=True)
class LayerSum:
    """A layer as its first call found it, and the figures of all calls, by field."""

    layer: Layer
    calls: int = 0
    figures: dict[str, int] = dataclasses.field(default_factory=dict)

    def add(self, layer: Layer, saved: Mapping[Part, int], selective: Mapping[Part, int]) -> None:
        """Its calls in one more place; `saved` and `selective` are what parts keep."""
        self.calls += layer.calls
        found = {name: getattr(layer, name) for name in _OF_CALLS}
        for name, part in (("own", layer.own), ("after", layer.after)):
            figures = (
                part.forward.flop,
                part.backward.flop,
                part.forward.moved_bytes,
                part.backward.moved_bytes,
                saved.get(part, 0),
                selective.get(part, 0),
            )
            found |= {f"{name}.{f}": n for f, n in zip(_OF_STRETCH, figures, strict=True)}
        for name, figure in found.items():
            self.figures[name] = self.figures.get(name, 0) + figure


def layer_cost(one: LayerSum, two: LayerSum | None, line: Line) -> LayerCost:
    """From a run over the sample, and one over twice as many if there is one."""
    layer, shape = one.layer, one.layer.shape

    def affine(name: str) -> Affine:
        return line(one.figures[name], two.figures[name] if two is not None else None)

    def stretch(name: str, part: Part) -> Stretch:
        figures = {field: affine(f"{name}.{field}") for field in _OF_STRETCH}
        trained = tuple(nbytes for nbytes in part.parameters.values() if nbytes)
        return Stretch(**figures, parameter_gradient_bytes=trained)

    pieces, heads = layer.parts
    return LayerCost(
        **dataclasses.asdict(shape),
        calls=one.calls,
        **{name: affine(name) for name in _OF_CALLS},
        needs_input_gradient=layer.needs_input_gradient,
        same_input=layer.same_input,
        sources=layer.sources,
        reaches_output=layer.reaches_output,
        pieces=pieces,
        heads=heads,
        own=stretch("own", Part(layer.own.place)),  # the layer's own are told apart
        after=stretch("after", layer.after),
    )
