"""Trial of stages on some rows: each computes what the whole model does, without the others' units.

Tensors that units hand to each other are followed (`profiles.model.flow`). Numbers, lists and
objects that one unit changes and another one, or code between units, computes with are not: a rank
that does not run the one has old ones. So a copy of the model runs as each stage would.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from operator import is_
from typing import Any

import torch
from torch import Tensor, nn

from engines.blocks.forward_state import ForwardState
from engines.data.loss_parts import few_rows, fill_zeros, random_state
from engines.pipeline.recording import intercepted
from engines.pipeline.segments import Segment, segments_of, unit_calls
from engines.plan import Plan
from profiles.capture.batch.call import Batch, LossFn, call_model, loss_of
from profiles.capture.batch.tree import map_batch
from profiles.capture.fakes.code_states import generators_of
from profiles.capture.fakes.tensors import stand_ins
from profiles.capture.frames import summary
from profiles.errors import PlanError
from profiles.model.flow import Flow
from profiles.model.profile import ModelProfile
from profiles.torch_compat import flatten, is_batch_norm, unflatten

log = logging.getLogger(__name__)

_DROPOUT = (nn.Dropout, nn.Dropout1d, nn.Dropout2d, nn.Dropout3d, nn.AlphaDropout)
FORWARDS = 2
"""The second one sees what the first one left."""
TOLERANCE = 1e-4
"""Of sums in another order; a count that is off by one changes the first digits."""


def require_own_units_suffice(
    model: nn.Module, plan: Plan, sample: Batch, loss_fn: LossFn | None, *, profile: ModelProfile
) -> None:
    """Refuse stages whose units compute with what units of other stages change.

    Nothing is refused where nothing can be seen: see `few_rows`.

    Raises:
        PlanError: with the first call that computes something else.
    """
    batch = few_rows(model, sample, profile)
    if batch is None:
        return
    trial = _Trial(model, profile.flow, batch, loss_fn)
    try:
        whole = trial.run()
        if whole.draws:
            trial.is_training = False
            whole = trial.run()
    except Exception as error:  # of the user's code: not on a CPU, or no loss in eval mode
        log.info("stages are not tried: %s", summary(error))
        return
    if whole.draws or not (whole.changes or whole.changes_given or whole.is_another_again):
        return
    for segment in segments_of(plan, profile.flow, model):
        try:
            alone = trial.run(segment, whole)
        except Exception as error:  # of code that lacks something: the step will say so
            if whole.changes_given:
                what = f"the forward, which raises {summary(error)},"
                raise _depends_on_others(what, segment, plan) from error
            log.info("stage %d is not tried: %s", segment.index, summary(error))
            continue
        if (unlike := alone.first_unlike(whole)) is not None:
            raise _depends_on_others(unlike, segment, plan)


def _depends_on_others(what: str, segment: Segment, plan: Plan) -> PlanError:
    index = segment.index
    stage = f"stage that begins with `{plan.stages[index - 1]}`" if index else "first stage"
    return PlanError(
        f"{what} is another one on the {stage} than in the whole model: it depends on"
        " numbers, lists or objects that units of other stages change, and those do not run there",
        where=f"plan: {plan}",
        hints=[
            "hand it on in tensors that units return; or compute it from the batch, or in the"
            " module that uses it",
            "or replicate or shard: dp_replicate, dp_shard",
        ],
    )


class _Argument(int):
    """Number of the argument that a call returned."""


@dataclass(slots=True)
class _Ran:
    """Outputs of calls in each forward of a run, and losses.

    Attributes:
        draws: random numbers were drawn.
        changes: the forward changes what modules keep.
        changes_given: units change lists, dicts or objects that they are given.
    """

    calls: list[dict[int, tuple[str, list[object], object]]] = field(default_factory=list)
    losses: list[Tensor] = field(default_factory=list)
    draws: bool = False
    changes: bool = False
    changes_given: bool = False

    @property
    def is_another_again(self) -> bool:
        """True if the second forward computed something else: code has a state of its own, in a
        global or a closure."""
        each = zip(self.calls, self.losses, strict=True)
        first, second = (_Ran([calls], [loss]) for calls, loss in each)
        return second.first_unlike(first) is not None

    def first_unlike(self, whole: _Ran) -> str | None:
        """The first output that is not that of the whole model."""
        for own, theirs in zip(self.calls, whole.calls, strict=True):
            for number, (unit, leaves, _) in own.items():
                if not all(map(_is_alike, leaves, theirs[number][1])):
                    return f"the output of `{unit}`"
        return None if all(map(_is_alike, self.losses, whole.losses)) else "the loss"


def _is_alike(one: object, other: object) -> bool:
    if not isinstance(one, Tensor) or not isinstance(other, Tensor):
        return True
    if one.shape != other.shape or not one.is_floating_point():
        return torch.equal(one, other)
    largest = float(other.detach().abs().max()) if other.numel() else 0.0
    return torch.allclose(one, other, rtol=TOLERANCE, atol=TOLERANCE * largest, equal_nan=True)


class _SegmentEnd(BaseException):
    """End of a stage's forward, after its last call."""


@dataclass(slots=True)
class _Trial:
    """Runs of copies of `model` on the CPU. Batch norms and dropout are in eval mode."""

    model: nn.Module
    flow: Flow
    batch: Batch
    loss_fn: LossFn | None
    is_training: bool = True

    def run(self, segment: Segment | None = None, known: _Ran | None = None) -> _Ran:
        """The whole model, or the stage of `segment` with the `known` outputs of earlier units."""
        ran, loss_fn = _Ran(), self.loss_fn
        runs = [self.model] if loss_fn is None else [self.model, loss_fn]
        units = list(dict.fromkeys(self.flow.calls[n].unit for n in unit_calls(self.flow)))
        with (
            torch.inference_mode(False),
            torch.enable_grad(),
            stand_ins(runs, copies=True) as fakes,
        ):
            for module in self.model.modules():
                is_left = is_batch_norm(module) or isinstance(module, _DROPOUT)
                module.training &= self.is_training and not is_left
            fill_zeros(self.model)
            given = map_batch(fakes.of, self.batch)
            drawn_from = generators_of(runs)
            before, state = random_state(drawn_from), ForwardState(list(self.model.modules()))
            for number in range(FORWARDS):
                call = self._call(ran, segment, known.calls[number] if known else {})
                try:
                    with (
                        intercepted(self.model, units, call),
                        state.first() if segment is None and not number else nullcontext(),
                    ):
                        output = call_model(self.model, given, has_target=loss_fn is not None)
                except _SegmentEnd:
                    continue
                if segment is None or segment.is_last:
                    ran.losses.append(loss_of(output, given, loss_fn).detach())
            ran.draws, ran.changes = before != random_state(drawn_from), state.is_changed
        return ran

    def _call(
        self, ran: _Ran, segment: Segment | None, known: dict[int, tuple[str, list[object], object]]
    ) -> Callable[[str, Callable[..., object], Any, Any], object]:
        """The function in the place of calls in one forward."""
        flow, seen = self.flow, dict[int, tuple[str, list[object], object]]()
        ran.calls.append(seen)
        numbers = iter(unit_calls(flow))
        last = max((n for n in unit_calls(flow) if segment and n < segment.last), default=-1)

        def call(unit: str, own: Callable[..., object], args: Any, kwargs: Any) -> object:
            number, arguments = next(numbers), flatten((args, kwargs))[0]
            is_earlier = segment is not None and number < segment.first
            if is_earlier and any(v.depends_on_parameters for v in flow.calls[number].values):
                _, leaves, structure = known[number]
                return unflatten([_given(leaf, arguments) for leaf in leaves], structure)
            state = ForwardState([], given=arguments)
            with state.first():
                output = own(*args, **kwargs)
            ran.changes_given |= state.is_changed or not _has_same((args, kwargs), arguments)
            leaves, structure = flatten(output)
            seen[number] = unit, [_kept(leaf, arguments) for leaf in leaves], structure
            if segment is not None and number == last and not segment.is_last:
                raise _SegmentEnd
            return output

        return call


def _has_same(given: object, arguments: Sequence[object]) -> bool:
    """True if lists and dicts that a call was given hold the same `arguments` after it."""
    leaves, _ = flatten(given)
    return len(leaves) == len(arguments) and all(map(is_, leaves, arguments))


def _kept(leaf: object, arguments: Sequence[object]) -> object:
    """A leaf of an output as it is now: later code may change a tensor in place."""
    place = next((n for n, argument in enumerate(arguments) if argument is leaf), None)
    if not isinstance(leaf, Tensor):
        return leaf
    return _Argument(place) if place is not None else _alone(leaf)


def _given(leaf: object, arguments: Sequence[object]) -> object:
    if isinstance(leaf, _Argument):
        return arguments[leaf]
    return _alone(leaf) if isinstance(leaf, Tensor) else leaf


def _alone(tensor: Tensor) -> Tensor:
    return tensor.detach().clone().requires_grad_(tensor.requires_grad)
