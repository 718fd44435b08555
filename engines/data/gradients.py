"""Gradients after the backwards of a step: clipped, or gathered whole."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from operator import is_

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from engines.data.replicas import local_part
from engines.runtime.mesh import Mesh
from engines.state.layout import Layout
from profiles.record.bounds import require_positive
from profiles.torch_compat import flattened

SMALL_ELEMENTS = 2**13
"""A tensor that is copied in the time that it takes to call for it."""


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

    Raises:
        InputError: `max_norm` is not above zero: below it gradients would change their sign.
    """
    require_positive(max_norm, "max_norm")
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


class GradientBuckets:
    """This rank's gradients in as few tensors as have their values: to read one of many elements
    takes no longer than to call for one of few.

    Args:
        parameters: of the module, by name.
        stay: gradients that are views are so of DDP's buckets, which stay: they are the same
            tensors step after step, and may be kept. DDP lays them out anew after its first
            backward: what the first step leaves would hold the old ones beside them.
    """

    def __init__(self, parameters: Sequence[tuple[str, nn.Parameter]], *, stay: bool) -> None:
        self._parameters, self._stay = parameters, stay
        self._seen: list[Tensor | None] = []
        self._buckets: list[Tensor] = []
        self._is_first = True

    def now(self) -> list[Tensor]:
        """Those that there are."""
        if not self._stay:
            return self._looked_up()
        gradients = [parameter.grad for _, parameter in self._parameters]
        if self._seen and all(map(is_, gradients, self._seen)):
            return self._buckets
        buckets = self._looked_up()
        are_views = all(gradient is None or gradient._base is not None for gradient in gradients)
        is_kept = are_views and not self._is_first
        self._seen, self._buckets = (gradients, buckets) if is_kept else ([], [])
        self._is_first = False
        return buckets

    def _looked_up(self) -> list[Tensor]:
        buckets = in_buckets(local_gradients(self._parameters).values())
        return buckets if self._stay else with_small_ones_joined(buckets)


def in_buckets(gradients: Iterable[Tensor]) -> list[Tensor]:
    """The same values in fewer tensors: those that fill another one as its views are that one."""
    views: dict[int, list[Tensor]] = {}
    for gradient in gradients:
        whole = gradient._base
        views.setdefault(id(gradient if whole is None else whole), []).append(gradient)
    return [tensor for own in views.values() for tensor in _whole_of(own)]


def with_small_ones_joined(tensors: Sequence[Tensor]) -> list[Tensor]:
    """The same values; on a CPU small tensors are copied into one. Accelerators read many tensors
    in one kernel."""
    joined: dict[torch.dtype, list[Tensor]] = {}
    others: list[Tensor] = []
    for tensor in tensors:
        is_small = tensor.numel() <= SMALL_ELEMENTS and tensor.device.type == "cpu"
        (joined.setdefault(tensor.dtype, []) if is_small else others).append(tensor)
    return [*others, *map(flattened, joined.values())]


def _whole_of(views: Sequence[Tensor]) -> Sequence[Tensor]:
    """The tensor that these are views of, where they fill it: there is nothing else in it."""
    whole = views[0]._base
    if whole is None or len(views) == 1:
        return views
    ends = whole.storage_offset()
    for start, size in sorted((view.storage_offset(), view.numel()) for view in views):
        if size and start != ends:
            return views
        ends += size
    is_filled = ends == whole.storage_offset() + whole.numel() and whole.is_contiguous()
    is_plain = all(view.is_contiguous() and view.dtype == whole.dtype for view in views)
    return [whole] if is_filled and is_plain else views


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
