"""Cycles of a processor's core for operators whose arithmetic outlasts their traffic.

Most operators of torch take a core no longer than their bytes take to memory. These do: they draw
random numbers, call functions that no vector instruction has, sort, or walk windows element by
element. (Attention is more than an operator: `profiles.model.work.attention_cost`.)

Cycles are those of torch 2.13 on one core, fp32, measured beside what is charged for them:
`python -m tests.benchmarks.core_cycles`. Only processors are charged for them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import log2, prod
from typing import Any

from torch import Tensor

from profiles.model.work import BYTES_PER_CYCLE
from profiles.torch_compat import Operator

# Of an element of the largest tensor that a call reads or writes.
_OF_ELEMENT = {
    **{"bernoulli_": 15, "uniform_": 7, "rand": 7, "rand_like": 7, "randint": 7},
    **{"normal_": 8.5, "randn": 8.5, "randn_like": 8.5},
    **{"tanh": 7, "mish": 10.5, "mish_backward": 11.5, "log_sigmoid_forward": 3.5},
    **{"softplus": 3.5, "elu": 3, "erf": 3.5, "expm1": 2.5, "log": 2.5, "sin": 3.5, "cos": 4},
    **{"std": 16, "var": 16, "cumsum": 2.5, "max": 2.5, "logsumexp": 3, "topk": 4.5},
    **{"native_batch_norm_backward": 5.5, "upsample_nearest2d_backward": 2},
    **{"upsample_bilinear2d": 4, "upsample_bilinear2d_backward": 9.5},
    **{"upsample_bicubic2d": 19.5, "upsample_bicubic2d_backward": 51},
    **{"im2col": 7.5, "col2im": 8, "grid_sampler_2d": 5, "grid_sampler_2d_backward": 18},
    **{"pixel_shuffle": 4, "pixel_unshuffle": 3.5},
}
# The same, of GELU by tanh, of norms over rows whose channels lie side by side, and of powers that
# are not multiplied out.
_OF_TANH = {"gelu": 4, "gelu_backward": 5}
_OF_ROWS = {"native_batch_norm": 4.5, "native_batch_norm_backward": 35}
_OF_POWER, _MULTIPLIED = 5.5, (-2, -1, -0.5, 0.5, 1, 2, 3)
# Of an element and of each halving of a row that is sorted.
_OF_HALVING = 14
# Of a window, and of each element in it.
_OF_WINDOW = {
    "max_pool2d_with_indices": (34, 5),
    "avg_pool2d": (15, 0.8),
    "avg_pool2d_backward": (15, 0.8),
}


def core_cycles(
    operator: Operator,
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
    inputs: Sequence[Tensor],
    outputs: Sequence[Tensor],
    moved_bytes: int,
) -> int:
    """Cycles of one core for a call, beyond those in which it moves `moved_bytes`."""
    cycles = _cycles(operator.overloadpacket.__name__, args, kwargs, inputs, outputs)
    return max(0, round(cycles - moved_bytes / BYTES_PER_CYCLE)) if cycles else 0


def _cycles(
    name: str,
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
    inputs: Sequence[Tensor],
    outputs: Sequence[Tensor],
) -> float:
    if name in _OF_WINDOW:
        of_window, of_each = _OF_WINDOW[name]
        is_backward = name.endswith("_backward")
        windows = (inputs if is_backward else outputs)[0].numel()
        kernel = kwargs.get("kernel_size") or args[2 if is_backward else 1]
        return windows * (of_window + of_each * _area(kernel))
    each = _OF_ELEMENT.get(name, 0.0)
    if name == "sort" and inputs[0].dim():
        each = _OF_HALVING * log2(max(2, inputs[0].shape[-1]))
    elif name == "pow":
        exponent = args[1]
        is_multiplied = not isinstance(exponent, Tensor) and exponent in _MULTIPLIED
        each = 0.0 if is_multiplied else _OF_POWER
    elif name in _OF_TANH and kwargs.get("approximate") == "tanh":
        each = _OF_TANH[name]
    elif name in _OF_ROWS and inputs[0].dim() == 2:
        each = _OF_ROWS[name]
    return each * max((tensor.numel() for tensor in (*inputs, *outputs)), default=0) if each else 0


def _area(kernel: int | Sequence[int]) -> int:
    """Elements of a window; one size is for both sides."""
    if isinstance(kernel, int):
        return kernel * kernel
    return prod(kernel) if len(kernel) > 1 else kernel[0] ** 2
