"""Sources of weights for a model on the meta device: an init function, tensors by name, or
safetensors files that are read tensor by tensor."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Protocol, TypeAlias

from torch import Tensor, nn

from profiles.errors import FileError, InputError
from profiles.record import json_file, open_regular

Init: TypeAlias = Callable[[nn.Module], object]
"""Fills the parameters and buffers that its module holds itself, as `model.apply` calls it."""

Weights: TypeAlias = Init | Mapping[str, Tensor] | str | os.PathLike[str]

_SINGLE = "model.safetensors"
_INDEX = "model.safetensors.index.json"  # Hugging Face's: {"weight_map": {name: file}}


def open_weights(weights: Weights) -> Init | Mapping[str, Tensor]:
    """`weights` as a function or as tensors by name; only the table of names is read.

    Raises:
        FileError: there is no safetensors file or index, or it cannot be parsed.
        InputError: neither a function, nor a mapping, nor a path; or safetensors is not installed.
    """
    if isinstance(weights, nn.Module):
        raise InputError(
            f"weights is a module ({type(weights).__name__})",
            hints=["give its tensors: `weights=other.state_dict()`"],
        )
    if isinstance(weights, str | os.PathLike):
        return SafetensorsFiles(Path(weights))
    if isinstance(weights, Mapping) or callable(weights):
        return weights
    raise InputError(
        f"weights is a {type(weights).__name__}",
        hints=["give init(module), a mapping of names to tensors, or a path to safetensors files"],
    )


class _File(Protocol):
    """An open safetensors file."""

    def keys(self) -> Iterable[str]: ...

    def get_tensor(self, name: str) -> Tensor: ...


class SafetensorsFiles(Mapping[str, Tensor]):
    """Tensors by name in one file, or in the shards that an index lists.

    A tensor is read when it is looked up, and a shard opened with its first tensor: those of other
    ranks need not exist.
    """

    def __init__(self, path: Path) -> None:
        """`path`: a safetensors file, an index, or the folder of either."""
        self._file_of: dict[str, Path] = {}
        self._open: dict[Path, _File] = {}
        path = _inside(path) if path.is_dir() else path
        if path.suffix == ".json":
            self._file_of = _index(path)
        elif path.suffix == ".safetensors":
            self._open[path] = _opened(path)
            self._file_of = dict.fromkeys(self._open[path].keys(), path)
        else:
            raise FileError(
                f"`{path}` is no safetensors file, index or folder of them",
                hints=["of a torch file: `weights=torch.load(path, mmap=True, weights_only=True)`"],
            )

    def __getitem__(self, name: str) -> Tensor:
        path = self._file_of[name]
        if path not in self._open:
            self._open[path] = _opened(path)
        from safetensors import SafetensorError

        try:
            return self._open[path].get_tensor(name)
        except (SafetensorError, OSError) as error:
            raise FileError(f"`{path}` cannot be read as safetensors: {error}") from None

    def __iter__(self) -> Iterator[str]:
        return iter(self._file_of)

    def __len__(self) -> int:
        return len(self._file_of)

    def __contains__(self, name: object) -> bool:
        return name in self._file_of  # Mapping's own would read the tensor


def _inside(folder: Path) -> Path:
    file = next((folder / name for name in (_INDEX, _SINGLE) if (folder / name).exists()), None)
    if file is None:
        raise FileError(f"`{folder}` has neither `{_INDEX}` nor `{_SINGLE}`")
    return file


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


def _opened(path: Path) -> _File:
    try:
        from safetensors import SafetensorError, safe_open
    except ModuleNotFoundError:
        raise InputError(
            f"`{path}` is read with the package `safetensors`, which is not installed",
            hints=["pip install safetensors"],
        ) from None
    open_regular(path).close()  # safetensors would wait for a FIFO's writer
    try:
        file: _File = safe_open(path, framework="pt", device="cpu")
    except (OSError, SafetensorError) as error:
        raise FileError(f"`{path}` cannot be read as safetensors: {error}") from None
    return file
