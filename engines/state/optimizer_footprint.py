"""States, traffic and temporaries of an optimizer, measured by letting it step.

It steps on fake copies of the model's own parameters, which have shapes and no memory. Where it
cannot step those it steps on one tiny matrix.
"""

from __future__ import annotations

import logging
import weakref
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from itertools import chain
from typing import Any

import torch
from torch import Tensor, nn

from engines.state.compensated_adamw import CompensatedAdamW
from engines.state.optimizer_parts import Given, indivisible, tiny, trial_with
from profiles.capture.fakes.tensors import Fakes
from profiles.capture.frames import summary
from profiles.capture.operators.table import flop_formulas, launches, moved_bytes
from profiles.errors import InputError
from profiles.model.profile import GLUE
from profiles.torch_compat import (
    Operator,
    TorchDispatchMode,
    scalar_query,
    storage_of,
    tensors_in,
    tensors_written,
)
from profiles.torch_compat.fakes import fake_tensors
from profiles.workload.optimizers import OPTIMIZERS, OptimizerProfile, UnitUpkeep

log = logging.getLogger(__name__)

# Not Adadelta and Rprop, whose temporaries of one parameter go at other places of the next one's.
_ALIKE = (
    torch.optim.Adafactor,
    torch.optim.Adagrad,
    torch.optim.Adam,
    torch.optim.Adamax,
    torch.optim.AdamW,
    torch.optim.NAdam,
    torch.optim.RAdam,
    torch.optim.RMSprop,
    torch.optim.SGD,
    CompensatedAdamW,
)

# Code that reads an unknown number gets this one: neither 0 nor 1, which steps divide by or take
# for a first step.
_NUMBER = 0.5


def optimizer_footprint(
    given: Given | None,
    model: nn.Module | None = None,
    *,
    units: Iterable[str] = (),
    device_kind: str = "cpu",
) -> OptimizerProfile:
    """The profile of any optimizer or factory; None is AdamW.

    Args:
        model: its parameters will be stepped; without one a tiny matrix represents all.
        units: names of the model's units, as in its profile.
        device_kind: on accelerators torch's default is one step for all tensors (foreach).

    Raises:
        InputError: the factory does not use the parameters that it is given, or the optimizer
            cannot step by itself.
    """
    if given is None:
        return OPTIMIZERS["adamw"]
    if model is not None:
        profile = _of_model(given, model, tuple(units), device_kind)
        if profile is not None:
            return profile
        log.info("the optimizer does not step on fake tensors: measured on one tiny matrix")
    return _of_tiny(given)


def _of_tiny(given: Given) -> OptimizerProfile:
    """Two real steps on a matrix of some thousand elements; the first makes the states."""
    optimizer, matrix = tiny(given)
    own = _parameters_of(optimizer)
    _require_used(any(p is matrix for p in own))
    name = type(optimizer).__name__
    try:
        optimizer.step()
        states = [state for p in own for state in _states(optimizer, p)]
        with _Work([*own, *(p.grad for p in own), *states]) as work:
            optimizer.step()
    except RuntimeError:  # sparse gradients only, say: its states count as Adam's
        return OPTIMIZERS["adam"].model_copy(update={"name": name, **_because(given)})
    except Exception as error:  # whatever a user's class raises
        raise InputError(
            f"{name} raised {summary(error)} in a step of a small matrix, without a closure",
            hints=["`train_step` steps so; an optimizer that needs a closure does not fit it"],
        ) from None
    stored = sum(state.nbytes for state in _states(optimizer, matrix) if state.dim() > 0)
    copies = work.peak_bytes / matrix.nbytes
    return OptimizerProfile(
        name=name,
        state_bytes_per_element=stored / matrix.numel(),
        moved_bytes_per_element=work.moved_bytes / sum(p.numel() for p in own),
        loop_copies=copies,
        list_copies=max(1.0, copies),
        **_because(given),
    )


def _because(given: Given, model: nn.Module | None = None) -> dict[str, str]:
    """Fields of a profile."""
    reasons = indivisible(given, model)
    return {
        "whole_because": reasons.rows,
        "columns_because": reasons.columns,
        "together_because": reasons.parameters,
    }


def _require_used(is_used: bool) -> None:
    if not is_used:
        raise InputError(
            "the optimizer factory does not use the parameters that it is given",
            hints=["write `lambda params: torch.optim.AdamW(params, lr=3e-4)`"],
        )


def _of_model(
    given: Given, model: nn.Module, units: Sequence[str], device_kind: str
) -> OptimizerProfile | None:
    """The profile on fake copies of the model's parameters; None where these cannot be stepped."""
    try:
        with fake_tensors() as fake, torch.random.fork_rng(devices=[]):
            profile = _step_on_fakes(given, model, units, device_kind, Fakes(fake=fake))
    except InputError:
        raise
    except Exception:  # whatever a user's step does with tensors that have no values
        return None
    return profile.model_copy(update=_because(given, model))


def _step_on_fakes(
    given: Given, model: nn.Module, units: Sequence[str], device_kind: str, fakes: Fakes
) -> OptimizerProfile:
    owners: dict[int, str] = {}
    fakes_of: dict[nn.Parameter, nn.Parameter] = {}
    for path, parameter in model.named_parameters():
        if parameter.requires_grad:
            fake = fakes.of(parameter)
            assert isinstance(fake, nn.Parameter)
            fake.grad = torch.empty_like(fake)
            owners[id(fake)] = _owner(path, units)
            fakes_of[parameter] = fake
    optimizer = trial_with(given, list(fakes_of.values()), fakes_of)
    own = [p for p in _parameters_of(optimizer) if id(p) in owners]
    _require_used(bool(own))
    if device_kind != "cpu":
        _step_lists(optimizer)
    with _Numbers():
        stepped = _by_kinds if _steps_alike(optimizer) else _two_steps
        work = stepped(optimizer, own)
    state_bytes: dict[str, int] = defaultdict(int)
    elements: dict[str, int] = defaultdict(int)
    for parameter in own:
        unit = owners[id(parameter)]
        elements[unit] += parameter.numel()
        state_bytes[unit] += work.state_bytes[id(parameter)]
    total = sum(elements.values())
    return OptimizerProfile(
        name=type(optimizer).__name__,
        state_bytes_per_element=sum(state_bytes.values()) / total,
        moved_bytes_per_element=work.moved_bytes / total,
        # Traffic is divided by elements: only its sum is used.
        units={
            unit: UnitUpkeep(
                state_bytes=state_bytes[unit],
                moved_bytes=work.moved_bytes * count / total,
                flop=work.flop * count / total,
            )
            for unit, count in elements.items()
        },
        working_bytes=work.peak_bytes,
    )


@dataclass(slots=True)
class _Upkeep:
    """The second step of some parameters; `state_bytes` of each, by its id."""

    moved_bytes: int = 0
    flop: int = 0
    peak_bytes: int = 0
    state_bytes: dict[int, int] = field(default_factory=dict)


def _two_steps(optimizer: torch.optim.Optimizer, own: Sequence[nn.Parameter]) -> _Upkeep:
    """Step all that the optimizer has; the first step makes the states."""
    optimizer.step()
    states = {id(p): _states(optimizer, p) for p in own}
    with _Work(chain(own, (p.grad for p in own), *states.values())) as work:
        optimizer.step()
    stored = {key: sum(s.nbytes for s in each if s.dim() > 0) for key, each in states.items()}
    return _Upkeep(work.moved_bytes, work.flop, work.peak_bytes, stored)


def _by_kinds(optimizer: torch.optim.Optimizer, own: Sequence[nn.Parameter]) -> _Upkeep:
    """Step one parameter of each shape and group in place of all."""
    whole, known = _Upkeep(), set(map(id, own))
    for group in optimizer.param_groups:
        kinds: dict[object, _Kind] = {}
        peak_bytes = left_bytes = 0
        for parameter in group["params"]:
            if id(parameter) not in known:
                continue
            shape = parameter.shape, parameter.stride(), parameter.dtype
            if shape not in kinds:
                kinds[shape] = _kind(optimizer, group, parameter)
            kind = kinds[shape]
            whole.moved_bytes += kind.one.moved_bytes
            whole.flop += kind.one.flop
            whole.state_bytes[id(parameter)] = kind.state_bytes
            if _in_list(group):
                peak_bytes += kind.one.peak_bytes
            else:
                peak_bytes = max(peak_bytes, left_bytes + kind.one.peak_bytes)
                left_bytes = kind.left_bytes
        whole.peak_bytes = max(whole.peak_bytes, peak_bytes)
    return whole


@dataclass(frozen=True, slots=True)
class _Kind:
    """The upkeep of one parameter; `left_bytes` of its temporaries go when the next one's come."""

    one: _Upkeep
    state_bytes: int
    left_bytes: int


def _kind(
    optimizer: torch.optim.Optimizer, group: dict[str, Any], parameter: nn.Parameter
) -> _Kind:
    next_one = nn.Parameter(torch.empty_like(parameter))
    next_one.grad = torch.empty_like(next_one)
    optimizer.param_groups = [{**group, "params": [parameter]}]
    one = _two_steps(optimizer, [parameter])
    optimizer.param_groups = [{**group, "params": [parameter, next_one]}]
    both = _two_steps(optimizer, [parameter, next_one])
    return _Kind(one, one.state_bytes[id(parameter)], both.peak_bytes - one.peak_bytes)


def _steps_alike(optimizer: torch.optim.Optimizer) -> bool:
    """True if parameters of one shape are stepped alike: one after another, or in lists that are
    of one dtype each and so one for each group."""
    dtypes = [{p.dtype for p in group["params"]} for group in optimizer.param_groups]
    are_lists = [_in_list(group) for group in optimizer.param_groups]
    is_mixed = any(len(own) > 1 for own, in_list in zip(dtypes, are_lists, strict=True) if in_list)
    return type(optimizer) in _ALIKE and not is_mixed


def _in_list(group: dict[str, Any]) -> bool:
    return bool(group.get("foreach") or group.get("fused"))


def _is_torchs(optimizer: torch.optim.Optimizer) -> bool:
    return type(optimizer).__module__.startswith("torch.optim.")


def _owner(path: str, units: Sequence[str]) -> str:
    """The innermost unit on a parameter's path."""
    holders = [unit for unit in units if unit == "" or path.startswith(f"{unit}.")]
    return max(holders, key=len, default=GLUE)


def _step_lists(optimizer: torch.optim.Optimizer) -> None:
    """Step all tensors at once, as torch's optimizers do on accelerators by default.

    Adafactor has one too, and never uses it by default.
    """
    if _is_torchs(optimizer) and not isinstance(optimizer, torch.optim.Adafactor):
        for group in optimizer.param_groups:
            if "foreach" in group and group["foreach"] is None and not group.get("fused"):
                group["foreach"] = True


class _Numbers(TorchDispatchMode):
    """Give code that reads the value of a fake tensor a number."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._query = scalar_query()

    def __torch_dispatch__(
        self, func: Operator, types: object, args: Any = (), kwargs: Any = None
    ) -> object:
        return _NUMBER if func is self._query else func(*args, **(kwargs or {}))


class _Work(TorchDispatchMode):
    """Adds up the bytes that operations read and write, their FLOP, and follows temporaries.

    `before`: existing tensors, which count in no peak.
    """

    def __init__(self, before: Iterable[Tensor | None]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.moved_bytes = 0
        self.flop = 0
        self.peak_bytes = 0
        self._live_bytes = 0
        self._formulas = flop_formulas()
        storages = (storage_of(tensor) for tensor in before if tensor is not None)
        self._before = {id(storage): storage for storage in storages}
        self._made: dict[int, weakref.ref[torch.UntypedStorage]] = {}

    def __torch_dispatch__(
        self, func: Operator, types: object, args: Any = (), kwargs: Any = None
    ) -> object:
        kwargs = kwargs or {}
        result = func(*args, **kwargs)
        inputs, outputs = tensors_in((args, kwargs)), tensors_in(result)
        known = {id(storage_of(tensor)) for tensor in inputs}
        makes_storage = any(id(storage_of(tensor)) not in known for tensor in outputs)
        for tensor in outputs:
            self._notice(tensor)
        if launches(func, makes_storage=makes_storage):
            # Multi-tensor operations return nothing and write into their arguments.
            written = outputs or tensors_written(func, args, kwargs)
            self.moved_bytes += moved_bytes(func, inputs, written)
            formula = self._formulas.get(func.overloadpacket)
            if formula is not None:
                self.flop += formula(*args, **kwargs, out_val=result)
        return result

    def _notice(self, tensor: Tensor) -> None:
        storage = storage_of(tensor)
        key = id(storage)
        if storage is None or key in self._before or key in self._made:
            return
        self._made[key] = weakref.ref(storage, self._release(key, storage.nbytes()))
        self._live_bytes += storage.nbytes()
        self.peak_bytes = max(self.peak_bytes, self._live_bytes)

    def _release(self, key: int, size_bytes: int) -> Callable[[object], None]:
        def release(_: object) -> None:
            del self._made[key]
            self._live_bytes -= size_bytes

        return release


def _parameters_of(optimizer: torch.optim.Optimizer) -> list[nn.Parameter]:
    return [p for group in optimizer.param_groups for p in group["params"]]


def _states(optimizer: torch.optim.Optimizer, parameter: nn.Parameter) -> list[Tensor]:
    return tensors_in(list(optimizer.state[parameter].values()))
