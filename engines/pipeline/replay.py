"""A part of the model's own forward: what came before is given, what comes after never runs."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from engines.pipeline.hooks import UserHooks
from engines.pipeline.parts import Key, Part, unit_calls
from engines.pipeline.recording import Made, Opaque, Recording, Returned, intercepted
from profiles.errors import ModelError
from profiles.flow import Flow
from profiles.torch_compat import flatten, tensors_in, unflatten


class _PartEnd(BaseException):
    """Ends the forward after the part's last call; no `except Exception` of a model stops it."""


class _Border(torch.autograd.Function):
    """The same tensor on the other side of a border, and its gradient on the way back.

    Neither a leaf, so that it may be passed on, nor a view, because zero-bubble schedules detach
    what was sent in place. Contiguous both ways, as gloo wants it: the gradient of a `cat` is not.
    """

    @staticmethod
    def forward(ctx: object, tensor: Tensor) -> Tensor:
        return tensor.contiguous().data

    @staticmethod
    def backward(ctx: object, *gradients: Tensor) -> Tensor:
        return gradients[0].contiguous()


def _over_border(tensor: Tensor) -> Tensor:
    crossed: Tensor = _Border.apply(tensor)  # type: ignore[no-untyped-call]
    return crossed


class Replay:
    """Runs calls [first, last) of `part`; code between units, residual sums say, runs anew.

    Earlier calls whose result depends on parameters are stubs: they return what was received, or
    zeros of the recorded shape where nothing of this part needs it. Those that follow from the
    batch alone (rotary tables, masks) simply run. Random numbers that code between units draws are
    drawn on every stage.

    A value that later code changes in place is copied when it arrives and when it is handed on, so
    that it crosses as the call made it and every stage repeats the change for itself.
    """

    def __init__(
        self,
        model: nn.Module,
        part: Part,
        *,
        flow: Flow,
        recording: Recording,
        hooks: UserHooks,
        device: torch.device,
    ) -> None:
        self.part = part
        self._hooks = hooks
        self.device = device
        self._model = model
        self._flow = flow
        self._recording = recording
        self._units = tuple(dict.fromkeys(call.unit for call in recording.calls))
        self._last_own = max(n for n in unit_calls(flow) if n < part.last)
        self._stubs = frozenset(
            call.number
            for call in recording.calls
            if call.number < part.first
            and any(value.depends_on_parameters for value in flow.calls[call.number].values)
        )
        self._require_stubs()

    def run(self, received: Sequence[Tensor], forward: Callable[[], object]) -> object:
        """The values that the segment sends on, contiguous; of the last one the model's output.

        Args:
            received: tensors of `part.received`.
            forward: calls the model on the microbatch.

        Raises:
            ModelError: the forward takes another path than the recorded one.
        """
        arrivals = map(_over_border, received)
        given = dict(zip(self.part.received, arrivals, strict=True))
        produced: dict[Key, Tensor] = {}
        calls = iter(self._recording.calls)

        def instead(name: str, own: Callable[..., object], args: Any, kwargs: Any) -> object:
            call = next(calls, None)
            if call is None or call.unit != name:
                raise ModelError(
                    f"the forward calls `{name}` where it called"
                    f" `{call.unit if call else 'nothing more'}` when it was recorded",
                    hints=["a pipeline needs a forward that takes the same path for equal shapes"],
                )
            if call.number in self._stubs:
                return self._hooks.show(name, args, kwargs, self._stub(call, given, (args, kwargs)))
            output = own(*args, **kwargs)
            self._keep(call.number, output, produced)
            if call.number == self._last_own and not self.part.is_last:
                raise _PartEnd
            return output

        try:
            with intercepted(self._model, self._units, instead):
                output = forward()
        except _PartEnd:
            return tuple(self._handed_on(key, produced, given) for key in self.part.sent)
        left = next(calls, None)
        if left is not None:
            raise ModelError(
                f"the forward ends before it calls `{left.unit}`, as it did when it was recorded",
                hints=["a pipeline needs a forward that takes the same path for equal shapes"],
            )
        return output

    def _stub(self, call: Returned, given: Mapping[Key, Tensor], inputs: object) -> object:
        arguments, _ = flatten(inputs)

        def leaf(recorded: object) -> object:
            if isinstance(recorded, Made):
                arrived = given.get((call.number, recorded.value))
                if arrived is not None:
                    return self._arrived(call.number, recorded, arrived)
            if isinstance(recorded, Made | Opaque) and recorded.argument is not None:
                return arguments[recorded.argument]
            return recorded.blank(self.device) if isinstance(recorded, Made) else recorded

        return unflatten([leaf(recorded) for recorded in call.leaves], call.structure)

    def _arrived(self, number: int, made: Made, tensor: Tensor) -> Tensor:
        """Laid out as it was made, and safe to be written to."""
        if tensor.stride() != made.stride:
            return made.blank(self.device).copy_(tensor)
        return tensor.clone() if self._is_overwritten(number, made.value) else tensor

    def _keep(self, number: int, output: object, produced: dict[Key, Tensor]) -> None:
        """The tensors of a call's output that are sent on, as they are now."""
        for value, tensor in enumerate(tensors_in(output)):
            if (number, value) in self.part.sent:
                is_changed = self._is_overwritten(number, value)
                produced[number, value] = tensor.clone() if is_changed else tensor

    def _handed_on(
        self, key: Key, produced: Mapping[Key, Tensor], given: Mapping[Key, Tensor]
    ) -> Tensor:
        """In the recorded dtype: autocast goes by lists of operations, one for each kind of device,
        and recordings are made on a CPU."""
        made = self._recording.made(key)
        return _over_border((produced[key] if key in produced else given[key]).to(made.dtype))

    def _is_overwritten(self, number: int, value: int) -> bool:
        return self._flow.calls[number].values[value].is_overwritten

    def _require_stubs(self) -> None:
        """A stub cannot make what is neither a tensor of its own, an argument, nor plain."""
        for call in self._recording.calls:
            if call.number not in self._stubs:
                continue
            objects = [leaf for leaf in call.leaves if isinstance(leaf, Opaque)]
            unknown = next((leaf.kind for leaf in objects if leaf.argument is None), None)
            if unknown is not None:
                raise ModelError(
                    f"`{call.unit}` returns a {unknown}, which cannot be sent to stage"
                    f" {self.part.index}, after it",
                    hints=["let it return tensors, or switch the cache off (`use_cache=False`)"],
                )
