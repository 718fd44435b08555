"""Recurrent layers as cuDNN runs them on accelerators: one product of all steps' inputs, then a
product and a kernel of all gates for each step, and one buffer that the backward reads.

Shapes alone make torch take them apart on a processor, a dozen kernels a step, each of which keeps
its own result.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from profiles.capture.operators.recurrent_layers import run_layers, weights_a_run
from profiles.torch_compat import is_fake
from profiles.trace.scopes import Scope

_KERNELS_A_STEP = 2  # the product with the states, and the gates


class Cell(NamedTuple):
    """A kind of recurrent layer, by multiples of its width.

    Attributes:
        gates: outputs of its products.
        saved: what a step leaves in the buffer: activated gates, what one of them is a product of
            (GRU), the cell (LSTM) and the state that the next step takes. With an LSTM's six the
            peak on an H100 is right within 1 %; the others follow from the same rule.
    """

    gates: int
    saved: int


CELLS: Mapping[Callable[..., Any], Cell] = {
    torch.lstm: Cell(4, 6),
    torch.gru: Cell(3, 5),
    torch.rnn_tanh: Cell(1, 2),
    torch.rnn_relu: Cell(1, 2),
}


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

    def run_layer(
        value: Tensor, states: Sequence[Tensor], weights: Sequence[Tensor]
    ) -> Sequence[Tensor]:
        return _Run.apply(  # type: ignore[no-any-return, no-untyped-call]
            cell, scope, len(states), value, *states, *weights
        )

    return run_layers(run_layer, value, of_layers, weights, *more)


class _Run(torch.autograd.Function):
    """One layer in one direction. Products with the states are counted as one over all steps; what
    each further step reads and launches is noted besides."""

    @staticmethod
    def forward(
        ctx: Any, cell: Cell, scope: Scope, count: int, value: Tensor, *more: Tensor
    ) -> tuple[Tensor, ...]:
        states, weights = more[:count], more[count:]
        (steps, rows, inputs), width = value.shape, states[0].shape[-1]
        output = value.new_empty(steps, rows, width)
        buffer = value.new_empty(steps * rows, cell.saved * width)
        gates = value.new_empty(steps * rows, cell.gates * width)
        torch.mm(value.reshape(-1, inputs), weights[0].t(), out=gates)
        torch.mm(output.view(-1, width), weights[1].t(), out=gates)
        last = [torch.empty_like(state) for state in states]
        of_gates = 2 * gates.nbytes + buffer.nbytes
        scope.forward.add(flop=0, **_further(steps, weights[1], of_gates))
        scope.looped_kernels += _KERNELS_A_STEP * steps
        ctx.cell, ctx.scope, ctx.count = cell, scope, count
        ctx.save_for_backward(value, output, buffer, *more)
        return output, *last

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        value, output, buffer, *more = ctx.saved_tensors
        states, weights = more[: ctx.count], more[ctx.count :]
        width, flat = output.shape[-1], value.reshape(-1, value.shape[-1])
        gates = buffer.new_empty(len(buffer), ctx.cell.gates * width)
        torch.mm(gates, weights[1], out=torch.empty_like(output).view(-1, width))
        of_value = torch.mm(gates, weights[0]).view(value.shape)
        of_weights = [torch.mm(gates.t(), flat), torch.mm(gates.t(), output.view(-1, width))]
        of_biases = [torch.sum(gates, 0) for _ in weights[2:]]
        of_gates = buffer.nbytes + gates.nbytes
        ctx.scope.backward.add(flop=0, **_further(len(value), weights[1], of_gates))
        of_states = [torch.empty_like(state) for state in states]
        return None, None, None, of_value, *of_states, *of_weights, *of_biases


def _further(steps: int, weight: Tensor, of_gates: int) -> dict[str, int]:
    """Bytes and kernels beyond one product with the states: each step reads their weights anew, and
    computes its gates."""
    moved = (steps - 1) * weight.nbytes + of_gates
    return {"moved_bytes": moved, "kernels": _KERNELS_A_STEP * steps - 1}
