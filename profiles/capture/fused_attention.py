"""Attention with dropout as accelerators run it: in one kernel, whose scores reach no memory."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from inspect import Parameter, Signature
from typing import Any

import torch.nn.functional as F
from torch.overrides import TorchFunctionMode

_REQUIRED = ("query", "key", "value")
_OPTIONAL = {
    "attn_mask": None,
    "dropout_p": 0.0,
    "is_causal": False,
    "scale": None,
    "enable_gqa": False,
}
_SIGNATURE = Signature(
    [Parameter(name, Parameter.POSITIONAL_OR_KEYWORD) for name in _REQUIRED]
    + [Parameter(n, Parameter.POSITIONAL_OR_KEYWORD, default=d) for n, d in _OPTIONAL.items()]
)


class FusedAttention(TorchFunctionMode):
    """Inside, `scaled_dot_product_attention` is followed without its dropout.

    torch's kernel for processors takes none, so that attention is written out there, scores kept.
    Those of CUDA draw it inside (flash, memory-efficient, cuDNN: `sdp_utils.cpp`), and keep a seed.
    A mask with a gradient stays as it is: it is written out on both.
    """

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Sequence[type],
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        if func is F.scaled_dot_product_attention:
            given = _SIGNATURE.bind(*args, **(kwargs or {})).arguments
            mask = given.get("attn_mask")
            if given.get("dropout_p") and not (mask is not None and mask.requires_grad):
                return func(**{**given, "dropout_p": 0.0})
        return func(*args, **(kwargs or {}))
