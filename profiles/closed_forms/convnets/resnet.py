"""ResNet and ResNeXt, as torchvision builds them: the stride is in the 3x3 convolution."""

from __future__ import annotations

from collections.abc import Sequence

from profiles.closed_forms.convnets.draft import ConvnetBuilder, Map
from profiles.closed_forms.convnets.layers import Convnet

# Blocks in each of the four stages. He et al., arXiv 1512.03385, table 1.
DEPTHS = {
    18: (2, 2, 2, 2),
    34: (3, 4, 6, 3),
    50: (3, 4, 6, 3),
    101: (3, 4, 23, 3),
    152: (3, 8, 36, 3),
}
_BASIC = (18, 34)


def resnet(
    name: str,
    pixels: int,
    *,
    depth: int = 50,
    groups: int = 1,
    group_width: int = 64,
) -> Convnet:
    """Depth 18 to 152; `groups` of `group_width` channels in a block's middle (32 x 4 ...)."""
    draft = ConvnetBuilder(pixels)
    with draft.block("stem", draft.image):
        x = draft.convolution(draft.image, 64, 7, stride=2)
        x = draft.pool(draft.relu(draft.norm(x)), 3, stride=2, padding=1)
    expansion = 1 if depth in _BASIC else 4
    for stage, blocks in enumerate(DEPTHS[depth]):
        planes = 64 * 2**stage
        inner = planes if depth in _BASIC else planes * group_width // 64 * groups
        for index in range(blocks):
            stride = 2 if stage and not index else 1
            with draft.block(f"layer{stage + 1}.{index}", x):
                sizes = (3, 3) if depth in _BASIC else (1, 3, 1)
                x = _residual(draft, x, inner, planes * expansion, sizes, stride, groups)
    with draft.block("head", x):
        draft.classify(draft.mean(x))
    return draft.network(name)


def _residual(
    draft: ConvnetBuilder,
    x: Map,
    inner: int,
    outer: int,
    sizes: Sequence[int],
    stride: int,
    groups: int,
) -> Map:
    """Convolutions with a way around them; the first 3x3 one has the stride and the groups."""
    hidden, first = x, sizes.index(3)
    for index, size in enumerate(sizes):
        is_last = index == len(sizes) - 1
        hidden = draft.convolution(
            hidden,
            outer if is_last else inner,
            size,
            stride=stride if index == first else 1,
            groups=groups if size == 3 else 1,
        )
        hidden = draft.norm(hidden)
        if not is_last:
            hidden = draft.relu(hidden)
    around = x
    if stride != 1 or x.channels != outer:
        around = draft.norm(draft.convolution(x, outer, 1, stride=stride, padding=0))
    return draft.relu(draft.add(hidden, around))
