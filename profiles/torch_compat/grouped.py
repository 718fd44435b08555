"""Autocast of grouped products, which torch (2.11 to 2.13) leaves in the dtype of their weights.

Experts of transformers multiply by `grouped_mm`. Under autocast their fp32 weights were multiplied
in fp32, by a loop over experts (pytorch issue 174763).
"""

from __future__ import annotations

import functools

import torch
from torch import Tensor

# Rows of operands begin at multiples of 16 bytes (`_grouped_mm` refuses others).
ALIGNED = 8
_OPERATOR = "aten::_grouped_mm"
_DEVICES = {"cpu": "AutocastCPU", "cuda": "AutocastCUDA"}
_LIBRARIES: list[torch.library.Library] = []  # a rule lives as long as its library


@functools.cache
def autocast_grouped_products() -> None:
    """From now on, autocast casts operands of grouped products as it does those of others.

    Sizes that 16-bit kernels refuse stay in fp32. A torch with a rule of its own keeps it.
    """
    for device, key in _DEVICES.items():
        if torch._C._dispatch_has_kernel_for_dispatch_key(_OPERATOR, key):
            continue
        library = torch.library.Library("aten", "IMPL")
        library.impl("_grouped_mm", functools.partial(_multiplied, device), key)
        _LIBRARIES.append(library)


def _multiplied(
    device: str,
    a: Tensor,
    b: Tensor,
    offs: Tensor | None = None,
    bias: Tensor | None = None,
    out_dtype: torch.dtype | None = None,
) -> Tensor:
    below = torch._C.DispatchKeySet(getattr(torch._C.DispatchKey, _DEVICES[device]))
    with torch._C._ExcludeDispatchKeyGuard(below):
        dtype = torch.get_autocast_dtype(device)
        sizes = (a.shape[-1], *b.shape[-2:])
        if all(size % ALIGNED == 0 for size in sizes):
            a, b = (t.to(dtype) if t.dtype == torch.float32 else t for t in (a, b))
        result: Tensor = torch.ops.aten._grouped_mm(a, b, offs, bias, out_dtype)
        return result
