"""States, traffic and temporaries of an optimizer, measured by letting it step.

It steps on fake copies of the model's own parameters, which have shapes and no memory. Where it
cannot step those it steps on one tiny matrix.
"""

from __future__ import annotations

import logging
import weakref
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from itertools import chain
from typing import Any

import torch
from torch import Tensor, nn

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
            f"{name} cannot step without a closure: {summary(error)}",
            hints=["an optimizer that needs a closure does not fit `train_step`"],
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
        optimizer.step()
        states = {id(p): _states(optimizer, p) for p in own}
        with _Work(chain(own, (p.grad for p in own), *states.values())) as work:
            optimizer.step()
    state_bytes: dict[str, int] = defaultdict(int)
    elements: dict[str, int] = defaultdict(int)
    for parameter in own:
        unit = owners[id(parameter)]
        elements[unit] += parameter.numel()
        state_bytes[unit] += sum(s.nbytes for s in states[id(parameter)] if s.dim() > 0)
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


def _owner(path: str, units: Sequence[str]) -> str:
    """The innermost unit on a parameter's path."""
    holders = [unit for unit in units if unit == "" or path.startswith(f"{unit}.")]
    return max(holders, key=len, default=GLUE)


def _step_lists(optimizer: torch.optim.Optimizer) -> None:
    """Step all tensors at once, as torch's optimizers do on accelerators by default.

    Adafactor has one too, and never uses it by default.
    """
    is_torchs = type(optimizer).__module__.startswith("torch.optim.")
    if is_torchs and not isinstance(optimizer, torch.optim.Adafactor):
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
