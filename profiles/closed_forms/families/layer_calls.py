"""The weight layers that a unit goes through: what `profiles.capture.traces.layer_trace` notes of
torch's."""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Iterator, Sequence

from profiles.closed_forms.families.tape import Array, Node
from profiles.model.layers import INPUT
from profiles.trace.scopes import Features, LayerCall, LayerSegment, LayerShape, Scope


class LayerCalls:
    """Notes the layers of the scope that is called; made anew for every call."""

    def __init__(self, scope: Scope, features: Features) -> None:
        self._place = scope
        self._features = features
        self._inputs: list[weakref.ref[Array]] = []

    def enter(self, shape: LayerShape, given: Array) -> LayerCall:
        """A layer is called; what runs now is its own."""
        layers = self._place.layers
        if shape.path not in layers:
            layers[shape.path] = LayerCall(
                shape=shape,
                number=len(layers),
                own=LayerSegment(self._place),
                after=LayerSegment(self._place),
                same_input=self._same_input(given),
                sources=self._sources([given]),
                needs_input_gradient=given.needs_gradient,
            )
        layer = layers[shape.path]
        layer.calls += 1
        layer.input_bytes += given.size_bytes
        self._place.begin_part(layer.own, 0)
        return layer

    def leave(self, layer: LayerCall, output: Array) -> None:
        """It returns; what follows comes after it."""
        made = output.storage.made
        layer.output_bytes += output.size_bytes
        if made.part is layer.own:
            made.part = layer.after
        self._features.put(made.number, layer)
        if output.node is not None:
            output.node.layer = layer.number
        self._place.begin_part(layer.after, 0)

    def finish(self, outputs: Sequence[Array]) -> None:
        """The call is over."""
        layers = list(self._place.layers.values())
        for number in self._sources(outputs) if layers else ():
            if number != INPUT:
                layers[number].reaches_output = True

    def _same_input(self, given: Array) -> int:
        known = enumerate(self._inputs)
        number = next((n for n, ref in known if ref() is given), len(self._inputs))
        self._inputs.append(weakref.ref(given))
        return number

    def _sources(self, arrays: Iterable[Array]) -> tuple[int, ...]:
        return tuple(sorted(set(self._reached([a.node for a in arrays if a.node is not None]))))

    def _reached(self, left: list[Node]) -> Iterator[int]:
        seen: set[Node] = set()
        while left:
            node = left.pop()
            if node in seen or node.backward is None:  # parameters are no sources
                continue
            seen.add(node)
            if node.scope is not self._place:
                yield INPUT
            elif node.layer is not None:
                yield node.layer
            else:
                left += [parent[0] for parent in node.parents if parent is not None]
