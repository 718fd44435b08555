"""States, traffic and temporaries of an optimizer, measured by letting it step.

It steps on fake copies of the model's own parameters, which have shapes and no memory. Where it
cannot step those, and to see if it can be sharded, it steps on one tiny matrix.
"""

from __future__ import annotations

import logging
import weakref
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import chain
from typing import Any

import torch
from torch import Tensor, nn

from engines.state.chunked_step import step_in_chunks
from engines.state.optimizer import OptimizerFactory
from engines.state.sharded_step import trial_of
from profiles.capture.fakes.tensors import Fakes
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
from profiles.units import format_percent
from profiles.workload.optimizers import OPTIMIZERS, OptimizerProfile, UnitUpkeep

log = logging.getLogger(__name__)

Given = torch.optim.Optimizer | OptimizerFactory

# Two-dimensional, as most weights are, and large enough that half of it is treated like them: 8-bit
# optimizers treat tensors under 4,096 elements differently.
_SHAPE = (128, 64)
# Largest difference between a step on a matrix and on its halves that is rounding.
_ROUNDING = 1e-5
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


def sparse_alone(given: Given | None) -> str:
    """The reason why dense gradients cannot be stepped; empty where they can, or where the
    optimizer cannot be made for a trial."""
    if given is None:
        return ""
    try:
        optimizer = _tiny(given)[0]
    except Exception:  # whatever a user's class raises: it is not refused for that
        return ""
    if not isinstance(optimizer, torch.optim.SparseAdam):
        return ""
    return f"{type(optimizer).__name__} steps sparse gradients alone, this plan sends dense ones"


def whole_because(given: Given | None) -> str:
    """The reason why shards cannot be stepped alone: half of a matrix gets another update, or none.

    Empty where it is the same, or where the optimizer cannot be tried.
    """
    if given is None:
        return ""
    because = sparse_alone(given)
    if because:
        return because
    try:
        (name, whole), (_, upper), (_, lower) = _updates(given)
    except Exception:  # whatever a user's class raises: it is not refused for that
        return ""
    scale = whole.abs().max().item()
    difference = (whole - torch.cat([upper, lower])).abs().max().item() / scale if scale else 0.0
    if difference <= _ROUNDING:
        return ""
    return (
        f"{name} looks at a whole matrix at a time: stepped in two halves, its update differs by"
        f" {format_percent(difference)}"
    )


def why_not_chunked(given: Given | None) -> str:
    """The reason why parameters cannot be stepped one by one: their updates would differ, or the
    optimizer's states of all of them.

    Empty where it is the same, or where the optimizer cannot be tried.
    """
    if given is None:
        return ""
    try:
        name, joint = _stepped(given, chunked=False)
        _, chunked = _stepped(given, chunked=True)
    except Exception:  # whatever a user's class raises: it is not refused for that
        return ""
    scale = joint.abs().max().item()
    difference = (joint - chunked).abs().max().item() / scale if scale else 0.0
    if difference <= _ROUNDING:
        return ""
    return (
        f"{name} looks at all parameters at a time: stepped one after the other, they differ by"
        f" {format_percent(difference)}"
    )


def _stepped(given: Given, *, chunked: bool) -> tuple[str, Tensor]:
    """Two matrices after three steps, the second one with gradients ten times as large."""
    generator = torch.Generator().manual_seed(0)
    matrices = [nn.Parameter(torch.zeros(_SHAPE)) for _ in range(2)]
    optimizer = _trial(given, matrices)
    for _ in range(3):
        for scale, matrix in zip((1.0, 10.0), matrices, strict=True):
            matrix.grad = scale * torch.randn(_SHAPE, generator=generator)
        if chunked:
            step_in_chunks(optimizer, optimizer.step, chunk_bytes=0)
        else:
            optimizer.step()
    return type(optimizer).__name__, torch.cat([matrix.detach() for matrix in matrices])


def _updates(given: Given) -> Iterator[tuple[str, Tensor]]:
    """The results of two steps from zeros: of a matrix, and of its upper and lower half, in the
    group of the matrix: a factory may sort by sizes, which halves have not (`parameter_groups`)."""
    generator = torch.Generator().manual_seed(0)
    gradients = [torch.randn(_SHAPE, generator=generator) for _ in range(2)]
    half = _SHAPE[0] // 2
    settings: dict[str, Any] = {}
    for rows in (slice(None), slice(0, half), slice(half, None)):
        optimizer, matrix = _tiny(given, rows=gradients[0][rows].shape[0])
        for group in optimizer.param_groups:
            if any(p is matrix for p in group["params"]):
                settings = settings or {k: v for k, v in group.items() if k != "params"}
                group.update(settings)
        for gradient in gradients:
            matrix.grad = gradient[rows].clone()
            optimizer.step()
        yield type(optimizer).__name__, matrix.detach()


def _tiny(given: Given, *, rows: int = _SHAPE[0]) -> tuple[torch.optim.Optimizer, nn.Parameter]:
    """An optimizer of tiny parameters, and the matrix among them.

    A factory may need parameters of all kinds, as matrices for Muon and the rest for AdamW, or
    matrices alone.
    """
    matrix, *others = (
        nn.Parameter(torch.zeros(shape)) for shape in ((rows, _SHAPE[1]), _SHAPE, _SHAPE[1:])
    )
    for parameter in (matrix, *others):
        parameter.grad = torch.ones_like(parameter)
    if isinstance(given, torch.optim.Optimizer):
        return _trial(given, [matrix]), matrix
    try:
        return given([matrix, *others]), matrix
    except Exception:  # a factory is the user's code; what it raises for a matrix too is shown
        return given([matrix]), matrix


def _of_tiny(given: Given) -> OptimizerProfile:
    """Two real steps on a matrix of some thousand elements; the first makes the states."""
    optimizer, matrix = _tiny(given)
    own = _parameters_of(optimizer)
    _require_used(any(p is matrix for p in own))
    name = type(optimizer).__name__
    try:
        optimizer.step()
        states = [state for p in own for state in _states(optimizer, p)]
        with _Work([*own, *(p.grad for p in own), *states]) as work:
            optimizer.step()
    except TypeError as error:
        raise InputError(
            f"{name} cannot step without a closure: {error}",
            hints=["an optimizer that needs a closure does not fit `train_step`"],
        ) from None
    except RuntimeError:  # sparse gradients only, say: its states count as Adam's
        update = {"name": name, "whole_because": whole_because(given)}
        return OPTIMIZERS["adam"].model_copy(update=update)
    stored = sum(state.nbytes for state in _states(optimizer, matrix) if state.dim() > 0)
    copies = work.peak_bytes / matrix.nbytes
    return OptimizerProfile(
        name=name,
        state_bytes_per_element=stored / matrix.numel(),
        moved_bytes_per_element=work.moved_bytes / sum(p.numel() for p in own),
        loop_copies=copies,
        list_copies=max(1.0, copies),
        whole_because=whole_because(given),
    )


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
    return profile.model_copy(update={"whole_because": whole_because(given)})


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
    optimizer = _trial(given, list(fakes_of.values()), fakes_of)
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


def _trial(
    given: Given,
    parameters: list[nn.Parameter],
    fakes_of: Mapping[nn.Parameter, nn.Parameter] | None = None,
) -> torch.optim.Optimizer:
    """A second optimizer of the same settings with `parameters` only.

    With `fakes_of` every group gets those of its own parameters, else the first group gets all.
    """
    if not isinstance(given, torch.optim.Optimizer):
        return given(parameters)
    trial = trial_of(given, parameters)
    if fakes_of is not None:
        trial.param_groups = [
            {**group, "params": [fakes_of[p] for p in group["params"] if p in fakes_of]}
            for group in given.param_groups
        ]
    return trial


def _parameters_of(optimizer: torch.optim.Optimizer) -> list[nn.Parameter]:
    return [p for group in optimizer.param_groups for p in group["params"]]


def _states(optimizer: torch.optim.Optimizer, parameter: nn.Parameter) -> list[Tensor]:
    return tensors_in(list(optimizer.state[parameter].values()))
