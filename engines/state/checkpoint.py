"""Saved weights and optimizer states: one format for every plan and world size.

torch.distributed.checkpoint stores whole logical tensors in chunks, so any plan loads what another
plan saved. Names are those of the unwrapped model.
"""

from __future__ import annotations

import os
import shutil
import warnings
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_state_dict,
    set_model_state_dict,
    set_state_dict,
)

from engines.runtime.world import World, is_lost_contact, sum_over_ranks
from engines.state.layout import Layout
from engines.state.shard_spec import PlacedTensor
from profiles.errors import FileError

PathLike = str | os.PathLike[str]
State = dict[str, Any]


def save(
    path: PathLike,
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    *,
    world: World,
    layout: Layout,
    writers: dist.ProcessGroup | None = None,
    outer: Mapping[str, Tensor] | None = None,
    replica: int = 0,
) -> None:
    """Write the folder `path`; all ranks call it, or all of `writers`, the first rank among them.

    Writers other than all ranks have the whole model each, and their own optimizer states. `outer`
    are states of the outer optimizer, the same on all ranks. Where replicas step on their own,
    `replica` is the number of this one: its states are saved as well.

    The chunks go to a folder next to it, which replaces an older `path` only when it is complete:
    an interrupted save leaves the old one.

    Raises:
        FileError: the folder cannot be written; every rank raises it.
    """
    target = Path(path)
    partial = target.with_name(target.name + ".partial")
    model_state, optimizer_state = _states(model, optimizer)
    states = optimizer_state["state"]
    own: State = {}
    if replica:  # where several ranks save one name torch takes any of them
        own, states = _flat(states), {}
    optimizer_state["state"] = {n: v for n, v in states.items() if layout.owns(n)}
    if layout.has_stages or writers is not None:
        groups = optimizer_state["param_groups"]
        optimizer_state["param_groups"] = _whole_groups(groups, model, writers)
    owned = {name: value for name, value in model_state.items() if layout.owns(name)}
    state = _placed(owned, optimizer_state, layout)
    if outer:
        state["outer"] = dict(outer)
    if own:
        state[_replica(replica)] = own

    def prepare() -> None:
        shutil.rmtree(partial, ignore_errors=True)
        target.parent.mkdir(parents=True, exist_ok=True)

    what = f"cannot write `{target}`"
    _on_first_rank(prepare, what, world, writers)
    with _files(what):
        dcp.save(state, checkpoint_id=partial, process_group=writers)
    _on_first_rank(lambda: _replace(target, partial), what, world, writers)


def load(
    path: PathLike,
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    *,
    layout: Layout,
    alone: bool = False,
    outer: Mapping[str, Tensor] | None = None,
    replica: int = 0,
) -> bool:
    """Read a folder written by `save`, under any plan, into the shards of this one.

    `alone`: without collectives, for ranks that have the whole model each. Returns True if the
    folder has all of `outer`, which are then written in place. A `replica` loads its own optimizer
    states where the folder has some, else those of the first.

    Raises:
        FileError: there is no complete checkpoint, or it belongs to another model.
    """
    target = Path(path)
    if not (target / ".metadata").is_file():
        raise FileError(
            f"`{target}` has no complete checkpoint",
            hints=["name a folder that `parallel.save` wrote"],
        )
    optimizer.zero_grad(set_to_none=True)  # gradients of the weights that are replaced
    before = dict(optimizer.state)
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    if any(p.requires_grad and p not in before for p in parameters):
        optimizer.state.clear()  # torch initialises the states of all parameters or of none
    model_state, optimizer_state = _raw_states(model, optimizer)
    names = list(model_state)
    model_state = {name: value for name, value in model_state.items() if layout.holds(name)}
    state = _placed(model_state, optimizer_state, layout)
    if outer:
        state["outer"] = dict(outer)
    try:
        with _files(f"cannot load `{target}` into this model"):
            saved = dcp.FileSystemReader(target).read_metadata().state_dict_metadata.keys()
            state |= _own_states(optimizer_state, replica, saved)
            _require_names(target, saved, names)
            _require_same_optimizer(target, saved, optimizer_state)
            # Parameters that never got a gradient have no optimizer state in the checkpoint.
            planner = dcp.DefaultLoadPlanner(allow_partial_load=True)
            dcp.load(state, checkpoint_id=target, planner=planner, no_dist=alone)
    except BaseException:
        optimizer.state.clear()
        optimizer.state.update(before)
        raise
    # Chunks were written in place; values that are no tensors are in `state`.
    own = state.pop(_replica(replica), {})
    state = _unplaced(state, model_state, optimizer_state)
    for name, states in state["optimizer"]["state"].items():
        states |= {key: own[f"{name}.{key}"] for key in states if f"{name}.{key}" in own}
    options = StateDictOptions(strict=len(model_state) == len(names))
    if _is_of(optimizer, model):
        set_state_dict(
            model,
            optimizer,
            model_state_dict=state["model"],
            optim_state_dict=state["optimizer"],
            options=options,
        )
    else:
        set_model_state_dict(model, state["model"], options=options)
    _forget_states_not_saved(model, optimizer, saved)
    return bool(outer) and all(f"outer.{name}" in saved for name in outer or ())


def _flat(states: State) -> State:
    """The tensors among states by parameter, under the names of both."""
    return {
        f"{name}.{key}": value
        for name, values in states.items()
        for key, value in values.items()
        if isinstance(value, Tensor)
    }


def _replica(number: int) -> str:
    return f"replica{number}"


def _own_states(optimizer_state: State, replica: int, saved: Collection[str]) -> dict[str, State]:
    """Empty tensors for a replica's own states in a checkpoint."""
    places = {
        name: torch.empty_like(value)
        for name, value in _flat(optimizer_state["state"]).items()
        if f"{_replica(replica)}.{name}" in saved
    }
    return {_replica(replica): places} if places else {}


def _placed(model_state: State, optimizer_state: State, layout: Layout) -> dict[str, State]:
    """Both states with tensors that know their offsets in the whole."""

    def place(name: str, value: object) -> object:
        return layout.placed(name, value) if isinstance(value, Tensor) else value

    states = {
        name: {key: place(name, value) for key, value in values.items()}
        for name, values in optimizer_state["state"].items()
    }
    return {
        "model": {name: place(name, value) for name, value in model_state.items()},
        "optimizer": {**optimizer_state, "state": states},
    }


def _unplaced(
    state: dict[str, State], model_state: State, optimizer_state: State
) -> dict[str, State]:
    """`state` with the local tensors in place of `PlacedTensor`, whose chunks are views of them."""
    states = {
        name: {
            key: optimizer_state["state"][name][key] if isinstance(value, PlacedTensor) else value
            for key, value in values.items()
        }
        for name, values in state["optimizer"]["state"].items()
    }
    return {
        "model": {
            name: model_state[name] if isinstance(value, PlacedTensor) else value
            for name, value in state["model"].items()
        },
        "optimizer": {**state["optimizer"], "state": states},
    }


def _states(model: nn.Module, optimizer: torch.optim.Optimizer) -> tuple[dict[str, Any], Any]:
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


def _raw_states(
    model: nn.Module, optimizer: torch.optim.Optimizer
) -> tuple[dict[str, Any], dict[str, Any]]:
    """State dicts as torch gives them; no optimizer states where nothing is stepped here."""
    if _is_of(optimizer, model):
        return get_state_dict(model, optimizer)
    return get_model_state_dict(model), {"state": {}, "param_groups": []}


def _is_of(optimizer: torch.optim.Optimizer, model: nn.Module) -> bool:
    """True if it steps parameters of `model`; that of a worker has none, servers step them."""
    known = set(model.parameters())
    return all(p in known for group in optimizer.param_groups for p in group["params"])


def _whole_groups(
    groups: list[dict[str, Any]], model: nn.Module, ranks: dist.ProcessGroup | None
) -> list[dict[str, Any]]:
    """Parameter groups over all ranks; settings are those of the first rank that has the group."""
    every: list[list[dict[str, Any]]] = [[] for _ in range(dist.get_world_size(ranks))]
    dist.all_gather_object(every, groups, group=ranks)
    order = {name: number for number, (name, _) in enumerate(model.named_parameters())}
    merged = []
    for number in range(max(map(len, every))):
        parts = [rank[number] for rank in every if number < len(rank)]
        names = {name for part in parts for name in part["params"]}
        merged.append({**parts[0], "params": sorted(names, key=lambda name: order[name])})
    return merged


def _require_names(target: Path, saved: Iterable[str], names: Iterable[str]) -> None:
    here = set(names)
    there = {name.removeprefix("model.") for name in saved if name.startswith("model.")}
    missing, extra = sorted(here - there), sorted(there - here)
    if missing or extra:
        raise FileError(
            f"`{target}` belongs to another model: it has {len(there)} tensors, this model"
            f" {len(here)}",
            where=f"only here: {missing[0]}" if missing else f"only there: {extra[0]}",
        )


def _require_same_optimizer(target: Path, saved: Iterable[str], optimizer_state: Any) -> None:
    there = {key for _, key in _saved_states(saved)}
    here = {key for states in optimizer_state["state"].values() for key in states}
    if there and here and here != there:
        raise FileError(
            f"`{target}` was saved with another optimizer: it had {', '.join(sorted(there))},"
            f" this one has {', '.join(sorted(here))}",
            hints=["load the weights alone: `parallel.load_state_dict(...)`"],
        )


def _saved_states(saved: Iterable[str]) -> Iterator[tuple[str, str]]:
    """(parameter, key) of every optimizer state among the names in a checkpoint."""
    prefix = "optimizer.state."
    for name in saved:
        if name.startswith(prefix):
            parameter, _, key = name.removeprefix(prefix).rpartition(".")
            yield parameter, key


def _forget_states_not_saved(
    model: nn.Module, optimizer: torch.optim.Optimizer, saved: Iterable[str]
) -> None:
    """Drop the states of parameters that had not been stepped when the checkpoint was saved."""
    stepped = {parameter for parameter, _ in _saved_states(saved)}
    for name, parameter in model.named_parameters():
        if name not in stepped:
            optimizer.state.pop(parameter, None)


def _replace(target: Path, partial: Path) -> None:
    old = target.with_name(target.name + ".old")
    shutil.rmtree(old, ignore_errors=True)
    if target.exists():
        target.rename(old)
    partial.rename(target)
    shutil.rmtree(old, ignore_errors=True)


@contextmanager
def _files(what: str) -> Iterator[None]:
    try:
        with warnings.catch_warnings():
            # One process without a group is a plan of 1 here, not an oversight.
            warnings.filterwarnings("ignore", message=".*torch.distributed is .*uninitialized.*")
            yield
    except FileError:
        raise
    except (dcp.CheckpointException, OSError, RuntimeError, ValueError) as error:
        if is_lost_contact(error):
            raise  # not the folder's fault
        causes = getattr(error, "failures", {}) or {}
        first = next((str(cause[0]) for cause in causes.values()), str(error))
        raise FileError(f"{what}: {first.strip().splitlines()[0]}") from None


def _on_first_rank(
    work: Callable[[], None], what: str, world: World, ranks: dist.ProcessGroup | None
) -> None:
    """Rank 0 does `work`; all ranks wait for it, and raise if it fails."""
    error: FileError | None = None
    if world.rank == 0:
        try:
            with _files(what):
                work()
        except FileError as caught:
            error = caught
    (failures,) = sum_over_ranks([float(error is not None)], world, group=ranks)
    if error is not None:
        raise error
    if failures:
        raise FileError(f"{what}: rank 0 could not, its output says why")
