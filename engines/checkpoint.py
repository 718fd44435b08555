"""Saved weights and optimizer states: one format for every plan and world size.

torch.distributed.checkpoint holds whole logical tensors in pieces, so what one plan saved another
plan loads. Names are those of the unwrapped model.
"""

from __future__ import annotations

import os
import shutil
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

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

from profiles.errors import FileError

PathLike = str | os.PathLike[str]


def save(path: PathLike, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    """Write the folder `path`; all ranks call it.

    The pieces go to a folder beside it, which replaces an older `path` only when it is complete:
    an interrupted save leaves the old one.

    Raises:
        FileError: the folder cannot be written.
    """
    target = Path(path)
    partial = target.with_name(target.name + ".partial")
    model_state, optimizer_state = get_state_dict(model, optimizer)
    with _files(f"cannot write `{target}`"):
        if _is_first():
            shutil.rmtree(partial, ignore_errors=True)
            target.parent.mkdir(parents=True, exist_ok=True)
        _wait_for_all()
        state = {"model": model_state, "optimizer": optimizer_state}
        dcp.save(state, checkpoint_id=partial)
        if _is_first():
            _replace(target, partial)
        _wait_for_all()


def load(path: PathLike, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    """Read a folder written by `save`, under any plan, into the shards of this one.

    Raises:
        FileError: there is no complete checkpoint, or it belongs to another model.
    """
    target = Path(path)
    if not (target / ".metadata").is_file():
        raise FileError(
            f"`{target}` holds no complete checkpoint",
            hints=["name a folder that `parallel.save` wrote"],
        )
    model_state, optimizer_state = get_state_dict(model, optimizer)
    state: dict[str, Any] = {"model": model_state, "optimizer": optimizer_state}
    with _files(f"cannot load `{target}` into this model"):
        _require_names(target, model_state)
        # Parameters that never got a gradient have no optimizer state in the checkpoint.
        dcp.load(
            state, checkpoint_id=target, planner=dcp.DefaultLoadPlanner(allow_partial_load=True)
        )
    set_state_dict(
        model,
        optimizer,
        model_state_dict=state["model"],
        optim_state_dict=state["optimizer"],
    )


def whole_state(model: nn.Module) -> dict[str, Any]:
    """Every parameter and buffer whole, under its original name, on every rank."""
    return get_model_state_dict(model, options=StateDictOptions(full_state_dict=True))


def set_whole_state(model: nn.Module, state: dict[str, Any], *, strict: bool) -> Any:
    """Load whole tensors, the same on every rank, into whatever the model holds now."""
    return set_model_state_dict(
        model, state, options=StateDictOptions(full_state_dict=True, strict=strict)
    )


def _require_names(target: Path, model_state: dict[str, Any]) -> None:
    saved = dcp.FileSystemReader(target).read_metadata().state_dict_metadata
    there = {name.removeprefix("model.") for name in saved if name.startswith("model.")}
    missing, extra = sorted(model_state.keys() - there), sorted(there - model_state.keys())
    if missing or extra:
        raise FileError(
            f"`{target}` belongs to another model: it has {len(there)} tensors, this model"
            f" {len(model_state)}",
            where=f"only here: {missing[0]}" if missing else f"only there: {extra[0]}",
        )


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
        causes = getattr(error, "failures", {}) or {}
        first = next((str(cause[0]) for cause in causes.values()), str(error))
        raise FileError(f"{what}: {first.strip().splitlines()[0]}") from None


def _is_first() -> bool:
    return not dist.is_initialized() or dist.get_rank() == 0


def _wait_for_all() -> None:
    if dist.is_initialized():
        dist.barrier()
