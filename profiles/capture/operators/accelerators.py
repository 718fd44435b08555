"""Operators that accelerators run otherwise than the processor on whose stand-in models are
followed: dropout, attention with it, and what autocast leaves in fp32."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from inspect import Parameter, Signature, signature
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.overrides import TorchFunctionMode

from profiles.model import attention_kernels
from profiles.torch_compat import is_fake, map_tensors
from profiles.torch_compat.attention import safe_softmax

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
_OF_MODULES = signature(F.multi_head_attention_forward)  # what nn.MultiheadAttention calls
# In fp32 under autocast on CUDA, in 16 bits on a processor (torch/aten/src/ATen/autocast_mode.h,
# 2.11: AT_FORALL_FP32 and AT_FORALL_FP32_SET_OPT_DTYPE, less those of the processor's list; `sum`
# reads 16 bits on both).
_IN_FLOAT32 = frozenset(
    (
        *("acos", "asin", "cosh", "erfinv", "exp", "expm1", "log", "log10", "log2", "log1p"),
        *("reciprocal", "rsqrt", "sinh", "tan", "pow", "softplus", "logsumexp", "renorm"),
        *("layer_norm", "group_norm", "norm", "cosine_similarity", "cumprod", "cumsum"),
        *("softmax", "log_softmax", "cross_entropy", "nll_loss", "l1_loss", "smooth_l1_loss"),
        *("huber_loss", "binary_cross_entropy_with_logits", "soft_margin_loss"),
    )
)
_NARROW = (torch.bfloat16, torch.float16)
_RMS_NORMS = (F.rms_norm, torch.rms_norm)
_DROPS: ContextVar[bool] = ContextVar("scores are dropped", default=False)


class AcceleratorOperators(TorchFunctionMode):
    """Inside, functions are followed as CUDA runs them.

    `scaled_dot_product_attention` loses its dropout: torch's kernel for processors takes none, so
    that attention is written out there, scores kept. Those of CUDA draw it inside (flash,
    memory-efficient, cuDNN: `sdp_utils.cpp`), and keep a seed. The memory-efficient one also gives
    a mask its gradient where the mask's last dimension is dense (Swin's bias; T5's is permuted, and
    written out on both). Grouped queries in fp32 are written out: flash kernels and cuDNN are for
    16 bits. Dropout keeps a mask of bytes, on processors one of numbers. Root-mean-square norms are
    one kernel, which saves its input.
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
            return _attended(func, _SIGNATURE.bind(*args, **kwargs).arguments)
        if func is F.multi_head_attention_forward:  # no mode sees the calls inside
            given = _OF_MODULES.bind(*args, **kwargs).arguments
            with _dropping(bool(given.get("training", True) and given["dropout_p"])):
                return func(**_without_dropout(given))
        if func in _RMS_NORMS and (normed := _normed(*args, **kwargs)) is not None:
            return normed
        if func is F.dropout and (dropped := _dropped(*args, **kwargs)) is not None:
            return dropped
        is_lowered = torch.is_autocast_enabled("cpu")
        if is_lowered and getattr(func, "__name__", "").strip("_") in _IN_FLOAT32:
            args, kwargs = map_tensors(_widened, (args, kwargs))
        return func(*args, **kwargs)


def _normed(
    input: Tensor,
    normalized_shape: Sequence[int],
    weight: Tensor | None = None,
    eps: float | None = None,
) -> Tensor | None:
    """The result of a root-mean-square norm, where one kernel computes it on CUDA: that of layer
    norms with another flag (torch 2.11, `_fused_rms_norm` in layer_norm_kernel.cu; processors go
    operation by operation). Only its shape is right."""
    if not is_fake(input) or (weight is not None and weight.dtype != input.dtype):
        return None
    return F.layer_norm(input, normalized_shape, weight)


def _without_dropout(given: dict[str, Any]) -> dict[str, Any]:
    """Arguments of `multi_head_attention_forward`, without dropout where it calls a kernel."""
    is_kernel = not given.get("need_weights", True)
    return {**given, "dropout_p": 0.0} if is_kernel else given


def drops_scores() -> bool:
    """True while attention runs whose dropout the kernel of an accelerator draws inside."""
    return _DROPS.get()


@contextmanager
def _dropping(is_on: bool) -> Iterator[None]:
    token = _DROPS.set(is_on)
    try:
        yield
    finally:
        _DROPS.reset(token)


def _attended(func: Callable[..., Any], given: dict[str, Any]) -> Any:
    """The call as the first kernel that takes it runs it."""
    mask = given.get("attn_mask")
    if mask is not None and mask.dim() == 3:  # a processor's kernel takes two or four
        mask = mask.unsqueeze(0)
        given = {**given, "attn_mask": mask}
    fused = {**given, "dropout_p": 0.0}
    if given["query"].shape[-1] != given["value"].shape[-1] and _is_plain(given):
        return _attended_unevenly(given)
    if not _is_grouped_in_fp32(given):
        with _dropping(bool(given.get("dropout_p"))):
            if mask is None or not mask.requires_grad:
                return func(**fused)
            if mask.stride(-1) == 1:
                out = func(**{**fused, "attn_mask": mask.detach()})
                return _Biased.apply(out, mask)  # type: ignore[no-untyped-call]
        if not given.get("dropout_p"):
            return func(**given)
    if torch.is_autocast_enabled("cpu"):
        given = map_tensors(_lowered, given)
    with torch.autocast("cpu", enabled=False):
        return _written_out(**given)


def _is_grouped_in_fp32(given: Mapping[str, Any]) -> bool:
    """True for what no fused kernel of this torch takes."""
    if attention_kernels.FP32_TAKES_GROUPS or not given.get("enable_gqa"):
        return False
    query, key = given["query"], given["key"]
    is_wide = query.dtype == torch.float32 and not torch.is_autocast_enabled("cpu")
    return bool(is_wide and query.shape[1] != key.shape[1])


def _is_plain(given: Mapping[str, Any]) -> bool:
    """True for a call of which no mask is trained, with as many heads of keys as of queries."""
    mask, query, key = given.get("attn_mask"), given["query"], given["key"]
    is_trained = mask is not None and mask.requires_grad
    has_heads = query.dim() == 4 and query.shape[1] == key.shape[1]
    return has_heads and not is_trained and is_fake(query)  # real ones need a kernel that runs


def _attended_unevenly(given: Mapping[str, Any]) -> Any:
    """Values of another width than queries: memory-efficient and cuDNN's kernels take them, the
    processor's does not (DeepSeek's latent attention)."""
    operands = [given[name] for name in _REQUIRED]
    mask = given.get("attn_mask")
    if torch.is_autocast_enabled("cpu"):
        operands, mask = map_tensors(_lowered, (operands, mask))
    if mask is not None and mask.dtype == torch.bool:
        mask = _additive(mask, operands[0].dtype)
    with _dropping(bool(given.get("dropout_p"))), torch.autocast("cpu", enabled=False):
        causal = given.get("is_causal", False)
        return _Uneven.apply(*operands, mask, causal)  # type: ignore[no-untyped-call]


class _Uneven(torch.autograd.Function):
    """The processor's kernel on shapes alone, with an output as wide as the values."""

    @staticmethod
    def forward(
        ctx: Any, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, is_causal: bool
    ) -> Tensor:
        call = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
        wide, sums = call(query, key, value, 0.0, is_causal, attn_mask=mask)
        out = torch.empty_like(query[..., :1].expand(*query.shape[:-1], value.shape[-1]))
        del wide
        ctx.save_for_backward(query, key, value, out, sums, mask)
        ctx.is_causal = is_causal
        return out

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        *saved, mask = ctx.saved_tensors
        call = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward
        gradients = call(gradient, *saved, 0.0, ctx.is_causal, attn_mask=mask)
        return *gradients, None, None


class _Biased(torch.autograd.Function):
    """Attention's output; the kernel of its backward writes the gradient of `mask` too."""

    @staticmethod
    def forward(ctx: Any, out: Tensor, mask: Tensor) -> Tensor:
        ctx.like = mask.shape, mask.dtype
        return out.view_as(out)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor]:
        shape, dtype = ctx.like
        return gradient, gradient.new_empty(shape, dtype=dtype)


def _written_out(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    """As `_scaled_dot_product_attention_math` runs it: 16 bits in fp32."""
    wide = [_widened(t) for t in (query, key, value)]
    root = (scale or query.shape[-1] ** -0.5) ** 0.5
    scaled = wide[0] * root
    if is_causal:
        shape, device = (query.shape[-2], key.shape[-2]), query.device
        attn_mask = torch.ones(shape, dtype=torch.bool, device=device).tril()
    if attn_mask is not None and attn_mask.dtype == torch.bool:
        attn_mask = _additive(attn_mask, scaled.dtype)
    groups = query.shape[1] // key.shape[1] if enable_gqa else 1
    keys, values = (t.repeat_interleave(groups, 1) if groups > 1 else t for t in wide[1:])
    scores = scaled @ (keys.transpose(-2, -1) * root)
    if attn_mask is None:
        weights = scores.softmax(-1)
    elif attn_mask.requires_grad:
        weights = safe_softmax(scores + attn_mask)
    else:
        weights = safe_softmax(scores.add_(attn_mask))
    dropped = torch.native_dropout(weights, dropout_p, True)[0] if dropout_p else weights
    handed_back = dropped.to(query.dtype)  # and not used
    out = (dropped @ values).to(query.dtype)
    del handed_back
    return out


def _additive(mask: Tensor, dtype: torch.dtype) -> Tensor:
    """A boolean mask as numbers to be added."""
    zero, hidden = (
        torch.full((), value, dtype=dtype, device=mask.device) for value in (0.0, -torch.inf)
    )
    return torch.where(mask, zero, hidden)


def _dropped(
    input: Tensor, p: float = 0.5, training: bool = True, inplace: bool = False
) -> Tensor | None:
    """The result, where one kernel draws and drops on CUDA (`is_fused_kernel_acceptable` in
    torch/aten/src/ATen/native/Dropout.cpp)."""
    is_fused = training and not inplace and 0 < p < 1 and input.requires_grad
    if not is_fused or not input.is_floating_point():
        return None
    return torch.native_dropout(input, p, True)[0]


def _lowered(tensor: Tensor) -> Tensor:
    dtype = torch.get_autocast_dtype("cpu")
    return tensor.to(dtype) if tensor.dtype == torch.float32 else tensor


def _widened(tensor: Tensor) -> Tensor:
    return tensor.float() if tensor.dtype in _NARROW else tensor
