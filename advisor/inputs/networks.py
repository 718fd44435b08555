"""Bundled vision networks by their names in papers: "resnet50-128px", "vgg16", "densenet121".

Profiled in closed form, without torch; ResNets of standard width can be built and run too.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

from profiles.closed_forms.convnets.profile import profile_of
from profiles.closed_forms.convnets.registry import is_known, network_of
from profiles.errors import ModelError
from profiles.model.profile import ModelProfile

if TYPE_CHECKING:
    from torch import nn

    from profiles.capture.batch.call import Batch

_RUNS = re.compile(r"resnet-?(18|34|50|101|152)(-\d+px)?")


def is_network(text: str) -> bool:
    """Return True if `text` is a known network's plain name.

    >>> is_network("resnet50-128px"), is_network("models/resnet50.py"), is_network("gpt-10m")
    (True, False, False)
    """
    return re.fullmatch(r"[\w-]+", text) is not None and is_known(text)


def network_profile(name: str, *, samples: int) -> ModelProfile:
    """Profile the network in fp32; the cross-entropy of its logits is negligible.

    Args:
        samples: of the batch that it is told for.
    """
    network, _ = network_of(name)
    profile = profile_of(network, samples=samples)
    return profile.model_copy(update={"name": name, "has_loss": True})


def build_network(name: str, *, samples: int) -> tuple[nn.Module, Batch]:
    """Build the module, and images with labels: (B, 3, pixels, pixels) and (B,).

    Raises:
        ModelError: it is known by its layers alone.
    """
    match = _RUNS.fullmatch(name)
    if match is None:
        raise ModelError(
            f"`{name}` is known by its layers' shapes, there is no code of it to run",
            hints=["name your own: `pkg.module:factory`", "ResNets of plain width are bundled"],
        )
    import torch

    from advisor.inputs.bundled.resnet import CLASSES, ResNet

    pixels = network_of(name)[0].pixels
    draw = torch.Generator().manual_seed(0)
    images = torch.randn(samples, 3, pixels, pixels, generator=draw)
    labels = torch.randint(CLASSES, (samples,), generator=draw)
    return ResNet(int(match[1])), (images, labels)
