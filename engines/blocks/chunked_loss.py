"""Head and cross-entropy together, a chunk of the tokens at a time.

The logits of a chunk are made, their loss and its gradient are computed, and what stays is the
gradient of the head's input and the sum of the gradients of its weight: as in Liger-Kernel
(arXiv:2410.10989, section 3.2) and in torchtune's chunked losses, on torch's own operators. The
backward multiplies both by the gradient of the loss.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Self

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from engines.blocks.logits import AskedLoss, UnmadeLogits
from engines.blocks.wrap import wrap_forward
from engines.plan import Plan
from profiles.errors import ModelError, a_type
from profiles.torch_compat import wrapper_tensor
from profiles.torch_compat.logits import MOVES, NEEDS_GRADIENT, RESHAPES, sizes_of

LossOfRows = Callable[[Tensor, slice], Tensor]
"""The summed loss, 0-d, of the logits (rows, vocabulary) of some rows."""


@dataclass(frozen=True)
class _Head:
    """A product that is not made yet, and what follows it.

    Attributes:
        name: of the module.
        chunks: parts that the rows are taken in.
        dtype: of the product: autocast may compute in another one than the parameters have.
        after: casts and scales of logits, in order.
        hooks: on the gradient of the logits: FSDP2 waits there for the backward.
    """

    name: str
    chunks: int
    dtype: torch.dtype
    after: tuple[Callable[[Tensor], Tensor], ...] = ()
    hooks: tuple[Callable[[Tensor], Tensor | None], ...] = ()

    def logits(self, rows: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        bias = None if bias is None else bias.to(self.dtype)
        return F.linear(rows.to(self.dtype), weight.to(self.dtype), bias)

    def finished(self, logits: Tensor) -> Tensor:
        for func in self.after:
            logits = func(logits)
        return logits


class ChunkedLogits(UnmadeLogits):
    """Logits (..., vocabulary) of which there are the head's input and its parameters.

    Whoever reads them whole for a gradient takes the memory that the plan counts on: that is
    refused. Without a gradient they are made and let go of.
    """

    rows: Tensor
    weight: Tensor
    bias: Tensor | None
    head: _Head

    @classmethod
    def of(
        cls, rows: Tensor, weight: Tensor, bias: Tensor | None, *, chunks: int, name: str = "head"
    ) -> Self:
        """Args:
        rows: the head's input (..., width).
        weight: (vocabulary, width).
        name: of the head, for errors.
        """
        kind = rows.device.type
        is_autocast = torch.is_autocast_enabled(kind)
        dtype = torch.get_autocast_dtype(kind) if is_autocast else rows.dtype
        return cls._of(rows, weight, bias, _Head(name, chunks, dtype), dtype)

    @classmethod
    def _of(
        cls, rows: Tensor, weight: Tensor, bias: Tensor | None, head: _Head, dtype: torch.dtype
    ) -> Self:
        like = rows.new_empty(0, dtype=dtype)
        logits = wrapper_tensor(cls, (*rows.shape[:-1], weight.shape[0]), like)
        logits.rows, logits.weight, logits.bias, logits.head = rows, weight, bias, head
        return logits

    def __repr__(self, *, tensor_contents: Any = None) -> Any:  # type: ignore[override]
        return f"ChunkedLogits({tuple(self.shape)} of `{self.head.name}`)"

    def whole(self) -> Tensor:
        """The logits as the head and the code after it make them."""
        logits = self.head.finished(self.head.logits(self.rows, self.weight, self.bias))
        return _hooked(logits, self.head.hooks)

    def _made_for(self, func: Callable[..., Any]) -> Tensor:
        if torch.is_grad_enabled():
            reader = getattr(func, "__name__", str(func))
            raise ModelError(
                f"`{reader}` reads the whole logits of `{self.head.name}`, which loss_chunks="
                f"{self.head.chunks} makes a part of the tokens at a time",
                hints=[
                    "compute the loss by F.cross_entropy over (tokens, vocabulary), from logits"
                    " that are only cast, scaled, shifted or flattened",
                    "read them inside torch.no_grad() where no gradient is wanted (an accuracy)",
                    "or leave loss_chunks out",
                ],
            )
        return self.whole()

    def _read(
        self, func: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]
    ) -> Any:
        if func is Tensor.register_hook:
            self.head = replace(self.head, hooks=(*self.head.hooks, args[0]))
            return None
        given = [t for t in (self.rows, self.weight, self.bias) if t is not None]
        needs = any(tensor.requires_grad for tensor in given)
        if func is NEEDS_GRADIENT:
            return needs
        return self.rows.grad_fn

    def _applied(
        self, func: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]
    ) -> Self:
        """Rows move as their logits do; values are changed when there are some."""
        if func in MOVES:
            sizes = [*sizes_of(args)[:-1], self.rows.shape[-1]] if func in RESHAPES else None
            rows = func(self.rows, *args, **kwargs) if sizes is None else self.rows.reshape(sizes)
            return self._of(rows, self.weight, self.bias, self.head, self.dtype)
        if func is Tensor.contiguous:
            return self

        def later(logits: Tensor) -> Tensor:
            result: Tensor = func(logits, *args, **kwargs)
            return result

        dtype = later(self.rows.new_empty(0, dtype=self.dtype)).dtype
        head = replace(self.head, after=(*self.head.after, later))
        return self._of(self.rows, self.weight, self.bias, head, dtype)

    def _loss(self, asked: AskedLoss) -> Tensor | None:
        if not asked.is_of_classes or asked.reduction == "none":
            return None

        def loss_of(logits: Tensor, rows: slice) -> Tensor:
            return F.cross_entropy(
                logits,
                asked.target[rows],
                weight=asked.weight,
                ignore_index=asked.ignore_index,
                reduction="sum",
                label_smoothing=asked.label_smoothing,
            )

        total = self.sum_of(loss_of)
        return total if asked.reduction == "sum" else total / asked.terms()

    def sum_of(self, loss_of: LossOfRows) -> Tensor:
        """The sum, 0-d, of the losses of all rows; of logits (tokens, vocabulary)."""
        total: Tensor = _ChunkedSum.apply(self.rows, self.weight, self.bias, self.head, loss_of)  # type: ignore[no-untyped-call]
        return _hooked(total, self.head.hooks)


def _hooked(tensor: Tensor, hooks: Iterable[Callable[[Tensor], Tensor | None]]) -> Tensor:
    for hook in hooks:
        if tensor.requires_grad:
            tensor.register_hook(hook)
    return tensor


class _ChunkedSum(torch.autograd.Function):
    """Sum of the losses of all rows, whose gradients are made with it."""

    @staticmethod
    def forward(
        ctx: Any,
        rows: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        head: _Head,
        loss_of: LossOfRows,
    ) -> Tensor:
        wants_rows, wants_weight, wants_bias = ctx.needs_input_grad[:3]
        of_weight, of_bias = (
            _zeros(p) if wanted and p is not None else None
            for p, wanted in ((weight, wants_weight), (bias, wants_bias))
        )
        of_rows = torch.empty_like(rows) if wants_rows else None
        cast = weight.detach().to(head.dtype)
        bias = None if bias is None else bias.detach()
        count = len(rows)
        size = max(1, -(-count // head.chunks))
        total = None
        for start in range(0, max(1, count), size):
            part = slice(start, start + size)
            own = rows[part].detach().to(head.dtype)
            loss, gradient = _with_gradient(head, own.requires_grad_(), cast, bias, part, loss_of)
            total = loss if total is None else total + loss
            if of_rows is not None:
                of_rows[part] = gradient @ cast
            if of_weight is not None:
                _add_product(of_weight, gradient, own)
            if of_bias is not None:
                of_bias += gradient.sum(0)
            del gradient
        assert total is not None
        ctx.gradients = of_rows, of_weight, of_bias
        ctx.dtypes = [None if p is None else p.dtype for p in (rows, weight, bias)]
        return total

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        if ctx.gradients is None:
            raise RuntimeError(
                "Trying to backward through a chunked loss a second time: its gradients are freed"
                " by the first backward"
            )
        made, ctx.gradients = ctx.gradients, None
        scaled = (
            None if gradient is None else gradient.mul_(gradients[0]).to(dtype)
            for gradient, dtype in zip(made, ctx.dtypes, strict=True)
        )
        return (*scaled, None, None)


def _with_gradient(
    head: _Head,
    rows: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    part: slice,
    loss_of: LossOfRows,
) -> tuple[Tensor, Tensor]:
    """The loss of a chunk, and its gradient by logits: those are let go of where the loss does."""
    with torch.enable_grad():
        logits = head.logits(rows, weight, bias)
        place = torch.autograd.graph.get_gradient_edge(logits)
        finished = head.finished(logits)
        del logits
        loss = loss_of(finished, part)
        del finished
    (gradient,) = torch.autograd.grad(loss, place)
    return loss.detach(), gradient


def _zeros(parameter: Tensor) -> Tensor:
    """For the gradient of a sum over all tokens, which is too large for fp16."""
    dtype = torch.promote_types(parameter.dtype, torch.bfloat16)  # fp32 of fp16, else itself
    return torch.zeros(parameter.shape, dtype=dtype, device=parameter.device)


def _add_product(total: Tensor, gradient: Tensor, rows: Tensor) -> None:
    """Add a chunk's gradient of the weight, without a second one in memory where dtypes allow."""
    if total.dtype == gradient.dtype:
        total.addmm_(gradient.T, rows)
    else:
        total += gradient.T @ rows


def chunk_loss(model: nn.Module, plan: Plan, head: str) -> None:
    """Let the logits of `head` be made a part of the tokens at a time, in place.

    Raises:
        ModelError: it is no plain linear layer.
    """
    module = model.get_submodule(head)
    if not isinstance(module, nn.Linear) or type(module).forward is not nn.Linear.forward:
        raise ModelError(
            f"`{head}` is {a_type(module)}: loss_chunks={plan.loss_chunks} computes the"
            " product of an nn.Linear",
            where=f"plan: {plan}",
            hints=["leave loss_chunks out"],
        )

    def run(forward: Callable[..., object], head_: nn.Module, *args: Any, **kwargs: Any) -> object:
        (rows,) = (*args, *kwargs.values())
        weight, bias = head_.get_parameter("weight"), head_._parameters.get("bias")
        learns = rows.requires_grad or weight.requires_grad
        if not torch.is_grad_enabled() or not learns:
            return forward(rows)
        return ChunkedLogits.of(rows, weight, bias, chunks=plan.loss_chunks, name=head)

    wrap_forward(module, run)
