"""Layers that can be split, and the slices of their parameters under a style."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from engines.state.slices import Slice
from engines.tensor.styles import Kind, Style
from profiles.capture.fakes.transformers_compat import is_transposed_linear
from profiles.capture.module.hooks import own_hooks
from profiles.errors import PlanError
from profiles.torch_compat import has_gradient_hooks

_CONVOLUTIONS = (nn.Conv1d, nn.Conv2d, nn.Conv3d)


def can_split(module: nn.Module) -> bool:
    """True if `module` is a layer with a weight of its own that can be cut by features."""
    if isinstance(module, torch.jit.ScriptModule) or "forward" in vars(module):
        return False
    if module._parameters.get("weight") is None:
        return False
    if any(map(has_gradient_hooks, module.parameters(recurse=False))):
        return False
    if isinstance(module, nn.Embedding):
        return module.max_norm is None and not module.scale_grad_by_freq and not module.sparse
    if isinstance(module, _CONVOLUTIONS):
        return module.groups == 1
    return isinstance(module, nn.Linear) or is_transposed_linear(module)


def is_plain(module: nn.Module) -> bool:
    """True if a layer that can be split is one of torch's own, or as simple: as a unit of its own
    it needs no proof that its parts, put together, are the whole."""
    if not can_split(module) or any(True for _ in own_hooks(module)):
        return False
    own = (nn.Linear.forward, nn.Embedding.forward, *(kind.forward for kind in _CONVOLUTIONS))
    return type(module).forward in own or is_transposed_linear(module)


def features(module: nn.Module) -> tuple[int, int]:
    """Whole input and output features or channels; rows and width of an embedding."""
    shape = module.get_parameter("weight").shape
    if isinstance(module, nn.Embedding) or is_transposed_linear(module):
        return shape[0], shape[1]
    return shape[1], shape[0]


def feature_dim(module: nn.Module) -> int:
    """The dimension of its output that holds features: channels come before places."""
    return -1 - len(module.kernel_size) if isinstance(module, _CONVOLUTIONS) else -1


def slices_of(module: nn.Module, style: Style) -> dict[str, Slice]:
    """Slices of the module's own parameters on a rank; those not named stay whole."""
    if style.kind is Kind.BIAS:
        own = {name: module._parameters.get(name) for name in style.sizes}
        return {n: Slice(head_dim(p, style.packs)) for n, p in own.items() if p is not None}
    if isinstance(module, nn.Embedding):
        return {"weight": Slice(1 if style.kind is Kind.COLUMN else 0)}
    if style.kind is Kind.HEADS:
        return {}
    inputs, outputs = (0, 1) if is_transposed_linear(module) else (1, 0)
    if style.kind is Kind.ROW:
        return {"weight": Slice(inputs, style.packs)}
    slices = {"weight": Slice(outputs, style.packs)}
    if module._parameters.get("bias") is not None:
        slices["bias"] = Slice(0, style.packs)
    return slices


def head_dim(tensor: Tensor, heads: int) -> int:
    """The dimension of a table that has a number for each of so many heads: the last such one.

    Raises:
        PlanError: it has none.
    """
    fitting = [dim for dim, length in enumerate(tensor.shape) if length == heads]
    if not fitting:
        raise PlanError(f"a tensor of {tuple(tensor.shape)} has no dimension of {heads} heads")
    return fitting[-1]


@contextmanager
def without_bias(module: nn.Module) -> Iterator[None]:
    """Remove the bias of the layer inside: added on every rank it would count once for each."""
    bias = module._parameters.get("bias")
    if "bias" in module._parameters:
        module._parameters["bias"] = None
    try:
        yield
    finally:
        if "bias" in module._parameters:
            module._parameters["bias"] = bias


def with_bias(module: nn.Module, product: Tensor) -> Tensor:
    """`product` plus the layer's bias, if it has one, in the product's dtype."""
    bias = module._parameters.get("bias")
    if bias is None:
        return product
    places = -feature_dim(module) - 1
    return product + bias.to(product.dtype).reshape(-1, *[1] * places)
