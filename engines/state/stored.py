"""Whole tensors under names, of which a rank reads the boxes that it keeps: in files, or a dict."""

from __future__ import annotations

import math
import os
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor

from engines.state.checkpoint.load import SavedStates
from engines.state.checkpoint.shard_file import DTYPES
from engines.state.checkpoint.training_state import MODEL
from engines.state.checkpoint.values import dtype_of
from profiles.errors import FileError, InputError, a_type
from profiles.record import json_file, open_regular

INDEX, SINGLE = "model.safetensors.index.json", "model.safetensors"
"""As Hugging Face writes them; the index is {"weight_map": {name of a tensor: file}}."""


@dataclass(frozen=True, slots=True)
class Form:
    """Shape and dtype of a whole tensor."""

    shape: tuple[int, ...]
    dtype: torch.dtype

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize

    def __str__(self) -> str:
        return f"{self.shape} {str(self.dtype).removeprefix('torch.')}"


class Stored(Protocol):
    """Whole tensors by name. Names are known at once, forms and values when they are asked for."""

    @property
    def names(self) -> Collection[str]: ...

    def form(self, name: str) -> Form: ...

    def read(self, name: str, target: Tensor, *, offsets: Sequence[int]) -> None:
        """Copy the box at `offsets` into `target`, in the dtype of `target`."""


class Given:
    """Tensors of a mapping, say a state dict."""

    def __init__(self, tensors: Mapping[str, Tensor]) -> None:
        self._tensors = tensors

    @property
    def names(self) -> Collection[str]:
        return self._tensors.keys()

    def form(self, name: str) -> Form:
        tensor = self._tensors[name]
        if not isinstance(tensor, Tensor):
            raise InputError(f"`{name}` in `weights` is {a_type(tensor)}, no tensor")
        return Form(tuple(tensor.shape), tensor.dtype)

    def read(self, name: str, target: Tensor, *, offsets: Sequence[int]) -> None:
        target.copy_(self._tensors[name].detach()[box(offsets, target.shape)])


class SafetensorsFiles:
    """Tensors in one file, or in the shards that an index lists.

    A box is read when it is asked for, and a shard opened with its first tensor: those of other
    ranks need not exist.
    """

    def __init__(self, path: Path) -> None:
        """`path`: a safetensors file, an index, or the folder of either."""
        self._open: dict[Path, Any] = {}
        path = _inside(path) if path.is_dir() else path
        if path.suffix == ".json":
            self._file_of = _index(path)
        elif path.suffix == ".safetensors":
            self._open[path] = _opened(path)
            self._file_of = dict.fromkeys(self._open[path].keys(), path)
        else:
            raise _not_safetensors(path)

    @property
    def names(self) -> Collection[str]:
        return self._file_of.keys()

    def form(self, name: str) -> Form:
        with self._reading(name) as file:
            stored = file.get_slice(name)
            shape, kind = tuple(stored.get_shape()), str(stored.get_dtype())
        if kind not in DTYPES:
            raise FileError(f"`{name}` in `{self._file_of[name]}` is {kind}, unknown here")
        return Form(shape, DTYPES[kind])

    def read(self, name: str, target: Tensor, *, offsets: Sequence[int]) -> None:
        with self._reading(name) as file:
            if target.dim():
                part = file.get_slice(name)[box(offsets, target.shape)]
            else:
                part = file.get_tensor(name)
        target.copy_(part)

    @contextmanager
    def _reading(self, name: str) -> Iterator[Any]:
        from safetensors import SafetensorError

        path = self._file_of[name]
        if path not in self._open:
            self._open.clear()  # one at a time: it is mapped into memory
            self._open[path] = _opened(path)
        try:
            yield self._open[path]
        except (SafetensorError, OSError) as error:
            raise FileError(f"`{path}` cannot be read as safetensors: {error}") from None


class Saved:
    """Parameters and buffers of a checkpoint that `parallel.save` wrote."""

    def __init__(self, states: SavedStates) -> None:
        self._states = states
        tensors = states.tensors
        self._keys = {n.removeprefix(MODEL): n for n in tensors if n.startswith(MODEL)}

    @property
    def names(self) -> Collection[str]:
        return self._keys.keys()

    def form(self, name: str) -> Form:
        key = self._keys[name]
        self._states.reader.require_readable(key)
        saved = self._states.tensors[key]
        return Form(tuple(saved.shape), dtype_of(saved.dtype))

    def read(self, name: str, target: Tensor, *, offsets: Sequence[int]) -> None:
        self._states.reader.read(self._keys[name], target, offsets=offsets)


def box(offsets: Sequence[int], sizes: Sequence[int]) -> tuple[slice, ...]:
    """The slices of a box."""
    return tuple(slice(start, start + size) for start, size in zip(offsets, sizes, strict=True))


def _inside(folder: Path) -> Path:
    for name in (INDEX, SINGLE):
        if (folder / name).exists():
            return folder / name
    pickles = sorted(path for path in folder.iterdir() if path.suffix in _PICKLES)
    if pickles:
        raise _not_safetensors(pickles[0])
    raise FileError(f"`{folder}` has neither `{INDEX}` nor `{SINGLE}`")


_PICKLES = (".bin", ".pt", ".pth", ".ckpt", ".pkl")


def _not_safetensors(path: Path) -> FileError:
    what = f"`{path}` is no safetensors file, index or folder of them"
    if path.suffix in _PICKLES:
        what += ": a pickle may run code when it is read, and is read whole by every rank"
    return FileError(
        what,
        hints=[
            "of a Hugging Face model: `AutoModel.from_pretrained(old).save_pretrained(new)` once",
            "of a torch file: `weights=torch.load(path, mmap=True, weights_only=True)`",
        ],
    )


def _index(path: Path) -> dict[str, Path]:
    files = json_file(path).get("weight_map")
    if not isinstance(files, dict) or not all(map(_is_beside, files.values())):
        raise FileError(
            f"`{path}` is no index of safetensors shards",
            hints=['it holds {"weight_map": {name of a tensor: name of a file in its folder}}'],
        )
    return {name: path.parent / file for name, file in files.items()}


def _is_beside(file: object) -> bool:
    """True for the name of a file in the index's own folder."""
    return isinstance(file, str) and file == os.path.basename(file) and "\0" not in file


def _opened(path: Path) -> Any:
    try:
        from safetensors import SafetensorError, safe_open
    except ModuleNotFoundError:
        raise InputError(
            f"`{path}` is read with the package `safetensors`, which is not installed",
            hints=["pip install safetensors"],
        ) from None
    open_regular(path).close()  # safetensors would wait for a FIFO's writer
    try:
        return safe_open(str(path), framework="pt", device="cpu")
    except (OSError, RuntimeError, SafetensorError) as error:  # torch maps the file
        raise FileError(f"`{path}` cannot be read as safetensors: {error}") from None
