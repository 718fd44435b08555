"""LSTMs as oneDNN runs them on a CPU: a kernel a layer and direction, which keeps a workspace.

Shapes alone make torch take an LSTM apart, step by step: each step would read the weights and write
their gradients, which in the kernel stay in caches, and save what the workspace holds otherwise.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from profiles.capture.operators.recurrent_layers import run_layers, weights_a_run
from profiles.torch_compat import is_fake

_LINE, _ALIASED, _PAGE = 64, 1024, 4096
"""Bytes. Rows of a workspace begin on a line of the cache, and never a multiple of `_ALIASED`
apart, where they would share a place in it: one more line keeps them apart; its parts begin on a
page (oneDNN, `rnn_utils`)."""


def workspace_bytes(steps: int, rows: int, inputs: int, hidden: int) -> int:
    """Of a layer and direction in training, in float32: gates, states, and the gradients of both.

    oneDNN keeps one state more than there are steps, and two layers for one: what goes in, and what
    comes out. (`tests/profiles/capture/operators/test_lstm_kernels.py` has the kernel say so.)
    """
    states = 2 * rows * (steps + 1)
    wide = _padded(max(inputs, hidden))
    parts = [
        rows * steps * _padded(4 * hidden),
        *[states * wide] * 3,
        rows * steps * _padded(hidden),
        *[states * hidden] * 2,
    ]
    return sum(-(-4 * elements // _PAGE) * _PAGE for elements in parts)


def _padded(width: int) -> int:
    nbytes = -(-4 * width // _LINE) * _LINE
    return (nbytes if nbytes % _ALIASED else nbytes + _LINE) // 4


class LstmKernels(TorchFunctionMode):
    """Inside, LSTMs over whole tensors of shapes without values run as oneDNN's kernels do.

    Those over packed sequences, with projections, or not in float32 run step by step.
    """

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Sequence[type],
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        if func is torch.lstm and not kwargs and _is_followed(args):
            return run_layers(_run_layer, *args)
        return func(*args, **(kwargs or {}))


def _is_followed(args: tuple[Any, ...]) -> bool:
    if len(args) != 9 or isinstance(args[1], Tensor):  # the sizes of packed sequences
        return False
    value, states, weights, has_biases, *_ = args
    return (
        is_fake(value)
        and value.dim() == 3
        and value.dtype == torch.float32
        and len(states) == 2
        and states[0].shape == states[1].shape
        and len(weights) % weights_a_run(has_biases) == 0
    )


def _run_layer(
    value: Tensor, states: Sequence[Tensor], weights: Sequence[Tensor]
) -> Sequence[Tensor]:
    return _Run.apply(value, *states, *weights)  # type: ignore[no-any-return, no-untyped-call]


class _Run(torch.autograd.Function):
    """One layer in one direction: products over all steps, whose results are in the workspace."""

    @staticmethod
    def forward(
        ctx: Any, value: Tensor, hidden: Tensor, cell: Tensor, *weights: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        (steps, rows, inputs), width = value.shape, hidden.shape[-1]
        output = value.new_empty(steps, rows, width)
        nbytes = workspace_bytes(steps, rows, inputs, width)
        workspace = value.new_empty(nbytes, dtype=torch.uint8)
        gates = _gates(workspace, output)
        torch.mm(value.reshape(-1, inputs), weights[0].t(), out=gates)
        torch.mm(output.view(-1, width), weights[1].t(), out=gates)
        last = torch.empty_like(hidden), torch.empty_like(cell)
        ctx.save_for_backward(value, hidden, cell, output, *last, workspace, *weights)
        return output, *last

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        value, hidden, cell, output, _, _, workspace, *weights = ctx.saved_tensors
        width, flat = hidden.shape[-1], value.reshape(-1, value.shape[-1])
        gates = _gates(workspace, output)
        of_states = workspace[-output.nbytes :].view(output.dtype).view(-1, width)
        torch.mm(gates, weights[1], out=of_states)
        of_value = torch.mm(gates, weights[0]).view(value.shape)
        of_weights = [torch.mm(gates.t(), flat), torch.mm(gates.t(), output.view(-1, width))]
        of_biases = [torch.sum(gates, 0) for _ in weights[2:]]
        states = torch.empty_like(hidden), torch.empty_like(cell)
        return of_value, *states, *of_weights, *of_biases


def _gates(workspace: Tensor, output: Tensor) -> Tensor:
    width = output.shape[-1]
    return workspace[: 4 * output.nbytes].view(output.dtype).view(-1, 4 * width)
