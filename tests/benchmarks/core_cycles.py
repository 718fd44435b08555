"""`python -m tests.benchmarks.core_cycles`: work of a processor beside multiplications.

First cycles of a core for an element, by operator.

Every operator that these functions call, forward and backward, alone on a core, on a tensor that
its cache holds: measured, beyond products and what it moves at `BYTES_PER_CYCLE`, and as charged
by `profiles.capture.operators.core_cycles`. Those that are charged nothing and take less than one
are left out.

Then products whose operands no cache holds, forward and both gradients: seconds beyond those of
their FLOP at the rate of a large product, over those of their bytes at the rate of a copy.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from statistics import median
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from advisor.cost.compute.rates import FLOP_PER_CYCLE
from profiles.capture.operators.core_cycles import core_cycles
from profiles.capture.operators.table import attended, flop_formulas, moved_bytes
from profiles.model.work import BYTES_PER_CYCLE, attention_cost
from profiles.torch_compat import Operator, tensors_in
from profiles.trace.layer_tally import attention_calls
from profiles.trace.scopes import Attended

ELEMENTS, WIDTH, EDGE, REPEATS = 2**20, 256, 768, 5
SMALL = 2**14
SHAPES = ((64, 16), (64, 64), (64, 128), (128, 64), (256, 16), (256, 64), (256, 128), (512, 64))
"""Of attention: queries and keys, and the width of a head."""
PRODUCTS = (
    *((2048, 256, 1024), (2048, 1024, 256), (512, 256, 1024), (128, 256, 1024), (1024, 512, 2048)),
    *((512, 128, 512), (4096, 128, 512), (256, 1024, 4096), (64, 512, 512), (2048, 64, 64)),
)
"""Rows, inputs and outputs of layers."""
COLD_BYTES, MOST_SETS = 2**28, 60
Function = Callable[[Tensor], Tensor]


def _rows(x: Tensor) -> Tensor:
    return x.view(-1, WIDTH)


def _images(x: Tensor) -> Tensor:
    return x.view(4, 16, 128, 128)


def functions() -> Sequence[Function]:
    """Of `ELEMENTS` elements."""
    rows = torch.randint(0, ELEMENTS // WIDTH, (ELEMENTS // WIDTH,))
    grid = torch.rand(4, 128, 128, 2) * 2 - 1
    of_rows, of_images = torch.ones(WIDTH), torch.ones(16)
    return (
        *(F.relu, F.gelu, lambda x: F.gelu(x, approximate="tanh"), F.silu, torch.sigmoid),
        *(torch.tanh, torch.exp, F.softplus, F.elu, F.hardswish, F.mish, F.logsigmoid, torch.erf),
        *(torch.expm1, torch.sin, torch.cos, torch.square),
        *(lambda x: (x.abs() + 1).log(), lambda x: (x.abs() + 1) ** 0.3),
        *(lambda x: F.dropout(x, 0.1), lambda x: x + torch.rand_like(x)),
        *(lambda x: x + torch.randn_like(x), lambda x: x + torch.empty_like(x).uniform_()),
        *(lambda x: x + torch.empty_like(x).normal_(), lambda x: x + torch.rand(x.shape)),
        *(lambda x: x + torch.randn(x.shape), lambda x: x + torch.randint(9, x.shape)),
        *(lambda x: _rows(x).softmax(-1), lambda x: _rows(x).logsumexp(-1)),
        *(
            lambda x, length=length, width=width: F.scaled_dot_product_attention(
                *(x.view(-1, 4, length, width),) * 3
            )
            for length, width in SHAPES
        ),
        lambda x: F.layer_norm(_rows(x), (WIDTH,), of_rows, of_rows),
        lambda x: F.batch_norm(_rows(x), None, None, of_rows, of_rows, training=True),
        lambda x: F.batch_norm(_images(x), None, None, of_images, of_images, training=True),
        lambda x: F.group_norm(_images(x), 4),
        *(lambda x: F.max_pool2d(_images(x), 2), lambda x: F.max_pool2d(_images(x), 3, 2, 1)),
        *(lambda x: F.avg_pool2d(_images(x), 2), lambda x: F.avg_pool2d(_images(x), 3, 1, 1)),
        *(
            lambda x, mode=mode: F.interpolate(_images(x), scale_factor=2, mode=mode)
            for mode in ("nearest", "bilinear", "bicubic")
        ),
        lambda x: F.grid_sample(_images(x), grid, align_corners=False),
        *(lambda x: F.unfold(_images(x), 3, padding=1), lambda x: F.pixel_shuffle(_images(x), 2)),
        *(
            lambda x: _rows(x).cumsum(-1),
            lambda x: _rows(x).std(-1),
            lambda x: _rows(x).var(-1),
            lambda x: _rows(x).max(-1)[0],
        ),
        *(lambda x: _rows(x).topk(2)[0], lambda x: _rows(x).sort(-1)[0]),
        *(lambda x: F.embedding(rows, _rows(x)), lambda x: _rows(x)[rows]),
        *(lambda x: _rows(x).index_add(0, rows, _rows(x)), lambda x: _rows(x).t().contiguous()),
    )


class Timed(TorchDispatchMode):
    """Inside, every operator is run `REPEATS` times, and the fastest is noted.

    Attributes:
        cycles: by operator, of an element of the largest tensor: measured and charged.
    """

    def __init__(self, cycles_per_s: float) -> None:
        super().__init__()
        self.cycles: dict[str, list[tuple[float, float]]] = {}
        self._cycles_per_s = cycles_per_s
        self._formulas = flop_formulas()

    def __torch_dispatch__(
        self,
        func: Operator,
        types: Sequence[type],
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        fastest = float("inf")
        for _ in range(REPEATS):
            began = time.perf_counter()
            result = func(*args, **(kwargs or {}))
            fastest = min(fastest, time.perf_counter() - began)
        inputs, outputs = list(tensors_in((args, kwargs))), list(tensors_in(result))
        most = max((tensor.numel() for tensor in (*inputs, *outputs)), default=0)
        if outputs and most > SMALL:
            moved = moved_bytes(func, inputs, outputs)
            formula = self._formulas.get(func.overloadpacket)
            flop = formula(*args, **(kwargs or {}), out_val=result) if formula is not None else 0
            took = fastest * self._cycles_per_s - flop / FLOP_PER_CYCLE - moved / BYTES_PER_CYCLE
            charged = core_cycles(func, args, kwargs or {}, inputs, outputs, moved)
            name = func.overloadpacket.__name__
            call = attended(func, args, kwargs or {})
            if call is not None:
                is_backward = name.endswith("_backward")
                charged = call.rows * _charged(call, is_backward=is_backward)
                direction = "backward" if is_backward else "forward"
                name = f"attention {call.queries} x {call.width}, {direction}"
            self.cycles.setdefault(name, []).append((took / most, charged / most))
        return result


def _charged(call: Attended, *, is_backward: bool) -> float:
    """Cycles of attention, of one of its rows."""
    (one,) = attention_calls((call,), None, call.rows)
    cost = attention_cost(one, one.kernel)
    return cost.backward_cycles if is_backward else cost.forward_cycles


def _cold_shares(flop_per_s: float, draw: torch.Generator) -> Iterator[float]:
    source = torch.zeros(COLD_BYTES // 4, dtype=torch.float32)
    target = torch.zeros_like(source)
    copying_s = min(_seconds(lambda: target.copy_(source)) for _ in range(REPEATS))
    bytes_per_s = 2 * source.nbytes / copying_s
    for rows, inputs, outputs in PRODUCTS:
        nbytes = 4 * (rows * inputs + inputs * outputs + rows * outputs)
        sets = [
            (
                torch.randn(rows, inputs, generator=draw),
                torch.randn(outputs, inputs, generator=draw),
                torch.randn(rows, outputs, generator=draw),
            )
            for _ in range(min(MOST_SETS, COLD_BYTES // nbytes + 1))
        ]
        multiplying_s = 2 * rows * inputs * outputs / flop_per_s
        for product in (
            lambda x, weight, y: F.linear(x, weight),
            lambda x, weight, y: y @ weight,
            lambda x, weight, y: y.t() @ x,
        ):
            took = median(_seconds(partial(product, *each)) for each in sets)
            yield (took - multiplying_s) / (nbytes / bytes_per_s)


def main() -> int:
    torch.set_num_threads(1)
    draw = torch.Generator().manual_seed(0)
    matrix = torch.randn(EDGE, EDGE, generator=draw)
    multiplying_s = min(_seconds(lambda: torch.mm(matrix, matrix)) for _ in range(20))
    flop_per_s = 2 * EDGE**3 / multiplying_s
    timed = Timed(flop_per_s / FLOP_PER_CYCLE)
    for function in functions():
        x = torch.randn(ELEMENTS, generator=draw).requires_grad_()
        function(x).sum().backward()  # warm
        with timed:
            function(x).sum().backward()
    say = sys.stdout.write
    say(f"cycles of an element beyond products and bytes, {BYTES_PER_CYCLE} of them a cycle\n")
    say(f"{'operator':32} {'measured':>14} {'charged':>14}\n")
    for name, pairs in sorted(timed.cycles.items()):
        took, charged = zip(*pairs, strict=True)
        if max(charged) > 0 or max(took) > 1:
            say(f"{name:32} {_range(took):>14} {_range(charged):>14}\n")
    shares = sorted(_cold_shares(flop_per_s, draw))
    tenth = len(shares) // 10
    say(f"cold products, over their bytes: {median(shares):.1f} at the median,")
    say(f" {shares[tenth]:.1f} to {shares[-1 - tenth]:.1f} in eight of ten\n")
    return 0


def _seconds(work: Callable[[], object]) -> float:
    began = time.perf_counter()
    work()
    return time.perf_counter() - began


def _range(values: Sequence[float]) -> str:
    low, high = min(values), max(values)
    return f"{low:.1f}" if high - low < 0.1 else f"{low:.1f} to {high:.1f}"


if __name__ == "__main__":
    sys.exit(main())
