"""A model whose sequences are sharded over the cp axis, as `ParallelModel` runs it."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from engines.blocks.wrap import wrap_forward
from engines.context.attention import OwnTokens
from engines.context.input_sharding import length_of
from engines.context.proof import LOSS, SequenceProof, require_equal_chunks, require_unmasked
from engines.context.ring import Ring
from engines.context.tokens import joined, part
from engines.data.loss_weight import silence, weighted
from engines.runtime.mesh import Axis
from profiles.capture.batch.call import Batch, LossFn, call_model, loss_of
from profiles.errors import BatchError, ModelError
from profiles.torch_compat import all_gather_single, map_tensors, tensors_in


class Context:
    """Run a model over this rank's tokens, and weight its loss.

    Every rank of the axis gets whole rows and takes its tokens from them. Gradients and losses
    are averaged over the axis as over replicas.
    """

    def __init__(self, model: nn.Module, proof: SequenceProof, axis: Axis) -> None:
        self._model = model
        self._proof = proof
        self._way = proof.way
        self._outputs = proof.outputs
        self._axis = axis
        self._ring = Ring(axis)
        self._places: Tensor | None = None

    def require(self, pieces: Sequence[Batch]) -> None:
        """Raises:
        BatchError: sequences that cannot be cut into equal chunks, rows with padding, lengths
            that the model counts to for something else, or values with which the losses of the
            ranks do not make up that over all tokens.
        """
        for piece in pieces:
            self._require_rule(piece)
            require_equal_chunks(piece, self._axis.size)
            require_unmasked(piece)
            self._proof.require_places(length_of(piece), self._axis.size)

    def _require_rule(self, batch: Batch) -> None:
        doubt = self._proof.loss.doubt_of(batch)
        if doubt:
            raise BatchError(doubt, where=f"cp={self._axis.size}", hints=["set cp=1"])

    def wrap(self, blocks: Iterable[nn.Module]) -> None:
        """Wrap blocks so that each sees its own tokens: recompute runs them again in the backward,
        when `loss` and `forward` have returned."""
        for block in blocks:
            wrap_forward(block, self._with_own_tokens)

    def loss(self, called: Callable[..., object], piece: Batch, loss_fn: LossFn | None) -> Tensor:
        """The rank's share of the mean loss of `piece`: the mean over the axis is the loss."""
        own, run = self._own(called, piece)
        weight = self._weight(piece)
        with self.own_tokens():
            output = call_model(
                run, own, has_target=loss_fn is not None, forward=self._model.forward
            )
        silence(output, weight)
        return weighted(loss_of(output, own, loss_fn), weight)

    def forward(
        self, called: Callable[..., object], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> object:
        """The model's output over all tokens, on every rank of the axis.

        Raises:
            ModelError: it returns other tensors than it did over the sample.
        """
        batch = _as_batch(self._model, args, kwargs)
        own, run = self._own(called, batch)
        with self.own_tokens():
            output = call_model(run, own, has_target=False)
        returned = len(tensors_in(output))
        dims = [dim for dim in self._outputs if dim != LOSS]
        dims = dims if len(dims) == returned else list(self._outputs)
        if len(dims) != returned:
            raise ModelError(
                f"the model returns {returned} tensors, over the sample it returned {len(dims)}:"
                " which of them hold tokens is unknown",
                hints=["use `train_step(batch)`, or give a sample like this batch"],
            )
        kinds = iter(dims)
        return map_tensors(lambda tensor: self._whole(tensor, next(kinds), batch), output)

    def _own(
        self, called: Callable[..., object], batch: Batch
    ) -> tuple[Batch, Callable[..., object]]:
        """The rank's tokens, and what to call with them."""
        axis = self._axis
        own, keywords, self._places = self._way.part(batch, rank=axis.position, size=axis.size)
        return own, functools.partial(called, **keywords)

    def _with_own_tokens(
        self, forward: Callable[..., object], block: nn.Module, *args: Any, **kwargs: Any
    ) -> object:
        with self.own_tokens():
            return forward(*args, **kwargs)

    def own_tokens(self) -> OwnTokens:
        """Inside, the model's code attends to keys of all ranks, at the positions of its tokens."""
        return OwnTokens(self._ring.attention, places=self._places, model=self._model)

    def _weight(self, batch: Batch) -> float:
        """Of this rank's loss, so that the mean over the axis is the loss."""
        size = self._axis.size
        shares = self._way.shares(batch, self._proof.loss, size=size)
        return float(shares[self._axis.position]) * size

    def _whole(self, tensor: Tensor, dim: int | None, batch: Batch) -> Tensor:
        """An output put together; its gradients are counted as those of `loss` are."""
        if dim is None:
            return tensor
        if dim == LOSS:
            self._require_rule(batch)
            whole: Tensor = _Mean.apply(weighted(tensor, self._weight(batch)), self._axis)  # type: ignore[no-untyped-call]
        else:
            whole = _Joined.apply(tensor, self._axis, dim)  # type: ignore[no-untyped-call]
        return whole


class _Joined(torch.autograd.Function):
    """All tokens on every rank. A rank's gradient is that of its own tokens, and as gradients are
    averaged over the axis, it is taken `size` times."""

    @staticmethod
    def forward(ctx: Any, own: Tensor, axis: Axis, dim: int) -> Tensor:
        ctx.axis, ctx.dim = axis, dim
        every = own.new_empty(axis.size * own.shape[0], *own.shape[1:])
        all_gather_single(every, own.contiguous(), group=axis.group)
        return joined(every.chunk(axis.size), dim=dim)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None]:
        axis = ctx.axis
        own = part(gradients[0], rank=axis.position, size=axis.size, dim=ctx.dim)
        return own * axis.size, None, None


class _Mean(torch.autograd.Function):
    """The mean over the axis, on every rank."""

    @staticmethod
    def forward(ctx: Any, own: Tensor, axis: Axis) -> Tensor:
        total = own.clone()
        dist.all_reduce(total, group=axis.group)
        return total / axis.size

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        return gradients[0], None


def _as_batch(model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Batch:
    """The arguments of a call as a batch; by name if any has one."""
    if not kwargs:
        return args
    names = inspect.signature(model.forward).parameters
    return {**dict(zip(names, args, strict=False)), **kwargs}
