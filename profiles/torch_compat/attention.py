"""Attention of some queries to some keys, with the log of its denominators, on torch's kernels.

`scaled_dot_product_attention` hides the log-sum-exp by which results over several blocks of keys
are merged; the kernels below it return it, under private names. Each used through here, each
tested; the one for CUDA where there is such a device.
"""

from __future__ import annotations

import torch
from torch import Tensor

# Queries that the plain way looks at together: it writes out their weights, queries x keys.
PIECE = 1024
# What the flash kernels of CUDA take: torch/nn/attention, sdp_utils (head size, a multiple of 8).
_LARGEST_HEAD = 256


def safe_softmax(scores: Tensor) -> Tensor:
    """Over the last dimension, 0 in rows that are hidden whole: of attention that is written out
    by `scaled_dot_product_attention`."""
    return torch._safe_softmax(scores, -1)


def attend(
    query: Tensor, key: Tensor, value: Tensor, *, is_causal: bool, scale: float
) -> tuple[Tensor, Tensor]:
    """Attention output and log-sum-exp of the scores.

    Shapes: query (B, H, T, E), key (B, H, S, E), value (B, H, S, F); the results are (B, H, T, F)
    and (B, H, T), the latter in fp32 at least. `is_causal` wants T = S. No gradient is kept.
    """
    kernels = torch.ops.aten
    match _kernel(query, value):
        case "cpu":
            return kernels._scaled_dot_product_flash_attention_for_cpu(  # type: ignore[no-any-return]
                query, key, value, 0.0, is_causal, scale=scale
            )
        case "flash":
            results = kernels._scaled_dot_product_flash_attention(
                query, key, value, 0.0, is_causal, False, scale=scale
            )
            return results[0], results[1]
        case _:
            pieces = [
                _plain(query[:, :, rows], key, value, rows.start if is_causal else None, scale)
                for rows in _pieces(query)
            ]
            return torch.cat([out for out, _ in pieces], 2), torch.cat(
                [lse for _, lse in pieces], 2
            )


def attend_backward(
    gradient: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    out: Tensor,
    lse: Tensor,
    *,
    is_causal: bool,
    scale: float,
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of query, key and value, from the gradient (B, H, T, F) of `out`.

    `out` and `lse` may be those over more keys than these: then the gradients are the shares that
    these keys have in the whole.
    """
    kernels = torch.ops.aten
    match _kernel(query, value):
        case "cpu":
            return kernels._scaled_dot_product_flash_attention_for_cpu_backward(  # type: ignore[no-any-return]
                gradient, query, key, value, out, lse, 0.0, is_causal, scale=scale
            )
        case "flash":
            lse = lse.contiguous()  # the kernel reads it by its address alone
            random = torch.zeros(2, dtype=torch.uint64, device=query.device)  # nothing is dropped
            return kernels._scaled_dot_product_flash_attention_backward(  # type: ignore[no-any-return]
                gradient, query, key, value, out, lse, None, None, query.shape[2], key.shape[2],
                0.0, is_causal, random, random[0], scale=scale,
            )  # fmt: skip
        case _:
            of_query = torch.empty_like(query)
            of_key, of_value = torch.zeros_like(key), torch.zeros_like(value)
            for rows in _pieces(query):
                first = rows.start if is_causal else None
                scores = _scores(query[:, :, rows], key, first, scale)
                weights = (scores - lse[:, :, rows, None]).exp().to(query.dtype)
                given = gradient[:, :, rows]
                of_value += weights.transpose(2, 3) @ given
                inner = (given * out[:, :, rows]).sum(3, keepdim=True)
                of_scores = weights * (given @ value.transpose(2, 3) - inner) * scale
                of_query[:, :, rows] = of_scores @ key
                of_key += of_scores.transpose(2, 3) @ query[:, :, rows]
            return of_query, of_key, of_value


def _kernel(query: Tensor, value: Tensor) -> str:
    """Return the kernel that takes these tensors; "plain" is right for all."""
    if query.shape[3] != value.shape[3]:
        return "plain"
    if query.device.type == "cpu":
        return "cpu"
    is_half = query.dtype in (torch.float16, torch.bfloat16)
    fits = query.shape[3] <= _LARGEST_HEAD and query.shape[3] % 8 == 0
    return "flash" if query.device.type == "cuda" and is_half and fits else "plain"


def _pieces(query: Tensor) -> list[slice]:
    length = query.shape[2]
    return [slice(first, min(first + PIECE, length)) for first in range(0, length, PIECE)]


def _plain(
    query: Tensor, key: Tensor, value: Tensor, first: int | None, scale: float
) -> tuple[Tensor, Tensor]:
    scores = _scores(query, key, first, scale)
    lse = scores.logsumexp(3)
    return (scores - lse[..., None]).exp().to(value.dtype) @ value, lse


def _scores(query: Tensor, key: Tensor, first: int | None, scale: float) -> Tensor:
    """In fp32 at least. `first`: the place of the first query among causal ones; None sees all."""
    scores = query @ key.transpose(2, 3) * scale
    scores = scores.to(torch.promote_types(scores.dtype, torch.float32))
    if first is None:
        return scores
    rows = torch.arange(first, first + query.shape[2], device=query.device)
    columns = torch.arange(key.shape[2], device=query.device)
    return scores.masked_fill(columns > rows[:, None], -torch.inf)
