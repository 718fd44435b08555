"""U-Net (B, C) of the GPipe papers: five levels, B convolutions each, C channels in the first."""

from __future__ import annotations

from profiles.closed_forms.convnets.draft import ConvnetBuilder, Map
from profiles.closed_forms.convnets.layers import Convnet

LEVELS = 5


def unet(name: str, pixels: int, *, convolutions: int = 5, channels: int = 64) -> Convnet:
    """torchgpipe's `benchmarks/models/unet`: instance norms without parameters, no biases."""
    draft = ConvnetBuilder(pixels)
    x = draft.image
    skips: list[Map] = []
    for level in range(LEVELS):
        width = channels * 2**level
        for index in range(convolutions):
            with draft.block(f"encoder{level}.{index}", x, *skips):
                x = _convolved(draft, x, width)
        with draft.block(f"down{level}", x, *skips):
            skips.append(x)
            x = draft.pool(x, 2, stride=2)
    for index in range(convolutions):
        is_last = index == convolutions - 1
        with draft.block(f"bottleneck.{index}", x, *skips):
            x = _convolved(draft, x, channels * 2 ** (LEVELS - is_last))
    for level in reversed(range(LEVELS)):
        with draft.block(f"up{level}", x, *skips):
            skip = skips.pop()
            x = draft.join(draft.upsample(x, skip.height, skip.width), skip)
        for index in range(convolutions):
            with draft.block(f"decoder{level}.{index}", x, *skips):
                x = _convolved(draft, x, channels * 2**level // 2)
    with draft.block("segment", x):
        draft.convolution(x, 1, 1)
    return draft.network(name)


def _convolved(draft: ConvnetBuilder, x: Map, width: int) -> Map:
    """Convolution, dropout of whole channels (a mask of one number each), norm, leaky ReLU."""
    x = draft.norm(draft.convolution(x, width, 3), affine=False)
    return draft.relu(x, in_place=False)
