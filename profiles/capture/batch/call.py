"""The call of a model and of a loss on a batch. All engines use this definition.

A batch is a tensor, a tuple (inputs..., target), a mapping of keyword arguments, or any other
object that is the model's only argument. What may be inside, and what of it has rows, is said by
`batch_tree` and `batch_dims`.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from typing import Any, TypeAlias

from torch import Tensor, nn

from profiles.capture.batch.tree import Batch as Batch
from profiles.capture.batch.tree import describe
from profiles.errors import BatchError, ModelError, a_type

LossFn: TypeAlias = Callable[..., Tensor]


def call_model(
    model: Callable[..., object],
    batch: Batch,
    *,
    has_target: bool,
    forward: Callable[..., object] | None = None,
) -> object:
    """The model's output: `model(x)`, `model(*inputs)` or `model(**batch)`.

    A mapping is passed whole where the forward takes one argument and none of the keys. With a loss
    function, keys that the forward does not take are for the loss alone.

    Args:
        has_target: there is a loss function; the last element of a tuple is for it alone.
        forward: whose arguments count, where `model` is not the module itself.

    Raises:
        BatchError: there should be a target, and the batch has no place for one.
    """
    inputs = tuple(batch) if isinstance(batch, tuple | list) else (batch,)
    if has_target and isinstance(batch, tuple | list | Tensor):
        if isinstance(batch, Tensor) or len(batch) < 2:
            raise BatchError(
                f"loss_fn needs a target, the batch has none ({describe(batch)})",
                hints=["give (inputs..., target), or leave loss_fn out"],
            )
        inputs = inputs[:-1]
    if len(inputs) == 1 and isinstance(inputs[0], Mapping):
        own = forward or (model.forward if isinstance(model, nn.Module) else model)
        keywords = _keywords(own, inputs[0], has_loss_fn=has_target)
        if keywords is not None:
            return model(**keywords)
    return model(*inputs)


def _keywords(
    forward: Callable[..., object], given: Mapping[Any, Any], *, has_loss_fn: bool
) -> Mapping[str, Any] | None:
    """The items that are keyword arguments of `forward`; None where it takes the mapping whole."""
    if not all(isinstance(key, str) for key in given):
        return None
    signature = inspect.signature(forward)
    if _binds(signature, **given):
        return given
    kinds = {name: parameter.kind for name, parameter in signature.parameters.items()}
    by_name = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
    taken = {key: value for key, value in given.items() if kinds.get(key) in by_name}
    if not taken and _binds(signature, given):
        return None
    return taken if has_loss_fn and taken and _binds(signature, **taken) else given


def _binds(signature: inspect.Signature, *args: object, **kwargs: object) -> bool:
    try:
        signature.bind(*args, **kwargs)
    except TypeError:
        return False
    return True


def target_of(batch: Batch) -> Any:
    """The last element of a tuple, else the whole batch: a loss function compares the output with
    it."""
    return batch[-1] if isinstance(batch, tuple | list) else batch


def loss_of(output: object, batch: Batch, loss_fn: LossFn | None) -> Tensor:
    """The scalar loss: `loss_fn(output, target)`, or what the model computed itself.

    With a batch that is no tuple the call is `loss_fn(output, batch)`.

    Raises:
        ModelError: no loss_fn and no loss in the output, or the loss is not one number.
    """
    loss = find_loss(output) if loss_fn is None else loss_fn(output, target_of(batch))
    if loss is None:
        raise ModelError(
            f"the model returns no loss (its output is {a_type(output)})",
            hints=["give loss_fn, as in loss_fn(output, target)"],
        )
    if not isinstance(loss, Tensor) or loss.numel() != 1:
        shown = tuple(loss.shape) if isinstance(loss, Tensor) else type(loss).__name__
        raise ModelError(
            f"the loss is {shown}, it must be one number",
            hints=["let it be the mean over the batch"],
        )
    return loss


def with_gradient(loss: Tensor) -> Tensor:
    """The loss of a step.

    Raises:
        ModelError: nothing that is trained is in it.
    """
    if not loss.requires_grad:
        raise ModelError(
            "the loss has no gradient for any trained parameter",
            hints=["leave out `detach()`, `no_grad()` and rounding between parameters and loss"],
        )
    return loss


def find_loss(output: object) -> Tensor | None:
    """The loss in a model's output: a scalar, `output.loss`, `output["loss"]` or the scalar that a
    tuple begins with; else None."""
    if isinstance(output, Tensor):
        return output if output.ndim == 0 else None
    if isinstance(output, tuple | list) and not hasattr(output, "loss"):
        return find_loss(output[0]) if output and isinstance(output[0], Tensor) else None
    loss = output.get("loss") if isinstance(output, Mapping) else getattr(output, "loss", None)
    return loss if isinstance(loss, Tensor) else None
