"""Sources of weights: an init function, tensors by name, or files of which boxes are read."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Collection, Iterable, Mapping
from pathlib import Path
from typing import TypeAlias

import torch
from torch import Tensor, nn

from engines.state.checkpoint.agreement import Alone
from engines.state.checkpoint.folder import is_checkpoint
from engines.state.checkpoint.load import has_save, open_save
from engines.state.stored import Form, Given, SafetensorsFiles, Saved, Stored
from profiles.errors import InputError, ModelError, a_type, near_misses

Init: TypeAlias = Callable[[nn.Module], object]
"""Fills the parameters and buffers that its module holds itself, as `model.apply` calls it."""

Weights: TypeAlias = Init | Mapping[str, Tensor] | str | os.PathLike[str]

MOST_SHOWN = 6
"""Tensors that do not fit, in an error."""


def open_weights(weights: Weights) -> Init | Stored:
    """`weights` as a function or as tensors by name; only the table of names is read.

    A path is that of a safetensors file, of an index of several, of the folder of either, or of a
    folder that `parallel.save` wrote into.

    Raises:
        FileError: there is none of these, or it cannot be parsed. Nothing is unpickled.
        InputError: neither a function, nor a mapping, nor a path; or safetensors is not installed.
    """
    if isinstance(weights, nn.Module):
        raise InputError(
            f"weights is a module ({type(weights).__name__})",
            hints=["give its tensors: `weights=other.state_dict()`"],
        )
    if isinstance(weights, str | os.PathLike):
        return open_files(Path(weights))
    if isinstance(weights, Mapping):
        return Given(weights)
    if callable(weights):
        return weights
    raise InputError(
        f"weights is {a_type(weights)}",
        hints=["give init(module), a mapping of names to tensors, or a path to safetensors files"],
    )


def open_files(path: Path) -> Stored:
    """The tensors of safetensors files, or of a checkpoint.

    Raises:
        FileError: as `open_weights`.
    """
    if is_checkpoint(path) or has_save(path):
        return Saved(open_save(path, step="newest", peers=Alone(), verify=False))
    return SafetensorsFiles(path)


def matched(
    wanted: Mapping[str, Form],
    stored: Stored,
    *,
    called: Mapping[str, Collection[str]],
    local: Collection[str],
    left_out: Iterable[str] = (),
    what: str = "`weights`",
    strict: bool = True,
    cast: bool = False,
) -> dict[str, str]:
    """The names under which the tensors that this rank holds are stored; no value is read.

    Dtypes may differ where nothing is lost: bfloat16 in files may become float32 here.

    Args:
        wanted: whole tensors of the model by first name.
        called: all names under which each may be stored, tied ones among them.
        local: those of `wanted` that this rank has a part of: of others the files may be elsewhere.
        left_out: patterns of names that may be stored though the model has none of them.
        what: is stored, for errors.
        strict: refuse missing and unexpected tensors; without it they stay as they are.
        cast: allow a dtype that rounds.

    Raises:
        ModelError: names what is missing, unexpected, of another shape or dtype.
    """
    there = {
        name: next((key for key in called[name] if key in stored.names), None) for name in wanted
    }
    known = {each for names in called.values() for each in names}
    missing = [name for name, key in there.items() if key is None]
    problems: list[str] = []
    hints: list[str] = []
    if strict:
        problems += [f"{what} has no `{name}`" for name in missing]
        left_out = [*left_out]
        extra = [
            name
            for name in stored.names
            if name not in known and not any(re.search(each, name) for each in left_out)
        ]
        problems += [f"{what} has `{name}`, the model has not" for name in extra]
        near = near_misses(missing[0], list(stored.names)) if missing else []
        if near:
            hints.append(f"did you mean {' or '.join(f'`{n}`' for n in near)}?")
    result = {name: key for name in local if (key := there.get(name)) is not None}
    for name, key in result.items():
        here, form = wanted[name], stored.form(key)
        if here.shape != form.shape:
            problems.append(
                f"`{key}` in {what} has the shape {form.shape}, in the model {here.shape}"
            )
        elif not cast and not _holds(here.dtype, form.dtype):
            problems.append(f"`{key}` in {what} is {form}, in the model {here}: it would round")
            hints.append(f"build the model in {str(form.dtype).removeprefix('torch.')}")
    if not problems:
        return result
    more = len(problems) - MOST_SHOWN
    raise ModelError(
        problems[0],
        where="\n".join(
            [
                f"{len(stored.names)} tensors, the model has {len(wanted)}",
                *problems[1:MOST_SHOWN],
                *([f"and {more} more"] if more > 0 else []),
            ]
        ),
        hints=list(dict.fromkeys(hints)),
    )


def _holds(here: torch.dtype, stored: torch.dtype) -> bool:
    """True if no value of the dtype that is stored is rounded here."""
    return here is stored or here in _WIDER.get(stored, ())


_WIDER = {
    torch.bfloat16: (torch.float32, torch.float64),
    torch.float16: (torch.float32, torch.float64),
    torch.float32: (torch.float64,),
}


def names_of(tensors: Iterable[tuple[str, Tensor]]) -> dict[str, list[str]]:
    """All names of each tensor by its first one."""
    by_tensor: dict[Tensor, list[str]] = {}
    for name, tensor in tensors:
        by_tensor.setdefault(tensor, []).append(name)
    return {names[0]: names for names in by_tensor.values()}


def storable_names(model: nn.Module) -> dict[str, list[str]]:
    """All names under which the tensors of the state dict of `model` may be stored, by first name.

    A model of transformers may be stored without its head, under names without its prefix, or be
    the part of a stored one that has this prefix.
    """
    stored = set(model.state_dict())
    prefix = getattr(model, "base_model_prefix", None)
    prefix = f"{prefix}." if isinstance(prefix, str) and prefix else ""
    result = {}
    tensors = (
        *model.named_parameters(remove_duplicate=False),
        *model.named_buffers(remove_duplicate=False),
    )
    for first, names in names_of(tensors).items():
        if not stored.isdisjoint(names):
            others = [
                n.removeprefix(prefix) if n.startswith(prefix) else prefix + n
                for n in (names if prefix else ())
            ]
            result[first] = [*names, *(name for name in others if name not in stored)]
    return result


def left_out_names(model: nn.Module) -> list[str]:
    """Patterns of names that files of such a model may have in excess, as transformers says it."""
    return [*(getattr(model, "_keys_to_ignore_on_load_unexpected", None) or ())]
