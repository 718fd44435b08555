"""A draft of a unit: its forward written down layer by layer, costs added up as `capture` does.

All amounts are for one sample. Operations before the first weight layer belong to the unit, those
after a layer to the stretch behind it, so that tensor parallelism can divide them.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field

from profiles.model.affine import Affine
from profiles.model.layers import LayerCost, LayerKind, Stretch
from profiles.model.profile import Numerics, ParameterShape, UnitCost, UnitProfile
from profiles.model.work import (
    AttentionCall,
    AttentionKernel,
    Fusible,
    FusibleKind,
    Product,
    ProductKind,
    attention_cost,
)

FP32 = 4
# Launches' worth of host time for each kernel that a draft counts: views, copies, casts, modules
# and autograd's bookkeeping are not drafted. An eager operation of torch takes its host some 20 us
# each way. Stacks whose modules do more say so (`Stack.host_work`).
HOST_WORK = 3


def per_sample(amount: float) -> Affine:
    return Affine(per_sample=float(amount))


@dataclass
class _Sums:
    """Costs of a stretch of code."""

    forward_flop: float = 0.0
    backward_flop: float = 0.0
    forward_moved: float = 0.0
    backward_moved: float = 0.0
    forward_fixed: float = 0.0
    backward_fixed: float = 0.0
    forward_kernels: int = 0
    backward_kernels: int = 0
    saved: float = 0.0
    selective: float = 0.0
    core: float = 0.0
    norms: list[int] = field(default_factory=list)
    products: list[Product] = field(default_factory=list)
    attention: list[AttentionCall] = field(default_factory=list)
    fusible: list[Fusible] = field(default_factory=list)

    def stretch(self) -> Stretch:
        return Stretch(
            forward_flop=per_sample(self.forward_flop),
            backward_flop=per_sample(self.backward_flop),
            forward_moved_bytes=Affine(fixed=self.forward_fixed, per_sample=self.forward_moved),
            backward_moved_bytes=Affine(fixed=self.backward_fixed, per_sample=self.backward_moved),
            activation_bytes=per_sample(self.saved),
            selective_activation_bytes=per_sample(self.selective),
            parameter_gradient_bytes=tuple(self.norms),
            core_bytes=per_sample(self.core),
            products=tuple(self.products),
            attention=tuple(self.attention),
            fusible=tuple(self.fusible),
        )


@dataclass
class _Layer:
    path: str
    inputs: int
    outputs: int
    kind: LayerKind
    is_tied: bool
    bias: bool
    same_input: int
    reaches_output: bool
    input_bytes: float
    output_bytes: float
    pieces: tuple[int, ...] = ()
    heads: int = 1
    own: _Sums = field(default_factory=_Sums)
    after: _Sums = field(default_factory=_Sums)


class UnitBuilder:
    """A unit's forward for one kind of numerics.

    Args:
        element_bytes: of activations and of the copies of weights that are multiplied.
    """

    def __init__(self, name: str, kind: str, *, element_bytes: int, is_block: bool) -> None:
        self.name, self.kind, self.is_block = name, kind, is_block
        self.e = element_bytes
        self.shapes: Counter[tuple[int, ...]] = Counter()
        self.experts: list[int] = []
        self._head = _Sums()
        self._layers: list[_Layer] = []
        self._here = self._head
        self._transient = 0.0
        self._backward_transient = 0.0

    # Weight layers

    def linear(
        self,
        path: str,
        inputs: int,
        outputs: int,
        *,
        rows: float,
        bias: bool = False,
        is_tied: bool = False,
        is_last: bool = False,
        pieces: tuple[int, ...] = (),
        heads: int = 1,
    ) -> None:
        """A product with a weight; what follows is behind this layer.

        Args:
            pieces: outputs that are taken apart, one after the other.
            heads: groups of outputs that stay together, one after the other.
        """
        e, flop = self.e, 2.0 * rows * inputs * outputs
        place = len(self._layers)
        layer = _Layer(
            path, inputs, outputs, LayerKind.LINEAR, is_tied, bias,
            place, is_last, e * rows * inputs, e * rows * outputs, pieces, heads,
        )  # fmt: skip
        own, weight = layer.own, float(e * inputs * outputs)
        own.forward_flop, own.backward_flop = flop, 2 * flop
        own.forward_moved = e * rows * (inputs + outputs)
        own.backward_moved = 2 * e * rows * (inputs + outputs)
        own.forward_fixed, own.backward_fixed = weight, 2 * weight
        own.forward_kernels, own.backward_kernels = 1, 2 + bias
        own.products.append(Product(m=per_sample(rows), n=outputs, k=inputs))
        if not is_tied:
            self.shapes[outputs, inputs] += 1
            if bias:
                self.shapes[(outputs,)] += 1
        self._layers.append(layer)
        self._here = layer.after

    def embedding(self, path: str, rows: int, width: int, *, tokens: float) -> None:
        e = self.e
        place = len(self._layers)
        layer = _Layer(
            path, rows, width, LayerKind.EMBEDDING, False, False, place, False,
            8.0 * tokens, e * tokens * width,
        )  # fmt: skip
        layer.own.forward_moved = 2 * e * tokens * width
        layer.own.backward_moved = e * tokens * width
        layer.own.backward_fixed = float(e * rows * width)
        layer.own.forward_kernels = layer.own.backward_kernels = 1
        self.shapes[rows, width] += 1
        self._layers.append(layer)
        self._here = layer.after

    def grouped(self, outputs: int, inputs: int, *, experts: int, rows: float) -> None:
        """Products of `rows` tokens, in all, by the weights of their experts."""
        e, flop = self.e, 2.0 * rows * inputs * outputs
        here, weight = self._here, float(e * experts * inputs * outputs)
        here.forward_flop += flop
        here.backward_flop += 2 * flop
        here.forward_moved += e * rows * (inputs + outputs)
        here.backward_moved += 2 * e * rows * (inputs + outputs)
        here.forward_fixed += weight
        here.backward_fixed += 2 * weight
        here.forward_kernels += 1
        here.backward_kernels += 2
        here.products.append(
            Product(
                kind=ProductKind.GROUPED,
                m=per_sample(rows / experts),
                n=outputs,
                k=inputs,
                count=experts,
            )
        )
        self.shapes[experts, outputs, inputs] += 1
        self.experts.append(experts)

    # Everything else

    def scan(self, *, flop: float, moved: float, kernels: int) -> None:
        """A state carried through the sequence, chunk by chunk: memory decides its time."""
        here = self._here
        here.forward_flop += flop
        here.backward_flop += 2.5 * flop
        here.forward_moved += moved
        here.backward_moved += 2.5 * moved
        here.forward_kernels += kernels
        here.backward_kernels += 2 * kernels

    def attention(self, call: AttentionCall) -> None:
        """A call of attention; its output is kept, being the next layer's input."""
        here, cost = self._here, attention_cost(call, AttentionKernel.FLASH2)
        call = call.model_copy(update={"kernel": AttentionKernel.FLASH2})
        here.forward_flop += cost.forward_flop
        here.backward_flop += cost.backward_flop
        here.forward_moved += cost.forward_moved_bytes
        here.backward_moved += cost.backward_moved_bytes
        here.forward_kernels += cost.forward_kernels
        here.backward_kernels += cost.backward_kernels
        output = self.e * call.heads * call.queries * call.value_width
        here.saved += cost.core_bytes + output
        here.selective += cost.core_bytes + output
        here.attention.append(call)

    def elementwise(
        self,
        kind: FusibleKind,
        *,
        fused: tuple[float, float],
        eager: tuple[float, float],
        kernels: tuple[int, int],
        saved: float = 0.0,
        saved_eager: float | None = None,
        transient: float = 0.0,
        fused_kernels: tuple[int, int] = (1, 1),
    ) -> None:
        """A chain of operations: bytes that it moves (forward, backward) fused and one operation
        after the other, kernels of the latter and of the former, what either way keeps, and
        `transient` bytes that one kernel does not need at its highest moment."""
        here = self._here
        saved_eager = saved if saved_eager is None else saved_eager
        here.forward_moved += eager[0]
        here.backward_moved += eager[1]
        here.forward_kernels += kernels[0]
        here.backward_kernels += kernels[1]
        here.saved += saved_eager
        here.fusible.append(
            Fusible(
                kind=kind,
                forward_moved_bytes=max(0.0, eager[0] - fused[0]),
                backward_moved_bytes=max(0.0, eager[1] - fused[1]),
                forward_kernels=HOST_WORK * max(0, kernels[0] - fused_kernels[0]),
                backward_kernels=HOST_WORK * max(0, kernels[1] - fused_kernels[1]),
                activation_bytes=max(0.0, saved_eager - saved),
                transient_bytes=transient,
            )
        )

    def keep(self, nbytes: float, *, of_product: bool = False, of_core: bool = False) -> None:
        """Bytes that stay until the backward; `of_product` stay under selective recompute of all
        but products, `of_core` go under that of the core."""
        self._here.core += nbytes * of_core
        self._here.saved += nbytes
        self._here.selective += nbytes * of_product

    def drop_with_core(self, nbytes: float) -> None:
        """Bytes, counted as kept already, that recompute of the core drops."""
        self._here.core += nbytes

    def norm(self, width: int, rows: float, *, rms: bool) -> None:
        """Layer norm or RMS norm with what it keeps: its output, being the next layer's input.

        torch's layer norm is one kernel. RMS norms are written out in fp32 by most models' code:
        cast, square, mean, scale, cast, multiply: 9 passes of 4 bytes in place of two of e.
        """
        e, elements = self.e, rows * width
        one = 2 * e * elements, 3 * e * elements
        written = (
            (9 * FP32 * elements, 18 * FP32 * elements) if rms else one
        )  # the backward is twice as long as the forward
        self.elementwise(
            FusibleKind.NORM,
            fused=one,
            eager=written,
            kernels=(6, 12) if rms else (1, 2),
            saved=e * elements,
            saved_eager=(e + (FP32 + e) * rms) * elements,
        )
        vectors = 1 if rms else 2
        self.shapes[(width,)] += vectors
        if self._here is not self._head:
            self._here.norms += [FP32 * width] * vectors

    def transient(self, forward: float, backward: float) -> None:
        """At least so much lives at the highest moment of a forward, and of a backward."""
        self._transient = max(self._transient, forward)
        self._backward_transient = max(self._backward_transient, backward)

    def cost(self, *, inputs: float, outputs: float) -> UnitCost:
        """Of the unit; `inputs` and `outputs` are bytes of one sample."""
        parts = [self._head, *(s for layer in self._layers for s in (layer.own, layer.after))]

        def total(name: str) -> float:
            return float(sum(getattr(part, name) for part in parts))

        head = self._head.stretch()
        return UnitCost(
            forward_flop=per_sample(total("forward_flop")),
            backward_flop=per_sample(total("backward_flop")),
            forward_moved_bytes=Affine(
                fixed=total("forward_fixed"), per_sample=total("forward_moved")
            ),
            backward_moved_bytes=Affine(
                fixed=total("backward_fixed"), per_sample=total("backward_moved")
            ),
            forward_kernels=HOST_WORK * int(total("forward_kernels")),
            backward_kernels=HOST_WORK * int(total("backward_kernels")),
            activation_bytes=per_sample(total("saved")),
            selective_activation_bytes=per_sample(total("selective")),
            input_bytes=per_sample(inputs),
            output_bytes=per_sample(outputs),
            forward_transient_bytes=per_sample(self._transient),
            backward_transient_bytes=per_sample(self._backward_transient),
            layers=tuple(self._layer_cost(layer, n) for n, layer in enumerate(self._layers)),
            products=head.products,
            attention=head.attention,
            fusible=head.fusible,
        )

    def _layer_cost(self, layer: _Layer, place: int) -> LayerCost:
        weight = 0 if layer.is_tied else FP32 * layer.inputs * layer.outputs
        bias = FP32 * layer.outputs * layer.bias
        return LayerCost(
            path=layer.path,
            kind=layer.kind,
            inputs=layer.inputs,
            outputs=layer.outputs,
            weight_bytes=weight,
            bias_bytes=bias,
            weight_gradient_bytes=weight,
            bias_gradient_bytes=bias,
            input_bytes=per_sample(layer.input_bytes),
            output_bytes=per_sample(layer.output_bytes),
            needs_input_gradient=layer.kind is not LayerKind.EMBEDDING,
            same_input=layer.same_input,
            sources=(place - 1,),
            reaches_output=layer.reaches_output,
            pieces=layer.pieces,
            heads=layer.heads,
            own=layer.own.stretch(),
            after=layer.after.stretch(),
        )


def unit_profile(drafts: dict[Numerics, tuple[UnitBuilder, UnitCost]], *, name: str) -> UnitProfile:
    """The unit whose forward was drafted once for each kind of numerics."""
    draft, _ = next(iter(drafts.values()))
    shapes = tuple(
        ParameterShape(sizes=sizes, element_bytes=FP32, count=count)
        for sizes, count in sorted(draft.shapes.items())
    )
    parameters = sum(shape.elements * shape.count for shape in shapes)
    return UnitProfile(
        name=name,
        kind=draft.kind,
        is_block=draft.is_block,
        parameters=parameters,
        trainable_parameters=parameters,
        parameter_bytes=FP32 * parameters,
        gradient_bytes=FP32 * parameters,
        dtypes=("float32",) if parameters else (),
        shapes=shapes,
        experts=tuple(sorted(set(draft.experts))),
        costs={kind: cost for kind, (_, cost) in drafts.items()},
    )
