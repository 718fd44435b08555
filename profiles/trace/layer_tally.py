"""The layers of a unit, all its calls together; and two runs fitted to costs that grow."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from profiles.errors import ModelError
from profiles.model.affine import Affine
from profiles.model.layers import LayerCost, Stretch
from profiles.model.work import AttentionCall, AttentionKernel, Fusible, Product, ProductKind
from profiles.trace.chains import add_savings, layouts
from profiles.trace.scopes import (
    Attended,
    Convolved,
    Grouped,
    LayerCall,
    LayerSegment,
    Normed,
    Noted,
    Saving,
    Savings,
    Scored,
    trained_products,
)

Line = Callable[[int, int | None], Affine]
"""Through a figure at the batch and at twice it."""

_OF_STRETCH = tuple(
    n
    for n, field in Stretch.model_fields.items()
    if field.annotation is Affine and n != "core_bytes"
)
_OF_CALLS = ("input_bytes", "output_bytes")
_FLOAT32_BYTES = 4


@dataclass(slots=True)
class LayerSum:
    """A layer as its first call found it, and the figures of all calls, by field."""

    layer: LayerCall
    calls: int = 0
    figures: dict[str, int] = dataclasses.field(default_factory=dict)
    products: tuple[Noted, ...] = ()
    attention: tuple[Attended, ...] = ()
    fusible: Savings = dataclasses.field(default_factory=dict)
    own_fusible: Savings = dataclasses.field(default_factory=dict)

    def add(
        self,
        layer: LayerCall,
        saved: Mapping[LayerSegment, int],
        selective: Mapping[LayerSegment, int],
        fusible: Savings,
    ) -> None:
        """Its calls in one more scope; `saved` and `selective` are the bytes that segments keep."""
        add_savings(self.fusible, fusible)
        add_savings(self.fusible, layouts(layer.after))
        add_savings(self.own_fusible, layouts(layer.own))
        self.calls += layer.calls
        self.products += trained_products(layer.after.forward, layer.after.backward)
        self.attention += layer.after.attention.trained()
        sums = {name: getattr(layer, name) for name in _OF_CALLS}
        for name, part in (("own", layer.own), ("after", layer.after)):
            figures = (
                part.forward.flop,
                part.backward.flop,
                part.forward.moved_bytes,
                part.backward.moved_bytes,
                part.forward.cycles,
                part.backward.cycles,
                saved.get(part, 0),
                selective.get(part, 0),
            )
            sums |= {f"{name}.{f}": n for f, n in zip(_OF_STRETCH, figures, strict=True)}
        for name, figure in sums.items():
            self.figures[name] = self.figures.get(name, 0) + figure


def layer_cost(one: LayerSum, two: LayerSum | None, line: Line, samples: int) -> LayerCost:
    """From a run over the sample, and one over twice as many if there is one."""
    layer, shape = one.layer, one.layer.shape

    def affine(name: str) -> Affine:
        return line(one.figures[name], two.figures[name] if two is not None else None)

    def stretch(name: str, part: LayerSegment) -> Stretch:
        figures = {field: affine(f"{name}.{field}") for field in _OF_STRETCH}
        trained = tuple(nbytes for nbytes in part.parameters.values() if nbytes)
        return Stretch(**figures, parameter_gradient_bytes=trained)

    if not (shape.inputs and shape.outputs):
        raise ModelError(
            f"the layer `{shape.path}` has {shape.inputs} inputs and {shape.outputs} outputs"
        )
    pieces, heads = layer.parts
    calls = attention_calls(one.attention, None if two is None else two.attention, samples)
    products = noted_products(one.products, None if two is None else two.products, samples)
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
        own=stretch("own", LayerSegment(layer.own.scope)).model_copy(  # its own are told apart
            update={"fusible": fusibles(one.own_fusible, two.own_fusible if two else None, line)}
        ),
        after=stretch("after", layer.after).model_copy(
            update={
                "products": products,
                "attention": calls,
                "fusible": fusibles(one.fusible, None if two is None else two.fusible, line),
            }
        ),
    )


def attention_calls(
    one: Sequence[Attended], two: Sequence[Attended] | None, samples: int
) -> tuple[AttentionCall, ...]:
    """Calls of one sample, from those over `samples` and over twice as many.

    Windows of an image are heads of their own. Calls whose rows do not grow with the samples are
    left out, and so are all where the two runs differ in their calls: their costs stay as they are.
    """
    if two is not None and [call._replace(rows=2 * call.rows) for call in one] != list(two):
        return ()
    return tuple(
        AttentionCall(
            heads=call.heads * (call.rows // samples),
            kv_heads=call.kv_heads * (call.rows // samples),
            queries=call.queries,
            keys=call.keys,
            width=call.width,
            value_width=call.value_width,
            is_causal=call.is_causal,
            dropout=call.dropout,
            element_bytes=call.element_bytes,
            kernel=AttentionKernel.CPU,
        )
        for call in one
        if call.rows % samples == 0
    )


def noted_products(
    one: Sequence[Noted], two: Sequence[Noted] | None, samples: int
) -> tuple[Product, ...]:
    """Work of one sample whose time follows from sizes; none of a kind in which two runs over
    `samples` and over twice as many differ."""

    def grows(kind: type[Noted]) -> bool:
        if two is None:
            return True
        doubled = [c._replace(rows=2 * c.rows) for c in one if isinstance(c, kind)]
        return doubled == [c for c in two if isinstance(c, kind)]

    growing = {kind for kind in set(map(type, one)) if grows(kind)}
    products = (_noted(c, c.rows / samples, samples) for c in one if type(c) in growing)
    return tuple(product for product in products if product is not None)


def _noted(call: Noted, rows: float, samples: int) -> Product | None:
    match call:
        case Grouped():
            return _of_experts(call, rows)
        case Normed():
            return _norm(call, rows)
        case Scored():
            return _scores(call, rows, samples)
        case Convolved():
            return _convolution(call, rows)


def _of_experts(call: Grouped, rows: float) -> Product:
    """Experts share the rows evenly."""
    moved = Affine(
        fixed=float(call.element_bytes * call.experts * call.n * call.k),
        per_sample=call.element_bytes * rows * (call.n + call.k),
    )
    return Product(
        kind=ProductKind.GROUPED,
        m=Affine(per_sample=rows / call.experts),
        n=call.n,
        k=call.k,
        count=call.experts,
        forward_bytes=moved,
        backward_bytes=moved * (1.0 + call.needs_input_gradient),
        needs_input_gradient=call.needs_input_gradient,
    )


def _norm(call: Normed, elements: float) -> Product:
    """A batch norm: its input is read twice and the result written; back, gradient and input are
    read twice and a gradient written. Once of each is what the trace counts."""
    return Product(
        kind=ProductKind.ELEMENTWISE,
        m=Affine(per_sample=elements / call.channels),
        n=call.channels,
        k=1,
        forward_bytes=Affine(per_sample=2 * call.element_bytes * elements),
        backward_bytes=Affine(per_sample=3 * call.element_bytes * elements),
    )


def _scores(call: Scored, rows: float, samples: int) -> Product | None:
    """As many matrices as a sample has; of a batch their rows are more."""
    count = call.rows // call.height
    if count % samples:
        return None
    factors = call.element_bytes * rows * (call.n + call.k)
    moved = Affine(per_sample=factors + call.element_bytes * (count / samples) * call.n * call.k)
    return Product(
        kind=ProductKind.SCORES,
        m=Affine(per_sample=float(call.height)),
        n=call.n,
        k=call.k,
        count=count // samples,
        forward_bytes=moved,
        backward_bytes=moved * (1.0 + call.needs_input_gradient),
        needs_input_gradient=call.needs_input_gradient,
        is_wide=call.element_bytes == _FLOAT32_BYTES,
    )


def _convolution(call: Convolved, rows: float) -> Product:
    moved = Affine(
        fixed=float(call.element_bytes * call.groups * call.n * call.k),
        per_sample=call.element_bytes * rows * call.maps_per_row,
    )
    return Product(
        kind=ProductKind.CONVOLUTION,
        m=Affine(per_sample=rows),
        n=call.n,
        k=call.k,
        count=call.groups,
        forward_bytes=moved,
        backward_bytes=moved * (1.0 + call.needs_input_gradient),
        needs_input_gradient=call.needs_input_gradient,
    )


def fusibles(one: Savings, two: Savings | None, line: Line) -> tuple[Fusible, ...]:
    """Savings of fused kernels for one sample, by kind, from runs over the sample and twice it."""
    merged = []
    for kind in sorted(one):
        twice = Saving() if two is None else two.get(kind, Saving())
        growing = {
            name: max(
                0.0,
                line(getattr(one[kind], name), getattr(twice, name) if two else None).per_sample,
            )
            for name in Saving._fields
            if not name.endswith("kernels")
        }
        kernels = {n: getattr(one[kind], n) for n in ("forward_kernels", "backward_kernels")}
        merged.append(Fusible(kind=kind, **growing, **kernels))
    return tuple(merged)
