"""Weights and optimizer states by name, as a checkpoint has them, and back.

torch names parameters and states by the unwrapped model; a `Layout` says which boxes of the whole
tensors this rank has.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_state_dict,
    set_model_state_dict,
    set_state_dict,
)

from engines.state.checkpoint.param_groups import (
    State,
    is_alike,
    own_groups,
    require_groups,
    without_empty_groups,
)
from engines.state.layout import Layout
from engines.state.shard_spec import PlacedTensor, placed
from profiles.errors import FileError, InputError, a_type
from profiles.torch_compat import tensors_in

MODEL, OPTIMIZER, GROUPS = "model.", "optimizer.state.", "optimizer.param_groups"
OUTER = "outer."
_PLACES = "`optimizer.state[parameter]`, each tensor under a key of its own, and in `param_groups`"


@dataclass(frozen=True, slots=True)
class NamedStates:
    """Tensors of this rank by name, values that are no tensors, and all parameters' names."""

    tensors: dict[str, PlacedTensor] = field(default_factory=dict)
    values: State = field(default_factory=dict)
    order: list[str] = field(default_factory=list)


def replica_prefix(number: int) -> str:
    """Prefix of the optimizer states of a replica that steps on its own."""
    return f"replica{number}."


def require_savable(optimizer: torch.optim.Optimizer) -> None:
    """Refuse states that a checkpoint cannot hold, or that no load could bring back.

    Raises:
        InputError: they are of no parameter, in a container, or outside of states and groups.
    """
    kind, hints = type(optimizer).__name__, [f"keep them in {_PLACES}"]
    if type(optimizer).state_dict is not torch.optim.Optimizer.state_dict:
        others = [name for name in optimizer.state_dict() if name not in ("state", "param_groups")]
        if others:
            raise InputError(
                f"`{kind}.state_dict()` has `{others[0]}` beside the states of parameters and the"
                " settings of groups: a checkpoint does not hold it",
                hints=hints,
            )
    known = {p for group in optimizer.param_groups for p in group["params"]}
    for owner, states in optimizer.state.items():
        if owner not in known:
            raise InputError(
                f"`{kind}` has states under {owner!r:.40}, which is none of its parameters: a"
                " checkpoint does not hold them",
                hints=hints,
            )
        for key, value in states.items():
            if isinstance(value, list | tuple | dict) and tensors_in(value):
                raise InputError(
                    f"the state `{key}` of `{kind}` is {a_type(value)} of tensors: a checkpoint"
                    " knows how a tensor lies under a key of its own",
                    hints=hints,
                )


def states_to_save(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    layout: Layout,
    *,
    outer: Mapping[str, Tensor],
    replica: int,
) -> NamedStates:
    """All that this rank has; several ranks may have the same.

    Args:
        outer: states of the outer optimizer, the same on all ranks.
        replica: number of this replica where replicas step on their own; else 0.
    """
    model_state, optimizer_state = _states(model, optimizer)
    named = NamedStates()
    for name, value in model_state.items():
        if layout.owns(name):
            _add(named, MODEL + name, name, value, layout)
    prefix = replica_prefix(replica) if replica else OPTIMIZER
    for name, states in optimizer_state["state"].items():
        if layout.owns(name):
            for key, value in states.items():
                _add(named, f"{prefix}{name}.{key}", name, value, layout)
    named.values[GROUPS] = optimizer_state["param_groups"]
    named.order.extend(name for name, _ in model.named_parameters())
    named.tensors.update({OUTER + name: placed(value) for name, value in outer.items()})
    return named


def _add(named: NamedStates, key: str, name: str, value: object, layout: Layout) -> None:
    if isinstance(value, Tensor):
        named.tensors[key] = layout.placed(name, value)
    else:
        named.values[key] = value


class StatesToLoad:
    """Places for the states of a checkpoint, views of this rank's memory where that exists.

    `tensors` are filled by the caller; `finish` hands all to model and optimizer, `undo` leaves the
    optimizer as it was.
    """

    def __init__(
        self,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        layout: Layout,
        *,
        outer: Mapping[str, Tensor],
    ) -> None:
        self._model, self._optimizer = model, optimizer
        optimizer.zero_grad(set_to_none=True)  # gradients of the weights that are replaced
        self._before = dict(optimizer.state)
        parameters = [p for group in optimizer.param_groups for p in group["params"]]
        if any(p.requires_grad and p not in self._before for p in parameters):
            optimizer.state.clear()  # torch initialises the states of all parameters or of none
        model_state, self._optimizer_state = _raw_states(model, optimizer)
        self.names = list(model_state)
        self._model_state = {n: v for n, v in model_state.items() if layout.holds(n)}
        self._outer = {OUTER + name: placed(value) for name, value in outer.items()}
        self._layout = layout

    def require_fit(
        self, folder: object, tensors: Mapping[str, Any], values: Mapping[str, Any]
    ) -> None:
        """Compare a checkpoint with this model and optimizer; nothing is changed.

        What it lets through, `finish` can hand on: a refused checkpoint changes nothing.

        Args:
            tensors: of the checkpoint, with `shape` and `dtype`.
            values: that are no tensors.

        Raises:
            FileError: it is of another model or optimizer.
        """
        names = [*tensors, *values]
        _require_names(folder, names, self.names)
        _require_same_optimizer(folder, names, self._optimizer_state)
        state = self._optimizer_state
        if state["param_groups"] and GROUPS in values:
            require_groups(folder, values[GROUPS], state["param_groups"], set(self.names))
        for name, here in self._values():
            if name in values and (name.startswith(MODEL) or not is_alike(values[name], here)):
                raise FileError(
                    f"`{folder}` belongs to another model or optimizer: `{name}` is"
                    f" {values[name]!r:.80} there"
                )
        for key, target in self.places(replica=0, names=tensors).items():
            saved, here = tensors[key], target.whole
            if tuple(saved.shape) != tuple(here):
                raise FileError(
                    f"`{folder}` belongs to another model: `{key.removeprefix(MODEL)}` is"
                    f" {tuple(saved.shape)} there, {tuple(here)} here"
                )

    def places(self, *, replica: int, names: Collection[str]) -> dict[str, PlacedTensor]:
        """Targets for the tensors of a checkpoint that has `names`; a replica's own optimizer
        states where it has some, else those of the first."""
        layout = self._layout
        result = {
            MODEL + name: layout.placed(name, value)
            for name, value in self._model_state.items()
            if isinstance(value, Tensor) and MODEL + name in names
        }
        for name, key, value in self._optimizer_tensors():
            own = f"{replica_prefix(replica)}{name}.{key}"
            saved = own if replica and own in names else f"{OPTIMIZER}{name}.{key}"
            if saved in names:
                result[saved] = layout.placed(name, value)
        return result | {name: value for name, value in self._outer.items() if name in names}

    def _values(self) -> Iterator[tuple[str, object]]:
        """Tensors of the model, and all states of the optimizer, by their names in a checkpoint."""
        for name, value in self._model_state.items():
            if isinstance(value, Tensor):
                yield MODEL + name, value
        for name, states in self._optimizer_state["state"].items():
            for key, value in states.items():
                yield f"{OPTIMIZER}{name}.{key}", value

    def _optimizer_tensors(self) -> Iterator[tuple[str, str, Tensor]]:
        for name, states in self._optimizer_state["state"].items():
            for key, value in states.items():
                if isinstance(value, Tensor):
                    yield name, key, value

    def finish(self, values: Mapping[str, Any], names: Collection[str]) -> bool:
        """Hand filled tensors and `values` on; True if the checkpoint had all outer states."""
        state, model_state = self._optimizer_state, self._model_state
        for name, states in state["state"].items():
            for key in states:
                if f"{OPTIMIZER}{name}.{key}" in values:
                    states[key] = values[f"{OPTIMIZER}{name}.{key}"]
        if state["param_groups"] and GROUPS in values:
            state["param_groups"] = own_groups(values[GROUPS], state["param_groups"])
        for name in model_state:
            if MODEL + name in values:
                model_state[name] = values[MODEL + name]
        options = StateDictOptions(strict=len(model_state) == len(self.names))
        if _is_of(self._optimizer, self._model):
            with without_empty_groups(self._optimizer, state["param_groups"]) as groups:
                set_state_dict(
                    self._model,
                    self._optimizer,
                    model_state_dict=model_state,
                    optim_state_dict={**state, "param_groups": groups},
                    options=options,
                )
        else:
            set_model_state_dict(self._model, model_state, options=options)
        _forget_states_not_saved(self._model, self._optimizer, names)
        return bool(self._outer) and all(name in names for name in self._outer)

    def undo(self) -> None:
        """Leave the optimizer's states as they were."""
        self._optimizer.state.clear()
        self._optimizer.state.update(self._before)


def _states(model: nn.Module, optimizer: torch.optim.Optimizer) -> tuple[State, State]:
    """Model and optimizer states by original names.

    torch initialises the states of an optimizer that never stepped by a step with zero gradients,
    which counts as one; they are removed again.
    """
    is_new = not optimizer.state
    model_state, optimizer_state = _raw_states(model, optimizer)
    if is_new:
        optimizer.state.clear()
        optimizer_state["state"] = {}
    return model_state, optimizer_state


def _raw_states(model: nn.Module, optimizer: torch.optim.Optimizer) -> tuple[State, State]:
    """State dicts as torch gives them; no optimizer states where nothing is stepped here."""
    if _is_of(optimizer, model):
        named = [dict(group, params=[]) for group in optimizer.param_groups]
        with without_empty_groups(optimizer, named):
            model_state, of_optimizer = get_state_dict(model, optimizer)
        optimizer_state: State = of_optimizer
        filled = iter(optimizer_state["param_groups"])
        optimizer_state["param_groups"] = [
            next(filled) if group["params"] else empty
            for group, empty in zip(optimizer.param_groups, named, strict=True)
        ]
        return model_state, optimizer_state
    return get_model_state_dict(model), {"state": {}, "param_groups": []}


def _is_of(optimizer: torch.optim.Optimizer, model: nn.Module) -> bool:
    """True if it steps parameters of `model`; that of a worker has none, servers step them."""
    known = set(model.parameters())
    return all(p in known for group in optimizer.param_groups for p in group["params"])


def _require_names(folder: object, saved: Iterable[str], names: Iterable[str]) -> None:
    here = set(names)
    there = {name.removeprefix(MODEL) for name in saved if name.startswith(MODEL)}
    missing, extra = sorted(here - there), sorted(there - here)
    if missing or extra:
        raise FileError(
            f"`{folder}` belongs to another model: it has {len(there)} tensors, this model"
            f" {len(here)}",
            where=f"only here: {missing[0]}" if missing else f"only there: {extra[0]}",
        )


def _require_same_optimizer(folder: object, saved: Iterable[str], optimizer_state: State) -> None:
    there = {key for _, key in _saved_states(saved)}
    here = {key for states in optimizer_state["state"].values() for key in states}
    if there and here and here != there:
        raise FileError(
            f"`{folder}` was saved with another optimizer: it had {', '.join(sorted(there))},"
            f" this one has {', '.join(sorted(here))}",
            hints=["load the weights alone: `parallel.load_state_dict(...)`"],
        )


def _saved_states(saved: Iterable[str]) -> Iterator[tuple[str, str]]:
    """(parameter, key) of every optimizer state among the names in a checkpoint."""
    for name in saved:
        if name.startswith(OPTIMIZER):
            parameter, _, key = name.removeprefix(OPTIMIZER).rpartition(".")
            yield parameter, key


def _forget_states_not_saved(
    model: nn.Module, optimizer: torch.optim.Optimizer, saved: Iterable[str]
) -> None:
    """Drop the states of parameters that had not been stepped when the checkpoint was saved."""
    stepped = {parameter for parameter, _ in _saved_states(saved)}
    for name, parameter in model.named_parameters():
        if name not in stepped:
            optimizer.state.pop(parameter, None)
