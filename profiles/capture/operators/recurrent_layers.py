"""Stacks of recurrent layers, run by a kernel for a layer in one direction."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

RunLayer = Callable[[Tensor, Sequence[Tensor], Sequence[Tensor]], Sequence[Tensor]]
"""The output and the last states of a layer in one direction, of what goes in (steps, rows,
inputs), its first states (rows, width) and its weights."""


def weights_a_run(has_biases: bool) -> int:
    """Weights of a layer in one direction."""
    return 4 if has_biases else 2


def run_layers(
    run_layer: RunLayer,
    value: Tensor,
    states: Sequence[Tensor],
    weights: Sequence[Tensor],
    has_biases: bool,
    layers: int,
    dropout: float,
    is_training: bool,
    is_bidirectional: bool,
    batch_first: bool,
) -> tuple[Tensor, ...]:
    """Run layer after layer, each in its directions: the output and the last states of all.

    Arguments but the first are those of `torch.lstm`.
    """
    value = value.transpose(0, 1).contiguous() if batch_first else value
    runs, per_run, last = 2 if is_bidirectional else 1, weights_a_run(has_biases), []
    for layer in range(layers):
        outputs = []
        for run in range(layer * runs, (layer + 1) * runs):
            own = weights[run * per_run : (run + 1) * per_run]
            output, *ends = run_layer(value, [state[run] for state in states], own)
            outputs.append(output)
            last.append(ends)
        value = torch.cat(outputs, -1) if is_bidirectional else outputs[0]
        if dropout and is_training and layer < layers - 1:
            value = torch.dropout(value, dropout, True)
    value = value.transpose(0, 1) if batch_first else value
    return value, *(torch.stack(ends) for ends in zip(*last, strict=True))
