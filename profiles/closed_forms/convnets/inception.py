"""Inception-3 and GoogLeNet: several ways side by side. As torchvision builds them, without the
auxiliary classifiers, which take a few percent of a step and not everyone trains with them."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from profiles.closed_forms.convnets.draft import ConvnetBuilder, Map
from profiles.closed_forms.convnets.layers import Convnet

Size = int | tuple[int, int]
# Channels, kernel and stride of a convolution; padding keeps the size where the stride is 1.
Step = tuple[int, Size] | tuple[int, Size, int]
# Widths of GoogLeNet's blocks: 1x1; 1x1, 3x3; 1x1, 3x3; after the pool. Szegedy et al.,
# arXiv 1409.4842, table 1; torchvision has 3x3 where the paper has 5x5.
GOOGLENET = (
    ((64, 96, 128, 16, 32, 32), (128, 128, 192, 32, 96, 64)),
    (
        (192, 96, 208, 16, 48, 64),
        (160, 112, 224, 24, 64, 64),
        (128, 128, 256, 24, 64, 64),
        (112, 144, 288, 32, 64, 64),
        (256, 160, 320, 32, 128, 128),
    ),
    ((256, 160, 320, 32, 128, 128), (384, 192, 384, 48, 128, 128)),
)


def inception3(name: str, pixels: int) -> Convnet:
    """Szegedy et al., arXiv 1512.00567; made for 299 x 299."""
    draft = ConvnetBuilder(pixels)
    with draft.block("stem", draft.image):
        x = _chain(draft, draft.image, [(32, 3, 2)])
        x = _unpadded(draft, x, 32)
        x = draft.pool(_chain(draft, x, [(64, 3)]), 3, stride=2)
        x = _unpadded(draft, _chain(draft, x, [(80, 1)]), 192)
        x = draft.pool(x, 3, stride=2)
    mixed: list[Callable[[Map], Map]] = [
        *(_wide(draft, pooled) for pooled in (32, 64, 64)),
        lambda x: _shrunk(draft, x, [[(384, 3, 2)], [(64, 1), (96, 3), (96, 3, 2)]]),
        *(_long(draft, width) for width in (128, 160, 160, 192)),
        lambda x: _shrunk(
            draft,
            x,
            [[(192, 1), (320, 3, 2)], [(192, 1), (192, (1, 7)), (192, (7, 1)), (192, 3, 2)]],
        ),
        _split(draft),
        _split(draft),
    ]
    for number, run in enumerate(mixed):
        with draft.block(f"mixed{number}", x):
            x = run(x)
    with draft.block("head", x):
        draft.classify(draft.dropout(draft.mean(x)))
    return draft.network(name)


def googlenet(name: str, pixels: int) -> Convnet:
    draft = ConvnetBuilder(pixels)
    with draft.block("stem", draft.image):
        x = draft.relu(draft.norm(draft.convolution(draft.image, 64, 7, stride=2)))
        x = draft.pool(x, 3, stride=2, up=True)
        x = draft.pool(_chain(draft, x, [(64, 1), (192, 3)]), 3, stride=2, up=True)
    for stage, widths in enumerate(GOOGLENET):
        if stage:
            with draft.block(f"pool{stage + 2}", x):
                x = draft.pool(x, 3 if stage == 1 else 2, stride=2, up=True)
        for index, (one, low, middle, thin, thick, pooled) in enumerate(widths):
            with draft.block(f"inception{stage + 3}{'abcde'[index]}", x):
                after = draft.pool(x, 3, stride=1, padding=1)
                x = draft.join(
                    _chain(draft, x, [(one, 1)]),
                    _chain(draft, x, [(low, 1), (middle, 3)]),
                    _chain(draft, x, [(thin, 1), (thick, 3)]),
                    _chain(draft, after, [(pooled, 1)]),
                )
    with draft.block("head", x):
        draft.classify(draft.dropout(draft.mean(x)))
    return draft.network(name)


def _chain(draft: ConvnetBuilder, x: Map, steps: Sequence[Step]) -> Map:
    """Convolution, norm, ReLU for each; those with a stride are not padded."""
    for channels, kernel, *stride in steps:
        x = draft.convolution(
            x, channels, kernel, stride=stride[0] if stride else 1, padding=0 if stride else None
        )
        x = draft.relu(draft.norm(x))
    return x


def _unpadded(draft: ConvnetBuilder, x: Map, channels: int) -> Map:
    return draft.relu(draft.norm(draft.convolution(x, channels, 3, padding=0)))


def _pooled(draft: ConvnetBuilder, x: Map, channels: int) -> Map:
    return _chain(draft, draft.pool(x, 3, stride=1, padding=1, mean=True), [(channels, 1)])


def _wide(draft: ConvnetBuilder, pooled: int) -> Callable[[Map], Map]:
    return lambda x: draft.join(
        _chain(draft, x, [(64, 1)]),
        _chain(draft, x, [(48, 1), (64, 5)]),
        _chain(draft, x, [(64, 1), (96, 3), (96, 3)]),
        _pooled(draft, x, pooled),
    )


def _long(draft: ConvnetBuilder, width: int) -> Callable[[Map], Map]:
    w = width
    return lambda x: draft.join(
        _chain(draft, x, [(192, 1)]),
        _chain(draft, x, [(w, 1), (w, (1, 7)), (192, (7, 1))]),
        _chain(draft, x, [(w, 1), (w, (7, 1)), (w, (1, 7)), (w, (7, 1)), (192, (1, 7))]),
        _pooled(draft, x, 192),
    )


def _shrunk(draft: ConvnetBuilder, x: Map, ways: Sequence[Sequence[Step]]) -> Map:
    return draft.join(*(_chain(draft, x, way) for way in ways), draft.pool(x, 3, stride=2))


def _split(draft: ConvnetBuilder) -> Callable[[Map], Map]:
    def run(x: Map) -> Map:
        near, far = _chain(draft, x, [(384, 1)]), _chain(draft, x, [(448, 1), (384, 3)])
        ends = [
            draft.join(_chain(draft, y, [(384, (1, 3))]), _chain(draft, y, [(384, (3, 1))]))
            for y in (near, far)
        ]
        return draft.join(_chain(draft, x, [(320, 1)]), *ends, _pooled(draft, x, 192))

    return run
