"""A draft of a network: its forward written down, layer by layer."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from profiles.closed_forms.convnets.layers import Convnet, ConvnetBlock, ConvnetLayer, ConvnetOp
from profiles.errors import InputError

# torch keeps where a maximum was as int64 (ATen, max_pool2d_with_indices).
POSITION_BYTES = 8
CLASSES = 1000  # ImageNet's


@dataclass(frozen=True, slots=True)
class Map:
    """A tensor of one image: channels, height, width; `number` tells tensors apart."""

    channels: int
    height: int
    width: int
    number: int
    is_image: bool = False

    @property
    def elements(self) -> int:
        return self.channels * self.height * self.width


class ConvnetBuilder:
    """Writes a network's forward down, layer by layer, as torch.nn runs it in training."""

    def __init__(self, pixels: int, channels: int = 3) -> None:
        self.blocks: list[ConvnetBlock] = []
        self.image = Map(channels, pixels, pixels, 0, is_image=True)
        self._count = 0
        self._kept = {0}  # the batch is there anyway

    def network(self, name: str) -> Convnet:
        return Convnet(name, self.image.height, tuple(self.blocks))

    @contextmanager
    def block(self, name: str, *inputs: Map) -> Iterator[ConvnetBlock]:
        """Layers until the end of the `with` belong to the block `name`, which takes `inputs`."""
        taken = {x.number: x.elements for x in inputs}
        block = ConvnetBlock(name, input_elements=sum(taken.values()))
        if self.blocks:
            self.blocks[-1].output_elements = block.input_elements
        self.blocks.append(block)
        yield block

    # Products

    def convolution(
        self,
        x: Map,
        channels: int,
        kernel: int | tuple[int, int],
        *,
        stride: int | tuple[int, int] = 1,
        padding: int | tuple[int, int] | None = None,
        groups: int = 1,
        bias: bool = False,
    ) -> Map:
        """nn.Conv2d; without `padding` the size stays, but for the stride."""
        tall, wide = _pair(kernel)
        padding = (tall // 2, wide // 2) if padding is None else _pair(padding)
        (down, right), (above, sideways) = _pair(stride), padding
        out = self._map(
            channels,
            (x.height + 2 * above - tall) // down + 1,
            (x.width + 2 * sideways - wide) // right + 1,
        )
        depth = x.channels // groups * tall * wide
        self._keep(x)
        self._add(
            ConvnetLayer(
                ConvnetOp.CONVOLUTION,
                x.elements,
                out.elements,
                parameters=depth * channels + channels * bias,
                rows=out.height * out.width,
                depth=depth,
                columns=channels // groups,
                groups=groups,
                reads_image=x.is_image,
                is_winograd=(tall, wide, down, right, groups) == (3, 3, 1, 1, 1),
            )
        )
        return out

    def linear(self, x: Map, width: int, *, bias: bool = True) -> Map:
        """nn.Linear over all of an image's elements."""
        self._keep(x)
        out = self._map(width, 1, 1)
        parameters = x.elements * width + width * bias
        self._add(
            ConvnetLayer(ConvnetOp.LINEAR, x.elements, width, parameters, 1, x.elements, width)
        )
        return out

    def project(self, x: Map, width: int) -> Map:
        """nn.Linear at every position."""
        self._keep(x)
        out = self._map(width, x.height, x.width)
        rows, depth = x.height * x.width, x.channels
        parameters = depth * width + width
        self._add(
            ConvnetLayer(ConvnetOp.LINEAR, x.elements, out.elements, parameters, rows, depth, width)
        )
        return out

    def attention(self, x: Map, heads: int) -> Map:
        """Queries, keys and values of every position, scores of each pair; scores are kept."""
        positions, width = x.height * x.width, x.channels // heads
        parts = self.project(x, 3 * x.channels)
        self._keep(parts)
        scores = self._map(heads, positions, positions)
        pair = ConvnetLayer(
            ConvnetOp.LINEAR, 2 * x.elements, scores.elements, 0, positions, width, positions, heads
        )
        self._add(pair)
        self._add(ConvnetLayer(ConvnetOp.ACTIVATION, scores.elements, scores.elements))
        self._keep(scores)
        out = self._map(x.channels, x.height, x.width)
        inputs = scores.elements + x.elements
        self._add(
            ConvnetLayer(
                ConvnetOp.LINEAR, inputs, out.elements, 0, positions, positions, width, heads
            )
        )
        return out

    # What streams memory

    def embedded(self, x: Map) -> Map:
        """Positions are added, and one token for the class."""
        out = self._map(x.channels, x.height, x.width)
        parameters = x.channels * x.height + x.channels
        self._add(ConvnetLayer(ConvnetOp.ADD, x.elements, out.elements, parameters))
        return out

    def norm(self, x: Map, *, affine: bool = True) -> Map:
        """Batch norm, or instance norm: its input is kept."""
        self._keep(x)
        out = self._map(x.channels, x.height, x.width)
        parameters = 2 * x.channels if affine else 0
        self._add(
            ConvnetLayer(ConvnetOp.NORM, x.elements, out.elements, parameters, columns=x.channels)
        )
        return out

    def relu(self, x: Map, *, in_place: bool = True) -> Map:
        """Its output is kept."""
        out = x if in_place else self._map(x.channels, x.height, x.width)
        self._keep(out)
        self._add(ConvnetLayer(ConvnetOp.ACTIVATION, x.elements, x.elements))
        return out

    def pool(
        self,
        x: Map,
        kernel: int,
        *,
        stride: int,
        padding: int = 0,
        up: bool = False,
        mean: bool = False,
    ) -> Map:
        """Maxima, whose positions are kept, or means; the input is kept. `up`: sizes are rounded
        up."""
        sizes = [
            (size + 2 * padding - kernel + (stride - 1) * up) // stride + 1
            for size in (x.height, x.width)
        ]
        self._keep(x)
        out = self._map(x.channels, *sizes)
        if not mean:
            self.blocks[-1].marked_bytes += POSITION_BYTES * out.elements
        self._add(ConvnetLayer(ConvnetOp.POOL, x.elements, out.elements))
        return out

    def mean(self, x: Map) -> Map:
        """Over all positions."""
        out = self._map(x.channels, 1, 1)
        self._add(ConvnetLayer(ConvnetOp.POOL, x.elements, out.elements))
        return out

    def dropout(self, x: Map) -> Map:
        """The mask is kept: a byte for each element."""
        out = self._map(x.channels, x.height, x.width)
        self.blocks[-1].marked_bytes += x.elements
        self._add(ConvnetLayer(ConvnetOp.ACTIVATION, x.elements, out.elements))
        return out

    def add(self, x: Map, y: Map) -> Map:
        out = self._map(x.channels, x.height, x.width)
        self._add(ConvnetLayer(ConvnetOp.ADD, x.elements + y.elements, out.elements))
        return out

    def join(self, *parts: Map) -> Map:
        """Side by side along the channels."""
        out = self._map(sum(part.channels for part in parts), parts[0].height, parts[0].width)
        self._add(ConvnetLayer(ConvnetOp.JOIN, out.elements, out.elements))
        return out

    def upsample(self, x: Map, height: int, width: int) -> Map:
        """Nearest neighbours, padded to that size."""
        out = self._map(x.channels, height, width)
        self._add(ConvnetLayer(ConvnetOp.RESIZE, x.elements, out.elements))
        return out

    def classify(self, x: Map) -> None:
        """The classifier: a linear layer over all of an image's elements."""
        self.linear(x, CLASSES)

    def flat(self, x: Map) -> Map:
        """All elements as channels; nothing is computed."""
        return Map(x.elements, 1, 1, x.number)

    def _map(self, channels: int, height: int, width: int) -> Map:
        self._count += 1
        if min(channels, height, width) < 1:
            side = self.image.height
            raise InputError(
                f"images of {side} x {side} shrink to nothing inside the network",
                hints=["give the side of the images that it was trained on"],
            )
        return Map(channels, height, width, self._count)

    def _keep(self, x: Map) -> None:
        if x.number not in self._kept:
            self._kept.add(x.number)
            self.blocks[-1].saved += x.elements

    def _add(self, layer: ConvnetLayer) -> None:
        self.blocks[-1].layers.append(layer)


def _pair(size: int | tuple[int, int]) -> tuple[int, int]:
    return size if isinstance(size, tuple) else (size, size)
