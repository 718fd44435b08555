"""Replay of a segment of the model's own forward, from received values to sent ones."""

from __future__ import annotations

import traceback
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from engines.blocks.logits import whole_tensors
from engines.pipeline.hooks import UserHooks
from engines.pipeline.recording import (
    PART,
    RecordedCall,
    Recording,
    ReturnedObject,
    ReturnedParameter,
    ReturnedTensor,
    intercepted,
)
from engines.pipeline.segments import Segment, unit_calls
from profiles.capture.frames import model_line, summary
from profiles.errors import AdvisorError, ModelError
from profiles.model.flow import Flow, Key, Terms
from profiles.torch_compat import flatten, tensors_in, unflatten
from profiles.torch_compat.checkpoint import checkpoints_only


class _SegmentEnd(BaseException):
    """End of the forward after the segment's last call; no `except Exception` catches it."""


class _Border(torch.autograd.Function):
    """A tensor across a border, and its gradient back.

    Neither a leaf, so that it may be sent on, nor a view, because zero-bubble schedules detach sent
    tensors in place. Contiguous both ways, as gloo wants it: the gradient of a `cat` is not.
    """

    @staticmethod
    def forward(ctx: object, tensor: Tensor) -> Tensor:
        return tensor.contiguous().data

    @staticmethod
    def backward(ctx: object, *gradients: Tensor) -> Tensor:
        return gradients[0].contiguous()


def _is_of_model(error: Exception) -> bool:
    """True if the model's code raised it, or an operator there: not a collective, nor a rule."""
    if isinstance(error, AdvisorError | torch.OutOfMemoryError):
        return False
    *_, (frame, _) = traceback.walk_tb(error.__traceback__)
    path = Path(frame.f_code.co_filename)
    return not any(map(path.is_relative_to, _NO_MODEL))


_NO_MODEL = (Path(dist.__file__).parent, Path(__file__).parents[1])


def _over_border(tensor: Tensor) -> Tensor:
    crossed: Tensor = _Border.apply(tensor)  # type: ignore[no-untyped-call]
    return crossed


class Replay:
    """Runs calls [first, last) of `segment`; code between units, residual sums say, runs anew.

    Earlier calls whose result depends on parameters are stubs: they return what was received, or
    zeros of the recorded shape where nothing of this segment needs it. Those that follow from the
    batch alone (rotary tables, masks) simply run. Random numbers that code between units draws are
    drawn on every stage.

    Values that only their sum is needed of are received as that, in place of the last of them; the
    others are zeros, so that the code between units adds up the same.

    A value that later code changes in place is copied when it is received and when it is sent, so
    that it crosses as the call returned it and every stage repeats the change.
    """

    def __init__(
        self,
        model: nn.Module,
        segment: Segment,
        *,
        flow: Flow,
        recording: Recording,
        hooks: UserHooks,
        device: torch.device,
    ) -> None:
        self.segment = segment
        self._hooks = hooks
        self.device = device
        self._model = model
        self._flow = flow
        self._recording = recording
        self._units = tuple(dict.fromkeys(call.unit for call in recording.calls))
        self._terms = {key for terms in segment.sent for key in terms}
        self._last_own = max(n for n in unit_calls(flow) if n < segment.last)
        self._stubs = frozenset(
            call.number
            for call in recording.calls
            if call.number < segment.first
            and any(value.depends_on_parameters for value in flow.calls[call.number].values)
        )
        self._require_stubs()

    def run(self, received: Sequence[Tensor], forward: Callable[[], object]) -> object:
        """The values that the segment sends on, contiguous; of the last one the model's output.

        Args:
            received: tensors of `segment.received`.
            forward: calls the model on the microbatch.

        Raises:
            ModelError: the forward takes another path than the recorded one.
        """
        crossed = map(_over_border, received)
        keys = (terms[-1] for terms in self.segment.received)
        arrivals = dict(zip(keys, crossed, strict=True))
        produced: dict[Key, Tensor] = {}
        calls = iter(self._recording.calls)
        coming = next(calls, None)
        is_within = False

        def replacement(name: str, own: Callable[..., object], args: Any, kwargs: Any) -> object:
            nonlocal coming, is_within
            call, coming = coming, next(calls, None)
            if call is None or call.unit != name:
                raise ModelError(
                    f"the forward calls `{name}` where it called"
                    f" `{call.unit if call else 'nothing more'}` when it was recorded",
                    hints=["a pipeline needs a forward that takes the same path for equal shapes"],
                )
            if call.number in self._stubs:
                return self._hooks.show(
                    name, args, kwargs, self._stub(call, arrivals, (args, kwargs))
                )
            is_within = True  # until it returns: what it raises is its own
            output = own(*args, **kwargs)
            is_within = False
            self._note_sent(call.number, output, produced)
            if call.number == self._last_own and not self.segment.is_last:
                raise _SegmentEnd
            return output

        def is_own() -> bool:
            return coming is None or coming.number >= self.segment.first

        try:
            # A checkpoint that begins earlier would run units of other stages in the backward.
            with intercepted(self._model, self._units, replacement), checkpoints_only(is_own):
                output = forward()
        except _SegmentEnd:
            known = arrivals | produced
            return tuple(self._value_to_send(terms, known) for terms in self.segment.sent)
        except Exception as error:
            if self._stubs and not is_within and _is_of_model(error):
                raise self._without_earlier_units(error) from error
            raise
        if coming is not None:
            raise ModelError(
                f"the forward ends before it calls `{coming.unit}`, as it did when it was recorded",
                hints=["a pipeline needs a forward that takes the same path for equal shapes"],
            )
        return output

    def _without_earlier_units(self, error: Exception) -> ModelError:
        return ModelError(
            f"the forward raised {summary(error)} on the stage that begins with"
            f" `{self._flow.calls[self.segment.first].unit}`",
            where=model_line(error),
            hints=[
                "units of earlier stages are not run there: what code takes from within their calls"
                " (by hooks of modules inside, or lists that they fill) is missing",
                "move the border (`stages=`), or set pp=1",
            ],
        )

    def _stub(self, call: RecordedCall, arrivals: Mapping[Key, Tensor], inputs: object) -> object:
        arguments, _ = flatten(inputs)

        def leaf(recorded: object) -> object:
            if isinstance(recorded, ReturnedParameter):
                parameter = self._model.get_parameter(recorded.name)
                if recorded.name in self.segment.parameters:
                    return recorded.of(parameter)
                return recorded.blank(parameter, self.device)
            if isinstance(recorded, ReturnedTensor):
                arrived = arrivals.get((call.number, recorded.value))
                if arrived is not None:
                    return self._as_recorded(call.number, recorded, arrived)
            if (
                isinstance(recorded, ReturnedTensor | ReturnedObject)
                and recorded.argument is not None
            ):
                return arguments[recorded.argument]
            return recorded.blank(self.device) if isinstance(recorded, ReturnedTensor) else recorded

        return unflatten([leaf(recorded) for recorded in call.leaves], call.structure)

    def _as_recorded(self, number: int, made: ReturnedTensor, tensor: Tensor) -> Tensor:
        """The received tensor in the recorded layout, safe to be written to."""
        if tensor.stride() != made.stride:
            return replace(made, dtype=tensor.dtype).blank(self.device).copy_(tensor)
        return tensor.clone() if self._is_overwritten(number, made.value) else tensor

    def _note_sent(self, number: int, output: object, produced: dict[Key, Tensor]) -> None:
        """The tensors of a call's output that are sent on, as they are now."""
        for value, tensor in enumerate(tensors_in(output)):
            if (number, value) in self._terms:
                is_changed = self._is_overwritten(number, value)
                produced[number, value] = tensor.clone() if is_changed else tensor

    def _value_to_send(self, terms: Terms, known: Mapping[Key, Tensor]) -> Tensor:
        """A value to send, or a sum, whole, in the recorded dtype: autocast goes by lists of
        operations, one for each kind of device, and recordings are made on a CPU.

        Args:
            known: what the segment's calls returned, and what it received; of the terms of a
                received sum, the last.
        """
        first, *others = (whole_tensors(known[key]) for key in terms if key in known)
        value: Tensor = sum(others, start=first)
        return _over_border(value.to(self._recording.sum_of(terms).dtype))

    def _is_overwritten(self, number: int, value: int) -> bool:
        return self._flow.calls[number].values[value].is_overwritten

    def _require_stubs(self) -> None:
        """Require that stubs can return everything: tensors, arguments and plain values."""
        for call in self._recording.calls:
            if call.number not in self._stubs:
                continue
            objects = [leaf for leaf in call.leaves if isinstance(leaf, ReturnedObject)]
            unknown = next((leaf.kind for leaf in objects if leaf.argument is None), None)
            if unknown is not None:
                instead = "tensors, or switch the cache off (`use_cache=False`)"
                raise ModelError(
                    f"`{call.unit}` returns a {unknown}, which cannot be sent to stage"
                    f" {self.segment.index}, after it",
                    hints=[f"let it return {'its `.clone()`' if unknown == PART else instead}"],
                )
