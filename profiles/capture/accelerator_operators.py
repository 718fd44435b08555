"""Operators that accelerators run otherwise than the processor on whose stand-in models are
followed: attention with dropout, and what autocast leaves in fp32."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from inspect import Parameter, Signature
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.overrides import TorchFunctionMode

from profiles.torch_compat import map_tensors

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
# In fp32 under autocast on CUDA, in 16 bits on a processor (torch/aten/src/ATen/autocast_mode.h,
# 2.11: AT_FORALL_FP32 and AT_FORALL_FP32_SET_OPT_DTYPE, less those of the processor's list).
_IN_FLOAT32 = frozenset(
    (
        *("acos", "asin", "cosh", "erfinv", "exp", "expm1", "log", "log10", "log2", "log1p"),
        *("reciprocal", "rsqrt", "sinh", "tan", "pow", "softplus", "logsumexp", "renorm"),
        *("layer_norm", "group_norm", "norm", "cosine_similarity", "cumprod", "cumsum", "sum"),
        *("softmax", "log_softmax", "cross_entropy", "nll_loss", "l1_loss", "smooth_l1_loss"),
        *("huber_loss", "binary_cross_entropy_with_logits", "soft_margin_loss"),
    )
)
_NARROW = (torch.bfloat16, torch.float16)


class AcceleratorOperators(TorchFunctionMode):
    """Inside, functions are followed as CUDA runs them.

    `scaled_dot_product_attention` loses its dropout: torch's kernel for processors takes none, so
    that attention is written out there, scores kept. Those of CUDA draw it inside (flash,
    memory-efficient, cuDNN: `sdp_utils.cpp`), and keep a seed. A mask with a gradient stays as it
    is: it is written out on both.
    """

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Sequence[type],
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        kwargs = kwargs or {}
        if func is F.scaled_dot_product_attention:
            given = _SIGNATURE.bind(*args, **kwargs).arguments
            mask = given.get("attn_mask")
            if given.get("dropout_p") and not (mask is not None and mask.requires_grad):
                return func(**{**given, "dropout_p": 0.0})
        elif getattr(func, "__name__", "").strip("_") in _IN_FLOAT32 and torch.is_autocast_enabled(
            "cpu"
        ):
            args, kwargs = map_tensors(_widened, (args, kwargs))
        return func(*args, **kwargs)


def _widened(tensor: Tensor) -> Tensor:
    return tensor.float() if tensor.dtype in _NARROW else tensor
