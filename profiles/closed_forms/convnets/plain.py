"""Networks of plain stacks: AlexNet, VGG, DenseNet, as torchvision builds them."""

from __future__ import annotations

from profiles.closed_forms.convnets.draft import ConvnetBuilder, Map
from profiles.closed_forms.convnets.layers import Convnet

# Convolutions of each stage. Simonyan and Zisserman, arXiv 1409.1556, table 1 (A, B, D, E).
VGG_DEPTHS = {11: (1, 1, 2, 2, 2), 13: (2, 2, 2, 2, 2), 16: (2, 2, 3, 3, 3), 19: (2, 2, 4, 4, 4)}
# Layers of each stage, growth and first width. Huang et al., arXiv 1608.06993, table 1.
DENSENETS = {
    121: ((6, 12, 24, 16), 32, 64),
    161: ((6, 12, 36, 24), 48, 96),
    169: ((6, 12, 32, 32), 32, 64),
    201: ((6, 12, 48, 32), 32, 64),
}


def vgg(name: str, pixels: int, *, depth: int = 16) -> Convnet:
    draft = ConvnetBuilder(pixels)
    x = draft.image
    for stage, count in enumerate(VGG_DEPTHS[depth]):
        with draft.block(f"stage{stage + 1}", x):
            for _ in range(count):
                width = min(512, 64 * 2**stage)
                x = draft.relu(draft.convolution(x, width, 3, bias=True))
            x = draft.pool(x, 2, stride=2)
    return _classified(draft, x, name, (4096, 4096), side=7)


def alexnet(name: str, pixels: int) -> Convnet:
    draft = ConvnetBuilder(pixels)
    with draft.block("features", draft.image):
        x = draft.relu(draft.convolution(draft.image, 64, 11, stride=4, padding=2, bias=True))
        x = draft.relu(draft.convolution(draft.pool(x, 3, stride=2), 192, 5, bias=True))
        x = draft.relu(draft.convolution(draft.pool(x, 3, stride=2), 384, 3, bias=True))
        x = draft.relu(draft.convolution(x, 256, 3, bias=True))
        x = draft.pool(draft.relu(draft.convolution(x, 256, 3, bias=True)), 3, stride=2)
    return _classified(draft, x, name, (4096, 4096), side=6)


def densenet(name: str, pixels: int, *, depth: int = 121) -> Convnet:
    stages, growth, width = DENSENETS[depth]
    draft = ConvnetBuilder(pixels)
    with draft.block("stem", draft.image):
        x = draft.relu(draft.norm(draft.convolution(draft.image, width, 7, stride=2)))
        x = draft.pool(x, 3, stride=2, padding=1)
    for stage, count in enumerate(stages):
        with draft.block(f"denseblock{stage + 1}", x):
            parts = [x]
            for _ in range(count):
                x = draft.join(*parts) if len(parts) > 1 else x
                hidden = draft.convolution(draft.relu(draft.norm(x)), 4 * growth, 1)
                parts.append(draft.convolution(draft.relu(draft.norm(hidden)), growth, 3))
            x = draft.relu(draft.norm(draft.join(*parts)))
        if stage < len(stages) - 1:
            with draft.block(f"transition{stage + 1}", x):
                x = draft.pool(draft.convolution(x, x.channels // 2, 1), 2, stride=2, mean=True)
    with draft.block("head", x):
        draft.classify(draft.mean(x))
    return draft.network(name)


def _classified(
    draft: ConvnetBuilder, x: Map, name: str, widths: tuple[int, ...], *, side: int
) -> Convnet:
    """Positions are brought to `side` x `side`, then come wide linear layers with dropout."""
    with draft.block("classifier", x):
        if x.height != side:
            x = draft.upsample(x, side, side)
        x = draft.flat(x)
        for width in widths:
            x = draft.dropout(draft.relu(draft.linear(x, width)))
        draft.classify(x)
    return draft.network(name)
