"""AmoebaNet-D (L, D) of the GPipe papers: cells of ten operations, L normal ones, D filters."""

from __future__ import annotations

from collections.abc import Sequence

from profiles.closed_forms.convnets.draft import ConvnetBuilder, Map
from profiles.closed_forms.convnets.layers import Convnet

# Which of a cell's states each operation takes; its results are added two by two. Real et al.,
# arXiv 1802.01548, as torchgpipe's `benchmarks/models/amoebanet` has it.
Cell = Sequence[tuple[int, str]]
NORMAL: Cell = (
    (1, "1x1"), (1, "pool3"), (1, "none"), (0, "1x7"), (0, "1x1"),
    (0, "1x7"), (2, "pool3"), (2, "none"), (1, "pool3"), (5, "1x1"),
)  # fmt: skip
REDUCING: Cell = (
    (0, "pool2"), (0, "pool3"), (2, "none"), (1, "3x3"), (2, "1x7"),
    (2, "pool3"), (3, "none"), (1, "pool2"), (2, "pool3"), (3, "1x1"),
)  # fmt: skip
NORMAL_JOINED, REDUCING_JOINED = (0, 3, 4, 6), (4, 5, 6)


def amoebanet(name: str, pixels: int, *, cells: int = 18, filters: int = 256) -> Convnet:
    draft = ConvnetBuilder(pixels)
    width = filters // 4
    with draft.block("stem", draft.image):
        x = before = draft.norm(draft.convolution(draft.image, width, 3, stride=2))
    was_reducing = False
    kinds = [True, True]  # two cells that reduce, then three groups of normal ones between two
    for group in range(3):
        kinds += [False] * (cells // 3) + ([True] if group < 2 else [])
    for number, is_reducing in enumerate(kinds):
        width *= 2 if is_reducing else 1
        with draft.block(f"cell{number}", x, before):
            x, before = _cell(draft, x, before, width, is_reducing, was_reducing), x
        was_reducing = is_reducing
    with draft.block("head", x):
        draft.classify(draft.mean(x))
    return draft.network(name)


def _cell(
    draft: ConvnetBuilder, x: Map, before: Map, width: int, is_reducing: bool, was_reducing: bool
) -> Map:
    first = _convolved(draft, x, width)
    second = before
    if was_reducing:
        second = _halved(draft, before, width)
    elif before.channels != width:
        second = _convolved(draft, before, width)
    states = [first, second]
    operations = REDUCING if is_reducing else NORMAL
    for pair in zip(operations[::2], operations[1::2], strict=True):
        results = [
            _operation(draft, states[index], kind, 2 if is_reducing and index < 2 else 1)
            for index, kind in pair
        ]
        states.append(draft.add(*results))
    joined = REDUCING_JOINED if is_reducing else NORMAL_JOINED
    return draft.join(*(states[index] for index in joined))


def _operation(draft: ConvnetBuilder, x: Map, kind: str, stride: int) -> Map:
    width, thin = x.channels, x.channels // 4
    if kind == "none":
        return x if stride == 1 else _halved(draft, x, width)
    if kind == "pool2":
        return draft.pool(x, 2, stride=stride)
    if kind == "pool3":
        return draft.pool(x, 3, stride=stride, padding=1)
    if kind == "1x1":
        return _convolved(draft, x, width, stride=stride)
    x = _convolved(draft, x, thin)
    if kind == "3x3":
        x = _convolved(draft, x, thin, 3, stride=stride)
    else:
        x = _convolved(draft, x, thin, (1, 7), stride=(1, stride))
        x = _convolved(draft, x, thin, (7, 1), stride=(stride, 1))
    return _convolved(draft, x, width)


def _convolved(
    draft: ConvnetBuilder,
    x: Map,
    width: int,
    kernel: int | tuple[int, int] = 1,
    *,
    stride: int | tuple[int, int] = 1,
) -> Map:
    """ReLU, which comes first and keeps its input, then convolution and norm."""
    x = draft.relu(x, in_place=False)
    return draft.norm(draft.convolution(x, width, kernel, stride=stride))


def _halved(draft: ConvnetBuilder, x: Map, width: int) -> Map:
    """Two convolutions of 1x1 on every other position."""
    x = draft.relu(x, in_place=False)
    halves = [draft.convolution(x, width // 2, 1, stride=2) for _ in range(2)]
    return draft.norm(draft.join(*halves))
