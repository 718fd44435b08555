"""Layers of networks on images: shapes for one image, and what training keeps of them."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum


class ConvnetOp(StrEnum):
    """Operation of a layer. Products multiply matrices; the others stream memory."""

    CONVOLUTION = "convolution"
    LINEAR = "linear"
    NORM = "norm"
    ACTIVATION = "activation"
    POOL = "pool"
    ADD = "add"
    JOIN = "join"
    RESIZE = "resize"

    @property
    def is_product(self) -> bool:
        return self in (ConvnetOp.CONVOLUTION, ConvnetOp.LINEAR)


@dataclass(frozen=True, slots=True)
class ConvnetLayer:
    """One layer, for one image.

    Attributes:
        inputs, outputs: elements read and written.
        parameters: trainable, biases included.
        rows, depth, columns: the product as matrices, (rows, depth) x (depth, columns), for each of
            `groups`: a convolution has a row for each position that it writes. 0 where there is
            none.
            Columns of a norm are its channels.
        reads_image: its input needs no gradient.
        is_winograd: 3x3 at stride 1, for which there is a way with fewer multiplications.
    """

    kind: ConvnetOp
    inputs: int
    outputs: int
    parameters: int = 0
    rows: int = 0
    depth: int = 0
    columns: int = 0
    groups: int = 1
    reads_image: bool = False
    is_winograd: bool = False

    @property
    def tensors(self) -> tuple[tuple[int, ...], ...]:
        """Sizes of the trainable parameters: a product's weight as the matrix that an optimizer or
        PowerSGD takes it for, (outputs, inputs), and its bias; else vectors, two of a norm."""
        if not self.parameters:
            return ()
        if not self.kind.is_product:
            vectors = 2 if self.kind is ConvnetOp.NORM else 1
            return ((self.parameters // vectors,),) * vectors
        outputs = self.columns * self.groups
        bias = self.parameters - outputs * self.depth
        return ((outputs, self.depth), *(((bias,),) if bias else ()))

    @property
    def forward_flop(self) -> int:
        """2 for each multiply-add."""
        return 2 * self.rows * self.depth * self.columns * self.groups

    @property
    def backward_flop(self) -> int:
        """Gradients of the weights, and of the input where it needs one."""
        return self.forward_flop * (1 if self.reads_image else 2)


@dataclass(slots=True)
class ConvnetBlock:
    """Layers that stay together: on one device, and recomputed as one.

    Attributes:
        saved: elements that the backward needs for one image, none counted twice in the network.
        marked_bytes: of masks and positions of maxima that it needs besides, whatever the dtype.
        input_elements: what recompute keeps instead.
        output_elements: handed to the next block, with what later ones take besides.
    """

    name: str
    layers: list[ConvnetLayer] = field(default_factory=list)
    saved: int = 0
    marked_bytes: int = 0
    input_elements: int = 0
    output_elements: int = 0

    @property
    def parameters(self) -> int:
        return sum(layer.parameters for layer in self.layers)

    @property
    def forward_flop(self) -> int:
        return sum(layer.forward_flop for layer in self.layers)

    @property
    def backward_flop(self) -> int:
        return sum(layer.backward_flop for layer in self.layers)


@dataclass(frozen=True, slots=True, eq=False)
class Convnet:
    """A network on square images of `pixels` a side."""

    name: str
    pixels: int
    blocks: tuple[ConvnetBlock, ...]

    @property
    def parameters(self) -> int:
        return sum(block.parameters for block in self.blocks)
