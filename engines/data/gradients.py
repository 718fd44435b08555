"""Gradients after the backwards of a step: clipped, or gathered whole."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from engines.data.replicas import local_part
from engines.runtime.mesh import Mesh
from engines.state.layout import Layout


def full_gradients(model: nn.Module, layout: Layout) -> dict[str, Tensor]:
    """The whole gradient of every parameter by name, on every rank; for inspection.

    A collective call: all ranks must make it.
    """
    parameters = dict(model.named_parameters())
    gradients = {n: p.grad if layout.holds(n) else None for n, p in parameters.items()}
    with torch.no_grad():
        return {n: whole for n, whole in layout.wholes(gradients, gradients) if whole is not None}


def clip_gradients(model: nn.Module, layout: Layout, mesh: Mesh, max_norm: float) -> Tensor:
    """Scale all gradients so that their global L2 norm is at most `max_norm`.

    Returns the norm before clipping, the same on every rank. Copies on several ranks (replicas,
    tied parameters, layers that are whole on the tp axis) count once.
    """
    named = [(n, p) for n, p in model.named_parameters() if p.grad is not None and layout.holds(n)]
    is_everywhere = mesh.pp.size == mesh.tp.size == mesh.ep.size == 1 and mesh.shards is None
    counted = [
        local_part(parameter.grad)
        for name, parameter in named
        if parameter.grad is not None and (is_everywhere or layout.counts(name, parameter.grad))
    ]
    norm = nn.utils.get_total_norm(counted).to(layout.device)
    if not is_everywhere:
        square = norm.to(torch.float32).square()
        dist.all_reduce(square)
        norm = square.sqrt()
    nn.utils.clip_grads_with_norm_(_locals(p for _, p in named), max_norm, norm)
    return norm


def local_gradients(parameters: Iterable[tuple[str, nn.Parameter]]) -> dict[str, Tensor]:
    """This rank's parts of gradients by name, in the order given; of sparse ones the values."""
    gradients = {}
    for name, parameter in parameters:
        if parameter.grad is not None:
            gradient = local_part(parameter.grad)
            gradients[name] = gradient._values() if gradient.is_sparse else gradient
    return gradients


def _locals(parameters: Iterable[nn.Parameter]) -> Iterator[Tensor]:
    """Views of this rank's part of parameters and gradients: torch scales no DTensor by a norm that
    is none."""
    for parameter in parameters:
        if not isinstance(parameter, DTensor):
            yield parameter
            continue
        part = local_part(parameter).detach()
        part.grad = None if parameter.grad is None else local_part(parameter.grad)
        yield part
