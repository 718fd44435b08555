"""Records the inputs of a model's units, call by call, and makes like ones on a device."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from profiles.capture.batch.call import Batch, LossFn, call_model
from profiles.capture.batch.tree import batch_tensors, map_batch
from profiles.capture.fakes.known_values import known_values
from profiles.capture.fakes.mode import FakeRunMode
from profiles.capture.fakes.tensors import stand_ins
from profiles.capture.frames import summary
from profiles.capture.module.units import Unit, find_units
from profiles.errors import AdvisorError, ModelError
from profiles.model.profile import LOSS, Numerics
from profiles.torch_compat import map_leaves, map_tensors


@dataclass(frozen=True)
class Spec:
    """A tensor as a unit is given it. `of_sample`: which tensor of the sample it is, for integers
    whose values mean something (token ids)."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    requires_grad: bool
    of_sample: int | None


@dataclass
class CallSpec:
    """One call of a unit: its arguments with tensors replaced by `Spec`s."""

    args: Any
    kwargs: Any

    def key(self) -> str:
        return repr((self.args, self.kwargs))


def calls_of(
    model: nn.Module, sample: Batch, loss_fn: LossFn | None
) -> tuple[dict[str, list[CallSpec]], dict[str, str]]:
    """The outermost calls of every unit, and of the loss; and units that call each other."""
    calls_by_unit: dict[str, list[CallSpec]] = {}
    left_out: dict[str, str] = {}
    inside: list[str] = []
    numbers: dict[int, int] = {}

    def spec(tensor: Tensor) -> Any:
        is_float = tensor.is_floating_point()
        number = None if is_float else numbers.get(id(tensor))
        return Spec(tuple(tensor.shape), tensor.dtype, tensor.requires_grad, number)

    def before(unit: Unit) -> Callable[..., None]:
        def hook(module: nn.Module, args: Any, kwargs: Any) -> None:
            if inside:
                left_out.setdefault(unit.name, f"it is called inside `{inside[-1]}`")
                left_out.setdefault(inside[-1], f"it calls `{unit.name}`")
            calls_by_unit.setdefault(unit.name, []).append(
                CallSpec(*map_tensors(spec, (args, kwargs)))
            )
            inside.append(unit.name)

        return hook

    def after(*_: object) -> None:
        inside.pop()

    runs = [model] if loss_fn is None else [model, loss_fn]
    with (
        torch.inference_mode(False),
        torch.enable_grad(),
        stand_ins(runs) as fakes,
    ):
        batch = map_batch(lambda tensor: fakes.of(tensor), sample)
        numbers |= {id(fakes.of(t)): number for number, t in enumerate(batch_tensors(sample))}
        for unit in find_units(model):
            unit.module.register_forward_pre_hook(before(unit), with_kwargs=True)
            unit.module.register_forward_hook(after, always_call=True)
        try:
            with FakeRunMode(known_values(fakes, sample, batch)).on(batch):
                output = call_model(model, batch, has_target=loss_fn is not None)
        except AdvisorError:
            raise
        except Exception as error:
            raise ModelError(
                f"`{type(model).__name__}` does not run on the sample: {summary(error)}"
            ) from error
        if loss_fn is not None:
            target = batch if isinstance(batch, Mapping) else batch[-1]
            calls_by_unit[LOSS] = [CallSpec(*map_tensors(spec, ((output, target), {})))]
    return {name: calls for name, calls in calls_by_unit.items() if name not in left_out}, left_out


def inputs_of(
    call: CallSpec, sample: Batch, device: torch.device, numerics: Numerics
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Random tensors of the recorded shapes; token ids are the sample's."""
    given = batch_tensors(sample)

    def make(leaf: object) -> object:
        return _tensor(leaf, given, device, numerics) if isinstance(leaf, Spec) else leaf

    return map_leaves(make, (call.args, call.kwargs))


def _tensor(
    spec: Spec, given: Sequence[Tensor], device: torch.device, numerics: Numerics
) -> Tensor:
    if spec.dtype.is_floating_point:
        is_cast = numerics is Numerics.BF16 and spec.dtype == torch.float32
        dtype = torch.bfloat16 if is_cast else spec.dtype
        made = torch.randn(spec.shape, device=device).to(dtype)
        return made.requires_grad_(spec.requires_grad)
    known = [tensor for tensor in given if _may_be(spec, tensor)]
    if spec.of_sample is not None and not given[spec.of_sample].is_meta:
        known.insert(0, given[spec.of_sample])
    if known:
        return known[0].to(device)
    return torch.zeros(spec.shape, dtype=spec.dtype, device=device)


def _may_be(spec: Spec, tensor: Tensor) -> bool:
    """True if the unit's input could be a view or copy of this tensor of the sample: an index into
    a table, or a mask."""
    is_alike = tuple(tensor.shape) == spec.shape and tensor.dtype == spec.dtype
    return is_alike and not tensor.is_meta and bool((tensor >= 0).all())
