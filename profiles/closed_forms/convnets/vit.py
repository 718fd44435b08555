"""Vision transformers, as torchvision builds them: patches, an encoder, one linear head."""

from __future__ import annotations

from profiles.closed_forms.convnets.draft import ConvnetBuilder, Map
from profiles.closed_forms.convnets.layers import Convnet

# Layers, hidden size, heads. Dosovitskiy et al., arXiv 2010.11929, table 1; tiny and small of
# Touvron et al., arXiv 2012.12877, table 1. The MLP is four times as wide.
SIZES = {
    "tiny": (12, 192, 3),
    "small": (12, 384, 6),
    "base": (12, 768, 12),
    "large": (24, 1024, 16),
    "huge": (32, 1280, 16),
}


def vit(name: str, pixels: int, *, size: str = "base", patch: int = 16) -> Convnet:
    """Of one of `SIZES`; positions for every patch and one for the class."""
    layers, hidden, heads = SIZES[size]
    draft = ConvnetBuilder(pixels)
    with draft.block("patches", draft.image):
        x = draft.convolution(draft.image, hidden, patch, stride=patch, padding=0, bias=True)
        x = Map(hidden, x.height * x.width + 1, 1, x.number)
        x = draft.embedded(x)
    for index in range(layers):
        with draft.block(f"layers.{index}", x):
            mixed = draft.attention(draft.norm(x), heads)
            x = draft.add(x, draft.project(mixed, hidden))
            wide = draft.project(draft.norm(x), 4 * hidden)
            wide = draft.relu(wide, in_place=False)  # GELU keeps as much: what came in
            x = draft.add(x, draft.project(wide, hidden))
    with draft.block("head", x):
        x = draft.norm(x)
        draft.classify(Map(hidden, 1, 1, x.number))
    return draft.network(name)
