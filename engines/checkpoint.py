"""Saved weights and optimizer states: one format for every plan and world size.

torch.distributed.checkpoint holds whole logical tensors in pieces, so what one plan saved another
plan loads. Names are those of the unwrapped model.
"""

from __future__ import annotations

import os
import shutil
import warnings
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_state_dict,
    set_model_state_dict,
    set_state_dict,
)

from engines.world import World, is_lost_contact, sum_over_ranks
from profiles.errors import FileError, ModelError

PathLike = str | os.PathLike[str]


Names = Callable[[str], bool]


def save(
    path: PathLike,
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    *,
    world: World,
    owned: Names | None = None,
) -> None:
    """Write the folder `path`; all ranks call it.

    `owned`: the names that this rank writes, where others have what it has not; each is one rank's.

    The pieces go to a folder beside it, which replaces an older `path` only when it is complete:
    an interrupted save leaves the old one.

    Raises:
        FileError: the folder cannot be written; every rank raises it.
    """
    target = Path(path)
    partial = target.with_name(target.name + ".partial")
    model_state, optimizer_state = _states(model, optimizer)
    if owned is not None:
        model_state = {name: value for name, value in model_state.items() if owned(name)}
        states = optimizer_state["state"]
        optimizer_state = {
            "state": {name: value for name, value in states.items() if owned(name)},
            "param_groups": _whole_groups(optimizer_state["param_groups"], model),
        }
    state = {"model": model_state, "optimizer": optimizer_state}

    def prepare() -> None:
        shutil.rmtree(partial, ignore_errors=True)
        target.parent.mkdir(parents=True, exist_ok=True)

    what = f"cannot write `{target}`"
    _on_first_rank(prepare, what, world)
    with _files(what):
        dcp.save(state, checkpoint_id=partial)
    _on_first_rank(lambda: _replace(target, partial), what, world)


def load(
    path: PathLike,
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    *,
    held: Names | None = None,
) -> None:
    """Read a folder written by `save`, under any plan, into the shards of this one.

    `held`: the names that this rank has a place for; None if it has one for all.

    Raises:
        FileError: there is no complete checkpoint, or it belongs to another model.
    """
    target = Path(path)
    if not (target / ".metadata").is_file():
        raise FileError(
            f"`{target}` holds no complete checkpoint",
            hints=["name a folder that `parallel.save` wrote"],
        )
    optimizer.zero_grad(set_to_none=True)  # gradients of the weights that are replaced
    before = dict(optimizer.state)
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    if any(p.requires_grad and p not in before for p in parameters):
        optimizer.state.clear()  # torch makes places for the states of all parameters or of none
    model_state, optimizer_state = _raw_states(model, optimizer)
    names = list(model_state)
    if held is not None:
        model_state = {name: value for name, value in model_state.items() if held(name)}
    state: dict[str, Any] = {"model": model_state, "optimizer": optimizer_state}
    try:
        with _files(f"cannot load `{target}` into this model"):
            saved = dcp.FileSystemReader(target).read_metadata().state_dict_metadata.keys()
            _require_names(target, saved, names)
            _require_same_optimizer(target, saved, optimizer_state)
            # Parameters that never got a gradient have no optimizer state in the checkpoint.
            planner = dcp.DefaultLoadPlanner(allow_partial_load=True)
            dcp.load(state, checkpoint_id=target, planner=planner)
    except BaseException:
        optimizer.state.clear()
        optimizer.state.update(before)
        raise
    options = StateDictOptions(strict=held is None)
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


def whole_state(model: nn.Module) -> dict[str, Any]:
    """Every parameter and buffer whole, under its original name, on every rank."""
    return get_model_state_dict(model, options=StateDictOptions(full_state_dict=True))


def set_whole_state(
    model: nn.Module,
    state: dict[str, Any],
    *,
    strict: bool,
    held: Names | None = None,
) -> Any:
    """Load whole tensors, the same on every rank, into whatever the model holds now.

    `held`: whether this rank has a tensor of that name at all; None if it has all of them.

    Returns missing and unexpected keys, as `nn.Module.load_state_dict`.

    Raises:
        ModelError: there are such keys and `strict` is set, or a shape differs; nothing is changed.
    """
    wanted = model.state_dict()
    missing = [name for name in wanted if name not in state]
    unexpected = [name for name in state if name not in wanted]
    if strict and (missing or unexpected):
        raise ModelError(
            f"the state does not fit the model: {len(missing)} tensors missing,"
            f" {len(unexpected)} unexpected",
            where="\n".join(
                [f"missing: {name}" for name in missing[:1]]
                + [f"unexpected: {name}" for name in unexpected[:1]]
            ),
            hints=["load it with strict=False if that is meant"],
        )
    known = {name: value for name, value in state.items() if name in wanted}
    for name, value in known.items():
        if isinstance(value, torch.Tensor) and value.shape != wanted[name].shape:
            raise ModelError(
                f"`{name}` is {tuple(wanted[name].shape)} in the model,"
                f" {tuple(value.shape)} in the state"
            )
    if held is not None:
        known = {name: value for name, value in known.items() if held(name)}
    if known:
        set_model_state_dict(
            model, known, options=StateDictOptions(full_state_dict=True, strict=False)
        )
    return _IncompatibleKeys(missing, unexpected)


class _IncompatibleKeys(NamedTuple):
    missing_keys: list[str]
    unexpected_keys: list[str]


def _states(model: nn.Module, optimizer: torch.optim.Optimizer) -> tuple[dict[str, Any], Any]:
    """Model and optimizer states by original names.

    torch gives an optimizer that never stepped its states by a step with zero gradients, which
    counts as one; they are taken away again.
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
    """As torch gives them; no optimizer states where nothing of the model is stepped here."""
    if _is_of(optimizer, model):
        return get_state_dict(model, optimizer)
    return get_model_state_dict(model), {"state": {}, "param_groups": []}


def _is_of(optimizer: torch.optim.Optimizer, model: nn.Module) -> bool:
    known = set(model.parameters())
    return all(p in known for group in optimizer.param_groups for p in group["params"])


def _whole_groups(groups: list[dict[str, Any]], model: nn.Module) -> list[dict[str, Any]]:
    """Parameter groups over all ranks; settings are those of the first rank that has the group."""
    every: list[list[dict[str, Any]]] = [[] for _ in range(dist.get_world_size())]
    dist.all_gather_object(every, groups)
    order = {name: number for number, (name, _) in enumerate(model.named_parameters())}
    merged = []
    for number in range(max(map(len, every))):
        parts = [found[number] for found in every if number < len(found)]
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
            f"`{target}` was saved with another optimizer: it kept {', '.join(sorted(there))},"
            f" this one keeps {', '.join(sorted(here))}",
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
    """A parameter that had not been stepped when the states were saved has not been stepped now."""
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
            raise  # the folder is not to blame
        causes = getattr(error, "failures", {}) or {}
        first = next((str(cause[0]) for cause in causes.values()), str(error))
        raise FileError(f"{what}: {first.strip().splitlines()[0]}") from None


def _on_first_rank(work: Callable[[], None], what: str, world: World) -> None:
    """Rank 0 does `work`; all ranks go on together, or all raise."""
    error: FileError | None = None
    if world.rank == 0:
        try:
            with _files(what):
                work()
        except FileError as found:
            error = found
    (failures,) = sum_over_ranks([float(error is not None)], world)
    if error is not None:
        raise error
    if failures:
        raise FileError(f"{what}: rank 0 could not, its output says why")
