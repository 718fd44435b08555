"""Costs of a block of layers: products of implicit matrices, traffic, what is kept and what fuses.

Networks lie in memory channel after channel, as torch makes them. Matrix units want the channels of
a position side by side, so that a library turns maps around products (`FusibleKind.LAYOUT`); a
stack that keeps channels last, or products on plain units, saves that.
"""

from __future__ import annotations

from profiles.closed_forms.convnets.layers import ConvnetBlock, ConvnetLayer, ConvnetOp
from profiles.model.affine import Affine
from profiles.model.profile import Numerics, UnitCost
from profiles.model.work import Fusible, FusibleKind, Product, ProductKind

FP32, HALF = 4, 2
# How often a layer reads or writes a map, kernel by kernel: (of the input, of the output) forward,
# then backward. Training norms read their input twice, for the moments and to use them; their
# backward reads input and output's gradient twice and writes the input's. Additions hand the
# gradient on as it is; where the two ways meet again it is added up: three passes.
PASSES = {
    ConvnetOp.NORM: ((2, 1), (2, 3)),
    ConvnetOp.ACTIVATION: ((1, 1), (1, 2)),
    ConvnetOp.POOL: ((1, 1), (2, 1)),
    ConvnetOp.ADD: ((1, 1), (0, 3)),
    ConvnetOp.JOIN: ((1, 1), (1, 1)),
    ConvnetOp.RESIZE: ((1, 1), (1, 1)),
}
# Multiplications of Winograd's F(2x2, 3x3) over those of the implicit product (Lavin and Gray,
# arXiv:1509.09308, section 4.1): 16 for 36.
WINOGRAD = 16 / 36
# Of the passes of an addition, what is left of it inside the kernel of the norm before it: the
# other way's map is read, and its gradient is written.
_LEFT_OF_ADD = 1 / 3
TURNED = 2 / 3


def block_cost(block: ConvnetBlock, numerics: Numerics) -> UnitCost:
    """Of one forward and backward, operation by operation; maps in 16 bits unless as built.

    Kept and moved bytes are those of tensors of the dtype of computing: norms take 16-bit maps with
    sums of fp32, whether torch casts the network or casts operation by operation.
    """
    e = FP32 if numerics is Numerics.AS_BUILT else HALF
    layers = block.layers
    weights = sum(layer.parameters for layer in layers if layer.kind.is_product)
    forward = backward = 0.0
    forward_kernels = backward_kernels = 0
    for layer in layers:
        there, back = _elements(layer)
        forward, backward = forward + e * there, backward + e * back
        products = 2 - layer.reads_image
        forward_kernels += 1
        # Gradients of a product's weights and of its input are kernels of their own.
        backward_kernels += products if layer.kind.is_product else 1
    casts = sum(layer.kind.is_product for layer in layers)
    if numerics is Numerics.BF16_AUTOCAST:
        # Weights are cast to 16 bits, their gradients back.
        forward_kernels += casts
        backward_kernels += casts
    saved = e * block.saved + block.marked_bytes
    # Mean and inverse deviation of every channel, in fp32, as many as a norm has parameters.
    moments = FP32 * sum(layer.parameters for layer in layers if layer.kind is ConvnetOp.NORM)
    image = sum(layer.inputs for layer in layers if layer.reads_image)
    saved += e * image if numerics is not Numerics.AS_BUILT else 0  # a copy in 16 bits
    widest = max(layer.outputs for layer in layers)
    # The gradient of a layer's output and of its input live beside that of the block's output,
    # which the way around it waits for.
    inside = max(
        layer.outputs + layer.inputs for layer in layers if layer.kind is not ConvnetOp.ADD
    )
    handed_on = block.output_elements or layers[-1].outputs
    fusible = tuple(_fusible(layers, e))
    turned = sum(f.transient_bytes for f in fusible)
    return UnitCost(
        forward_flop=Affine(per_sample=block.forward_flop),
        backward_flop=Affine(per_sample=block.backward_flop),
        forward_moved_bytes=_and_turned(forward, e * weights, fusible, forward=True),
        backward_moved_bytes=_and_turned(backward, 2 * e * weights, fusible, forward=False),
        forward_kernels=forward_kernels + sum(f.forward_kernels for f in fusible if _turns(f)),
        backward_kernels=backward_kernels + sum(f.backward_kernels for f in fusible if _turns(f)),
        activation_bytes=Affine(fixed=moments, per_sample=saved),
        selective_activation_bytes=Affine(fixed=moments, per_sample=saved),
        input_bytes=Affine(per_sample=e * block.input_elements),
        output_bytes=Affine(per_sample=e * handed_on),
        forward_transient_bytes=Affine(per_sample=saved + e * widest + turned),
        backward_transient_bytes=Affine(per_sample=e * inside + turned),
        products=tuple(_product(layer, e) for layer in layers if _is_bound(layer)),
        fusible=fusible,
    )


def _turns(fusible: Fusible) -> bool:
    return fusible.kind is FusibleKind.LAYOUT


def _and_turned(
    per_sample: float, fixed: float, fusible: tuple[Fusible, ...], *, forward: bool
) -> Affine:
    turned = sum(
        f.forward_moved_bytes if forward else f.backward_moved_bytes for f in fusible if _turns(f)
    )
    return Affine(fixed=fixed, per_sample=per_sample + turned)


def _is_bound(layer: ConvnetLayer) -> bool:
    """True if more than traffic bounds the layer: products, and norms by the instructions they
    take."""
    return layer.kind.is_product or layer.kind is ConvnetOp.NORM


def _elements(layer: ConvnetLayer) -> tuple[float, float]:
    """Read and written by a layer, forward and backward, for one image."""
    if layer.kind.is_product:
        once = layer.inputs + layer.outputs
        return once, once * (2 - layer.reads_image)
    (of_input, of_output), (back_input, back_output) = PASSES[layer.kind]
    return (
        of_input * layer.inputs + of_output * layer.outputs,
        back_input * layer.inputs + back_output * layer.outputs,
    )


def _product(layer: ConvnetLayer, e: int) -> Product:
    """A convolution as the product it stands for: a row for each position that it writes."""
    there, back = _elements(layer)
    fixed = e * layer.parameters if layer.kind.is_product else 0
    moved = {
        "forward_bytes": Affine(fixed=fixed, per_sample=e * there),
        "backward_bytes": Affine(fixed=2 * fixed, per_sample=e * back),
    }
    if layer.kind is ConvnetOp.NORM:
        elements = Affine(per_sample=layer.inputs / layer.columns)
        return Product(kind=ProductKind.ELEMENTWISE, m=elements, n=layer.columns, k=1, **moved)
    return Product(
        kind=ProductKind.CONVOLUTION if layer.kind is ConvnetOp.CONVOLUTION else ProductKind.LINEAR,
        m=Affine(per_sample=layer.rows),
        n=layer.columns,
        k=layer.depth,
        count=layer.groups,
        needs_input_gradient=not layer.reads_image,
        fewest=WINOGRAD if layer.is_winograd else 1.0,
        **moved,
    )


def _fusible(layers: list[ConvnetLayer], e: int) -> list[Fusible]:
    """Activations and additions inside the kernel of the norm or product before them, and maps
    that are turned around products."""
    savings = []
    for kind, fusible, saved in (
        (ConvnetOp.ACTIVATION, FusibleKind.GATE, 1.0),
        (ConvnetOp.ADD, FusibleKind.RESIDUAL, 1 - _LEFT_OF_ADD),
    ):
        alike = [_elements(layer) for layer in layers if layer.kind is kind]
        if alike:
            savings.append(
                Fusible(
                    kind=fusible,
                    forward_moved_bytes=saved * e * sum(there for there, _ in alike),
                    backward_moved_bytes=saved * e * sum(back for _, back in alike),
                    forward_kernels=len(alike),
                    backward_kernels=len(alike),
                )
            )
    convolutions = [layer for layer in layers if layer.kind is ConvnetOp.CONVOLUTION]
    if convolutions:
        # What a convolution takes and gives is read and written once more.
        turned = [2 * TURNED * e * (layer.inputs + layer.outputs) for layer in convolutions]
        back = (t * (2 - layer.reads_image) for t, layer in zip(turned, convolutions, strict=True))
        savings.append(
            Fusible(
                kind=FusibleKind.LAYOUT,
                forward_moved_bytes=sum(turned),
                backward_moved_bytes=sum(back),
                forward_kernels=2 * len(convolutions),
                backward_kernels=3 * len(convolutions),
                transient_bytes=max(turned) / 2,
            )
        )
    return savings
