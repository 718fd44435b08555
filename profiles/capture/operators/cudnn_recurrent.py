"""Recurrent layers as cuDNN runs them on accelerators: one product of all steps' inputs, then a
product and a kernel of all gates for each step, and one buffer that the backward reads. Cells that
a model calls itself are two products and a kernel of torch's own.

Shapes alone make torch take them apart on a processor, a dozen kernels a step, each of which keeps
its own result.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.overrides import TorchFunctionMode

from profiles.capture.operators.recurrent_layers import run_layers, weights_a_run
from profiles.model.kernel_cycles import Charge
from profiles.torch_compat import is_fake
from profiles.trace.scopes import Scope, Work

_KERNELS_A_STEP = 2  # the product with the states, and the gates


class Cell(NamedTuple):
    """A kind of recurrent layer, by multiples of its width.

    Attributes:
        gates: outputs of its products.
        saved: what a step leaves in the buffer beside its output, on an H200 (cuDNN 9, fp32 and
            bf16, one layer and two): activated gates, and the cell (LSTM) or what one of them is a
            product of and its states (GRU).
        workspace: that a single cell keeps; 0: its gates.
    """

    gates: int
    saved: int
    workspace: int = 0


CELLS: Mapping[Callable[..., Any], Cell] = {
    torch.lstm: Cell(4, 5),
    torch.gru: Cell(3, 6),
    torch.rnn_tanh: Cell(1, 1),
    torch.rnn_relu: Cell(1, 1),
}
SINGLE: Mapping[Callable[..., Any], Cell] = {
    torch.lstm_cell: Cell(4, 5),
    torch.gru_cell: Cell(3, 6, workspace=5),
}
"""torch/aten/src/ATen/native/cuda/RNN.cu (2.11): `_thnn_fused_lstm_cell`, `_thnn_fused_gru_cell`.
Others are taken apart on accelerators too."""
BOTH_WAYS = 6, 9
"""Widths of a step that a layer in two directions has room for beside the gates of both, forward
and backward: they run at once (the same H200: 14 and 17 in all of an LSTM, 12 and 15 of a GRU;
`make gpu`, part b, buffers of recurrent layers)."""


class CudnnRecurrent(TorchFunctionMode):
    """Inside, recurrent layers over whole tensors of shapes without values run as cuDNN's kernels.

    Those over packed sequences, or with projections, run step by step.

    Args:
        scope: the one that runs now.
    """

    def __init__(self, scope: Callable[[], Scope]) -> None:
        super().__init__()
        self._scope = scope

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Sequence[type],
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        if func in CELLS and not kwargs and _is_followed(args):
            return _layers(CELLS[func], self._scope(), *args)
        if func in SINGLE and not kwargs and len(args) == 6 and is_fake(args[0]):
            return _called(SINGLE[func], self._scope(), *args)
        return func(*args, **(kwargs or {}))


def _is_followed(args: tuple[Any, ...]) -> bool:
    if len(args) != 9 or isinstance(args[2], Tensor):  # the sizes of packed sequences come second
        return False
    value, states, weights, has_biases, *_ = args
    alike = isinstance(states, Tensor) or states[0].shape == states[1].shape
    return (
        alike
        and is_fake(value)
        and value.dim() == 3
        and not len(weights) % weights_a_run(has_biases)
    )


def _layers(
    cell: Cell,
    scope: Scope,
    value: Tensor,
    states: Tensor | Sequence[Tensor],
    weights: Sequence[Tensor],
    *more: Any,
) -> tuple[Tensor, ...]:
    of_layers = [states] if isinstance(states, Tensor) else list(states)
    if torch.is_autocast_enabled("cpu"):
        value, weights = value.bfloat16(), [weight.bfloat16() for weight in weights]
        of_layers = [state.bfloat16() for state in of_layers]

    both_ways = bool(more[4])

    def run_layer(
        value: Tensor, states: Sequence[Tensor], weights: Sequence[Tensor]
    ) -> Sequence[Tensor]:
        return _Run.apply(  # type: ignore[no-any-return, no-untyped-call]
            cell, scope, both_ways, len(states), value, *states, *weights
        )

    return run_layers(run_layer, value, of_layers, weights, *more)


class _Run(torch.autograd.Function):
    """One layer in one direction. Products with the states are counted as one over all steps; what
    each further step reads and launches is noted besides."""

    @staticmethod
    def forward(
        ctx: Any,
        cell: Cell,
        scope: Scope,
        both_ways: bool,
        count: int,
        value: Tensor,
        *more: Tensor,
    ) -> tuple[Tensor, ...]:
        states, weights = more[:count], more[count:]
        (steps, rows, inputs), width = value.shape, states[0].shape[-1]
        output = value.new_empty(steps, rows, width)
        buffer = value.new_empty(steps * rows, cell.saved * width)
        gates = value.new_empty(steps * rows, cell.gates * width)
        others = _of_the_other(value, steps * rows, width, cell, both_ways, forward=True)
        torch.mm(value.reshape(-1, inputs), weights[0].t(), out=gates)
        torch.mm(output.view(-1, width), weights[1].t(), out=gates)
        last = [torch.empty_like(state) for state in states]
        of_gates = 2 * gates.nbytes + buffer.nbytes
        _add_further(scope.forward, steps, weights[1], of_gates)
        scope.looped_kernels += _KERNELS_A_STEP * steps
        del others
        ctx.cell, ctx.scope, ctx.count, ctx.both_ways = cell, scope, count, both_ways
        ctx.save_for_backward(value, output, buffer, *more)
        return output, *last

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        value, output, buffer, *more = ctx.saved_tensors
        states, weights = more[: ctx.count], more[ctx.count :]
        width, flat = output.shape[-1], value.reshape(-1, value.shape[-1])
        gates = buffer.new_empty(len(buffer), ctx.cell.gates * width)
        others = _of_the_other(buffer, len(buffer), width, ctx.cell, ctx.both_ways, forward=False)
        torch.mm(gates, weights[1], out=torch.empty_like(output).view(-1, width))
        of_value = torch.mm(gates, weights[0]).view(value.shape)
        of_weights = [torch.mm(gates.t(), flat), torch.mm(gates.t(), output.view(-1, width))]
        of_biases = [torch.sum(gates, 0) for _ in weights[2:]]
        of_gates = buffer.nbytes + gates.nbytes
        _add_further(ctx.scope.backward, len(value), weights[1], of_gates)
        of_states = [torch.empty_like(state) for state in states]
        del others
        return None, None, None, None, of_value, *of_states, *of_weights, *of_biases


def _of_the_other(
    like: Tensor, rows: int, width: int, cell: Cell, both_ways: bool, *, forward: bool
) -> Tensor | None:
    """Room that the other direction of a layer takes meanwhile."""
    widths = cell.gates + BOTH_WAYS[not forward]
    return like.new_empty(rows, widths * width) if both_ways else None


def _called(
    cell: Cell,
    scope: Scope,
    value: Tensor,
    states: Tensor | Sequence[Tensor],
    of_value: Tensor,
    of_state: Tensor,
    *biases: Tensor | None,
) -> Any:
    """A single cell: the products of its input and of its state, and one kernel of their gates."""
    own = [states] if isinstance(states, Tensor) else list(states)
    gates = F.linear(value, of_value), F.linear(own[0], of_state)
    last = own[-1].to(gates[0].dtype) if len(own) > 1 else own[0]
    there = [bias for bias in biases if bias is not None]
    out = _Cell.apply(cell, scope, len(own), *gates, last, *there)  # type: ignore[no-untyped-call]
    return out[0] if isinstance(states, Tensor) else tuple(out)


class _Cell(torch.autograd.Function):
    """The kernel of a cell's gates; its backward writes their gradient once, and sums it for the
    biases. Both products are saved too, for a backward of the backward (torch 2.11,
    tools/autograd/derivatives.yaml)."""

    @staticmethod
    def forward(
        ctx: Any,
        cell: Cell,
        scope: Scope,
        count: int,
        of_value: Tensor,
        of_state: Tensor,
        last: Tensor,
        *biases: Tensor,
    ) -> tuple[Tensor, ...]:
        rows, width = last.shape
        saved = of_value.new_empty(rows, (cell.workspace or cell.gates) * width)
        states = [of_value.new_empty(rows, width) for _ in range(count)]
        made = saved.nbytes + count * states[0].nbytes
        moved = 2 * of_value.nbytes + last.nbytes + made
        scope.forward.add(flop=0, moved_bytes=moved)
        ctx.cell, ctx.scope, ctx.biases = cell, scope, len(biases)
        ctx.save_for_backward(saved, last, states[-1], of_value, of_state)
        return tuple(states)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        saved, last, state, *_products = ctx.saved_tensors
        gates = saved.new_empty(len(saved), ctx.cell.gates * last.shape[-1])
        moved = saved.nbytes + gates.nbytes + 3 * last.nbytes + state.nbytes
        ctx.scope.backward.add(flop=0, moved_bytes=moved)
        of_biases = [torch.sum(gates, 0)] * ctx.biases if ctx.biases else []
        return None, None, None, gates, gates, torch.empty_like(last), *of_biases


def _add_further(work: Work, steps: int, weight: Tensor, of_gates: int) -> None:
    """Add bytes and kernels beyond one product with the states: each step reads their weights
    anew, and computes its gates."""
    moved = (steps - 1) * weight.nbytes + of_gates
    work.add(flop=0, moved_bytes=moved, charge=Charge(_KERNELS_A_STEP * steps - 1))
