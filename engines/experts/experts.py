"""A model whose experts are shared by the ranks of the ep axis.

In a pipeline a rank shares the experts of its own stages, with ranks of the same stages. No rank
waits for ever: those of an ep group run the same schedule over as many microbatches, recompute
included, and a forward or backward makes the same all-to-alls whatever the tokens choose, so the
group calls them in one order. Merge each action of a schedule over all replicas, and what waits for
what is the order of one pipeline, which has no cycle.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Container, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from engines.blocks.wrap import wrap_forward
from engines.data.replicas import sum_gradients
from engines.experts.container import containers, counts_of, require_separable
from engines.experts.token_dispatch import dispatch
from engines.runtime.mesh import Axis
from engines.state.slices import Slice
from profiles.capture.module.experts import experts_of
from profiles.errors import ModelError, PlanError, a_type

EXPERTS_FIRST = Slice(dim=0)


class Experts:
    """The sharded experts of a model.

    Attributes:
        names: first names of their parameters, of which ranks hold slices; in a pipeline those of
            all stages.
        modules: of this rank's stages, that hold them.
    """

    def __init__(
        self,
        model: nn.Module,
        axis: Axis,
        copies: Axis,
        *,
        replicas: int,
        local: Container[str] | None = None,
    ) -> None:
        """Shard the experts of `model`, in place, and dispatch tokens to them.

        Args:
            axis: the ep axis, over which experts are sharded.
            copies: the ranks that hold the same experts.
            replicas: ranks over which gradients are averaged.
            local: first names of the parameters of this rank's stages, in a pipeline.

        Raises:
            PlanError: there are none, or they cannot be sharded.
        """
        self._copies = copies
        self._replicas = replicas
        first = {parameter: name for name, parameter in model.named_parameters()}
        modules = containers(model)
        if not modules:
            raise PlanError(
                f"ep={axis.size}: no module holds its experts as weights with a dimension of their"
                " own",
                hints=["set ep=1; experts in a list are called one by one by their block's code"],
            )
        self.names: set[str] = set()
        own: dict[str, nn.Module] = {}
        for path, module in modules.items():
            names = {first[p] for p in module.parameters(recurse=False)}
            self.names |= names
            if local is None or all(name in local for name in names):
                own[path] = module
        _require_all_separable(own, size=axis.size)
        for module in own.values():
            _shard(module, axis)
        self.modules = list(own.values())
        self._own_names = [name for name in sorted(self.names) if local is None or name in local]
        self._model = model

    @property
    def parameters(self) -> set[nn.Parameter]:
        """Those that the caller does not shard."""
        return set(self._averaged())

    def _averaged(self) -> list[nn.Parameter]:
        """They are looked up anew: one that had no values yet is replaced when it gets them."""
        return [self._model.get_parameter(name) for name in self._own_names]

    @property
    def slices(self) -> dict[str, Slice]:
        """Their slices, by first name."""
        return dict.fromkeys(self.names, EXPERTS_FIRST)

    def release(self) -> list[nn.Module]:
        """The modules that hold experts here; the caller averages their gradients from now on."""
        self._own_names = []
        return self.modules

    def average(self) -> None:
        """Give every copy of an expert the mean gradient. On its owner the gradients of all ranks
        of the ep axis are added up already, by the tokens that came."""
        trainable = [p for p in self._averaged() if p.requires_grad]
        for parameter in trainable:
            if parameter.grad is None:  # no token came
                parameter.grad = torch.zeros_like(parameter)
        if self._copies.group is not None:
            sum_gradients(trainable, self._copies.group, divisor=self._replicas)
        else:
            for parameter in trainable:
                assert parameter.grad is not None
                parameter.grad /= self._replicas


def _require_all_separable(modules: Mapping[str, nn.Module], *, size: int) -> None:
    """Try one module of each kind."""
    tried: set[object] = set()
    for path, module in modules.items():
        shapes = {name: tuple(p.shape) for name, p in module.named_parameters(recurse=False)}
        kind = (type(module), tuple(shapes.items()))
        if kind not in tried:
            require_separable(path, module, size=size)
            tried.add(kind)


def _shard(module: nn.Module, axis: Axis) -> None:
    """Keep this rank's slice of every weight, and dispatch tokens to the other ranks."""
    each = experts_of(module) // axis.size
    for name in counts_of(module):
        setattr(module, name, each)
    for name, weight in list(module.named_parameters(recurse=False)):
        part = EXPERTS_FIRST.part(weight.detach(), rank=axis.position, size=axis.size).clone()
        setattr(module, name, nn.Parameter(part, requires_grad=weight.requires_grad))
    wrap_forward(module, _dispatching(inspect.signature(module.forward), axis, each))


def _dispatching(signature: inspect.Signature, axis: Axis, each: int) -> Callable[..., Tensor]:
    """A forward that sends tokens to the ranks of their experts."""

    def run(forward: Callable[..., Tensor], module: nn.Module, *args: Any, **kwargs: Any) -> Tensor:
        # Arguments go by position; names differ from model to model.
        hidden, chosen, weights = signature.bind(*args, **kwargs).args
        _require_experts(chosen, each * axis.size, module)
        top_k = chosen.shape[-1]
        tokens = hidden.reshape(-1, hidden.shape[-1])

        def compute(tokens: Tensor, numbers: Tensor) -> Tensor:
            alone = torch.ones_like(tokens[:, :1])
            with _cast(module, tokens.dtype):
                made = forward(tokens, numbers[:, None], alone)
            return made

        spread = tokens.repeat_interleave(top_k, 0)
        made = dispatch(spread, chosen.reshape(-1), axis=axis, each=each, compute=compute)
        weighted = made.view(-1, top_k, made.shape[-1]) * weights.reshape(-1, top_k, 1)
        result: Tensor = weighted.sum(1).to(hidden.dtype).view(hidden.shape)
        return result

    return run


def _require_experts(chosen: Tensor, count: int, module: nn.Module) -> None:
    """Raises:
    ModelError: a number is no expert's, as of tokens that a router drops.
    """
    # One wait for the device, as the exchange of counts has one.
    least, most = torch.stack(chosen.aminmax()).tolist() if chosen.numel() else (0, 0)
    if least < 0 or most >= count:
        raise ModelError(
            f"{a_type(module)} was given {least if least < 0 else most} for the number of an expert"
            f" in place of 0 to {count - 1}: a rank sends each token to the rank of its expert",
            hints=["give dropped tokens the weight 0 and any expert, or set ep=1"],
        )


@contextmanager
def _cast(module: nn.Module, dtype: torch.dtype) -> Iterator[None]:
    """Inside, its weights are cast to `dtype`, as FSDP2 casts those that it gathers."""
    own = dict(module._parameters)
    if torch.is_autocast_enabled(next(module.parameters()).device.type):
        yield  # it casts what has to be
        return
    try:
        for name, weight in own.items():
            if weight is not None:
                module._parameters[name] = weight.to(dtype)  # type: ignore[assignment]
        yield
    finally:
        module._parameters.update(own)
