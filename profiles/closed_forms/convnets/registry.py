"""Networks of convolutions by the names that tables use, and by rule where a name says nothing."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import lru_cache
from math import sqrt

from profiles.closed_forms.convnets.amoebanet import amoebanet
from profiles.closed_forms.convnets.inception import googlenet, inception3
from profiles.closed_forms.convnets.layers import Convnet, ConvnetLayer
from profiles.closed_forms.convnets.plain import DENSENETS, VGG_DEPTHS, alexnet, densenet, vgg
from profiles.closed_forms.convnets.resnet import DEPTHS, resnet
from profiles.closed_forms.convnets.unet import unet
from profiles.closed_forms.convnets.vit import SIZES, vit
from profiles.errors import InputError
from profiles.record.bounds import MOST_LAYERS, whole_number

# What each was made for, where a table does not say: its paper's images, and those of the GPipe
# papers for U-Net.
_PIXELS = {"inception": 299, "unet": 192}
_USUAL_PIXELS = 224
_SIDE = re.compile(r"-?(\d+)px")  # all digits: four of eight would be another side
_MOST_PIXELS = 2**14
# What stands in for a network that is not known by name, for each kind that tables tell apart.
_TYPICAL = {
    "nasnet": "amoebanet",
    "unet": "unet",
    "vit": "vit-base",
    "deit": "vit-base",
    "swin": "vit-base",
}
# Parameters may differ by this share (another number of classes, auxiliary heads) before a name is
# taken to mean a network of another width.
_SAME_SIZE = 0.15


@lru_cache(maxsize=256)
def network_of(
    name: str | None, *, kind: str | None = None, parameters: float | None = None, pixels: int = 0
) -> tuple[Convnet, str]:
    """The network that a table calls `name`, and what was assumed, in words ("" where nothing was).

    A side of images in the name ("resnet50-128px") counts before `pixels`; with neither it is what
    the network was made for. A name without sizes, or with others than `parameters` tells, is a
    network of its family made larger or smaller until its parameters are as many.
    """
    plain = re.sub(r"[\s_-]+", "-", (name or "").lower())
    said = _SIDE.search(plain)
    if said:
        pixels = whole_number(said[1], "px", most=_MOST_PIXELS)
        plain = plain.replace(said[0], "")
    build = _by_name(plain)
    assumed = ""
    if build is None:
        typical = _TYPICAL.get((kind or "").lower(), "resnet50")
        build = _by_name(typical)
        assumed = f"layers as those of {typical}"
        assert build is not None
    if not pixels:
        family = next((key for key in _PIXELS if key in plain), "")
        pixels = _PIXELS.get(family, _USUAL_PIXELS)
    network = build(plain or (kind or ""), pixels)
    if parameters and abs(parameters / network.parameters - 1) > _SAME_SIZE:
        assumed = f"{assumed or 'layers as usual'}, scaled to {parameters / 1e6:.4g} M parameters"
        network = _grown(network, parameters)
    return network, assumed


def is_known(name: str) -> bool:
    """True if `name` identifies one network, so that no typical one stands in for it.

    >>> is_known("ResNet50-128px"), is_known("resnet"), is_known("nasnet")
    (True, False, False)
    """
    plain = re.sub(r"[\s_-]+", "-", name.lower())
    return _by_name(_SIDE.sub("", plain)) is not None


_DIGITS = 9


def _by_name(plain: str) -> Callable[[str, int], Convnet] | None:
    """Return its builder, given the name and the side of its images."""
    numbers = [int(number) for number in re.findall(r"\d+", plain) if len(number) <= _DIGITS]
    first = numbers[0] if numbers else 0
    wide = plain.startswith("wide")
    if "resne" in plain and first in DEPTHS:
        grouped = re.search(r"(?<!\d)(\d{1,4})x(\d{1,4})d", plain)
        if grouped:
            groups, each = int(grouped[1]), int(grouped[2])
            return lambda n, p: resnet(n, p, depth=first, groups=groups, group_width=each)
        if "resnext" in plain:
            return lambda n, p: resnet(n, p, depth=first, groups=32, group_width=4)
        return lambda n, p: resnet(n, p, depth=first, group_width=128 if wide else 64)
    if "vgg" in plain and first in VGG_DEPTHS:
        return lambda n, p: vgg(n, p, depth=first)
    if "densenet" in plain and first in DENSENETS:
        return lambda n, p: densenet(n, p, depth=first)
    if "inception" in plain and first in (0, 3):
        return inception3
    if "googlenet" in plain or plain in ("inception-1", "inception-v1"):
        return googlenet
    if re.match(r"(vit|deit)\b", plain):
        return _vit(plain)
    if "alexnet" in plain:
        return alexnet
    for family, (usual, sized) in _SIZED.items():
        if family in plain:
            size = (numbers[0], numbers[1]) if len(numbers) > 1 else usual
            return lambda n, p: sized(n, p, *size)
    return None


def _vit(plain: str) -> Callable[[str, int], Convnet]:
    """Size and patch of "vit-b-16", "vit-large-patch32-384", "deit-small": base and 16 where none
    is named."""
    words = plain.split("-")
    size = next(
        (full for word in words[1:] for full in SIZES if word and full.startswith(word)), "base"
    )
    patch = next((int(n) for n in re.findall(r"(?:patch|-)(14|16|32)\b", plain)), 16)
    return lambda n, p: vit(n, p, size=size, patch=patch)


def _amoebanet(name: str, pixels: int, cells: int, filters: int) -> Convnet:
    # Three groups of cells, and a quarter of the filters to begin with.
    cells, filters = 3 * max(1, round(cells / 3)), 4 * max(1, round(filters / 4))
    return amoebanet(name, pixels, cells=_bounded(name, cells), filters=filters)


def _unet(name: str, pixels: int, convolutions: int, channels: int) -> Convnet:
    depth = _bounded(name, max(1, convolutions))
    return unet(name, pixels, convolutions=depth, channels=max(2, channels))


def _bounded(name: str, layers: int) -> int:
    if layers > MOST_LAYERS:
        raise InputError(f"`{name[:80]}` has {layers:,} layers: {MOST_LAYERS:,} are the most")
    return layers


# Families whose names carry depth and width, and the usual ones.
_SIZED: Mapping[str, tuple[tuple[int, int], Callable[[str, int, int, int], Convnet]]] = {
    "amoebanet": ((18, 256), _amoebanet),
    "unet": ((5, 64), _unet),
}


def _grown(network: Convnet, parameters: float) -> Convnet:
    """Depth and width grow alike: where the family is built by them, in whole layers."""
    by = parameters / network.parameters
    for family, ((depth, width), sized) in _SIZED.items():
        if family in network.name:
            each = by ** (1 / 3)
            return sized(network.name, network.pixels, round(depth * each), round(width * each))
    return _scaled(network, by)


def _scaled(network: Convnet, by: float) -> Convnet:
    """`by` times the parameters and FLOP, depth and width growing alike.

    Parameters grow as depth x width^2 and maps as depth x width: their elements as by^(2/3). Layers
    stand for the deeper network's: their number stays.
    """
    maps, wider = by ** (2 / 3), sqrt(by)

    def layer(old: ConvnetLayer) -> ConvnetLayer:
        depth, columns = round(old.depth * wider), round(old.columns * wider)
        parameters = round(old.parameters * by)
        if old.parameters and old.kind.is_product:
            # The matrix is that of the rounded sizes; what is left is a bias.
            bias = old.parameters - old.groups * old.columns * old.depth
            parameters = old.groups * columns * depth + round(bias * wider)
        return replace(
            old,
            inputs=round(old.inputs * (1 if old.reads_image else maps)),
            outputs=round(old.outputs * maps),
            parameters=parameters,
            depth=depth,
            columns=columns,
        )

    blocks = (
        replace(
            block,
            layers=[layer(old) for old in block.layers],
            saved=round(block.saved * maps),
            input_elements=round(block.input_elements * maps),
            output_elements=round(block.output_elements * maps),
        )
        for block in network.blocks
    )
    return replace(network, blocks=tuple(blocks))
