"""Memory of the maps that convolutions return: in channels last where input or weight lie so, as
kernels of cuDNN and of processors return them (torch 2.11, `cudnn_conv_suggest_memory_format` and
`mkldnn_conv_use_channels_last` in torch/aten/src/ATen/native/ConvUtils.h). Without it
a look at 16 rows returned maps row by row, and one at 8 did not."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from profiles.torch_compat import is_fake, memory_format_of

CHANNELS_LAST = (torch.channels_last, torch.channels_last_3d)
_FORTH, _BACK = "convolution", "convolution_backward"


def as_kernels_lay_out(name: str, args: Sequence[Any], result: Any) -> Any:
    """The result of an operator: that of a convolution of fake tensors in its memory format."""
    if name not in (_FORTH, _BACK):
        return result
    factors = args[1:3] if name == _BACK else args[:2]
    wanted = {memory_format_of(each) for each in factors}.intersection(CHANNELS_LAST)
    if not wanted or not is_fake(factors[0]):
        return result
    (layout,) = wanted
    if name == _FORTH:
        return _laid_out(result, layout)
    return (*(_laid_out(each, layout) for each in result[:2]), *result[2:])


def _laid_out(maps: Tensor | None, layout: torch.memory_format) -> Tensor | None:
    if maps is None or memory_format_of(maps) is layout:
        return maps
    return torch.empty_like(maps, memory_format=layout)
