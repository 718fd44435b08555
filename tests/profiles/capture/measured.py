"""Costs of a real run of a small model: the oracle for `capture`."""

from __future__ import annotations

import weakref
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.flop_counter import (
    FlopCounterMode,
    conv_flop_count,
    sdpa_backward_flop_count,
    sdpa_flop_count,
)

from profiles.capture.batch.call import Batch, LossFn, call_model, loss_of
from profiles.capture.batch.tree import batch_tensors


@dataclass(frozen=True)
class Measured:
    """Of one forward and backward on real tensors.

    Attributes:
        saved_bytes: storages that autograd holds after the forward, each once, without those of
            parameters, buffers and the batch.
        gradient_bytes: held at the end.
    """

    flop: int
    saved_bytes: int
    gradient_bytes: int


def measure(model: nn.Module, batch: Batch, loss_fn: LossFn | None = None) -> Measured:
    """Run `model` once and count."""
    flop, saved_bytes = _count(model, batch, loss_fn)
    gradient_bytes = sum(p.grad.nbytes for p in model.parameters() if p.grad is not None)
    model.zero_grad(set_to_none=True)
    return Measured(flop, saved_bytes, gradient_bytes)


def peak_of_a_run(model: nn.Module, batch: Batch, loss_fn: LossFn | None = None) -> int:
    """Most bytes that the CPU allocator held at once above what it held before.

    Under torch's profiler, which takes longer than the run itself.
    """
    peak_bytes = _allocations(model, batch, loss_fn)
    model.zero_grad(set_to_none=True)
    return peak_bytes


def _loss(model: nn.Module, batch: Batch, loss_fn: LossFn | None) -> Tensor:
    return loss_of(call_model(model, batch, has_target=loss_fn is not None), batch, loss_fn)


def _count(model: nn.Module, batch: Batch, loss_fn: LossFn | None) -> tuple[int, int]:
    before = [*model.parameters(), *model.buffers(), *batch_tensors(batch)]
    pointers = {tensor.untyped_storage().data_ptr() for tensor in before}
    saved: dict[int, weakref.ref[torch.UntypedStorage]] = {}

    def pack(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in pointers:
            saved[id(storage)] = weakref.ref(storage)
        return tensor

    with FlopCounterMode(display=False, custom_mapping=missing_formulas()) as counter:
        with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
            loss = _loss(model, batch, loss_fn)
        alive = [storage for ref in saved.values() if (storage := ref()) is not None]
        saved_bytes = sum(storage.nbytes() for storage in alive)
        del alive
        loss.backward()
    return counter.get_total_flops(), saved_bytes


def missing_formulas() -> dict[object, object]:
    """torch's counter knows attention on GPUs only, no LSTM of oneDNN, no grouped matmuls, and no
    groups of a convolution's weight gradient."""
    aten = torch.ops.aten

    def each(q: torch.Size, shape: torch.Size) -> torch.Size:  # grouped queries, torch 2.11
        return torch.Size((*q[:-2], *shape[-2:]))

    def lstm(x: torch.Size, w: torch.Size, u: torch.Size) -> int:  # four gates a step
        return int(2 * x[0] * x[1] * 4 * u[1] * (x[2] + u[1]))

    def convolution(
        gradient: torch.Size,
        x: torch.Size,
        weight: torch.Size,
        *args: Any,
        out_shape: object = None,
        **kwargs: object,
    ) -> int:
        """Either gradient takes what torch counts for the forward."""
        *_, is_transposed, _, _, mask = args
        forward: int = conv_flop_count(x, weight, gradient, transposed=is_transposed)
        return sum(mask[:2]) * forward

    return {
        aten.convolution_backward: convolution,
        aten._scaled_dot_product_flash_attention_for_cpu: (
            lambda q, k, v, *a, out_shape=None, **kw: sdpa_flop_count(q, each(q, k), each(q, v))
        ),
        aten._scaled_dot_product_flash_attention_for_cpu_backward: (
            lambda g, q, k, v, *a, out_shape=None, **kw: sdpa_backward_flop_count(
                g, q, each(q, k), each(q, v)
            )
        ),
        aten.mkldnn_rnn_layer: lambda x, w, u, *a, out_shape=None, **kw: lstm(x, w, u),
        aten.mkldnn_rnn_layer_backward: (
            lambda x, w, u, *a, out_shape=None, **kw: 2 * lstm(x, w, u)
        ),
        aten._grouped_mm: lambda x, y, *a, out_shape=None, **kw: 2 * x[-2] * x[-1] * y[-1],
    }


def _allocations(model: nn.Module, batch: Batch, loss_fn: LossFn | None) -> int:
    with torch.profiler.profile(
        activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True, acc_events=True
    ) as profiler:
        _loss(model, batch, loss_fn).backward()
    live = highest = 0
    events = profiler.profiler.kineto_results.events()  # type: ignore[union-attr]
    for event in sorted(events, key=lambda event: event.start_ns()):
        if event.name() == "[memory]":
            live += event.nbytes()
            highest = max(highest, live)
    return highest
