"""Checkpoints of release 0.1, which torch.distributed.checkpoint wrote: read, never written.

Their table is a pickle. It is read by an unpickler that knows the classes of such tables and
nothing else, so that it cannot run code; tensors and values by torch's own restricted one.
"""

from __future__ import annotations

import io
import math
import pickle
import pickletools
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from engines.state.checkpoint.manifest import SavedChunk, SavedTensor, file_of
from engines.state.checkpoint.shard_file import overlap
from engines.state.checkpoint.values import dtype_of
from profiles.errors import FileError
from profiles.record import open_regular, read_bytes

TABLE = ".metadata"
_FILE = re.compile(r"__\d+_\d+\.distcp")
_GROUPS = "optimizer.param_groups."
_FORMAT = "torch.distributed.checkpoint"
_CLASSES = {
    (f"{_FORMAT}.metadata", name)
    for name in (
        "BytesStorageMetadata",
        "ChunkStorageMetadata",
        "Metadata",
        "MetadataIndex",
        "StorageMeta",
        "TensorProperties",
        "TensorStorageMetadata",
        "_MEM_FORMAT_ENCODING",
    )
} | {
    (f"{_FORMAT}.filesystem", "_StorageInfo"),
    ("torch", "Size"),
    ("torch.serialization", "_get_layout"),
    ("collections", "OrderedDict"),
    ("pathlib", "PosixPath"),
}


def is_legacy(path: Path) -> bool:
    """True if the folder is a checkpoint of release 0.1."""
    return (path / TABLE).is_file()


class _Table(pickle.Unpickler):
    """Knows the classes of a table, so that nothing else is made or called."""

    def find_class(self, module: str, name: str) -> Any:
        if module == "torch" and isinstance(getattr(torch, name, None), torch.dtype):
            return getattr(torch, name)
        if (module, name) not in _CLASSES:
            raise pickle.UnpicklingError(f"`{module}.{name}` is not of a checkpoint's table")
        return super().find_class(module, name)


class LegacyReader:
    """Tensors and values by name."""

    def __init__(self, folder: Path) -> None:
        """Raises FileError where the table or a value is none that release 0.1 wrote."""
        self._folder = folder
        self.tensors: dict[str, SavedTensor] = {}
        self.values: dict[str, Any] = {}
        self._places: dict[str, Any] = {}
        groups: dict[int, dict[str, Any]] = {}
        try:
            table = _Table(io.BytesIO(_pickle_of(folder / TABLE))).load()
            for index, place in table.storage_data.items():
                self._places[_key(index.fqn, index.offset)] = place
            for name, item in table.state_dict_metadata.items():
                if hasattr(item, "chunks"):
                    self.tensors[name] = _tensor(name, item)
                    continue
                value = self._stored(name)
                if name.startswith(_GROUPS):
                    number, _, setting = name.removeprefix(_GROUPS).partition(".")
                    groups.setdefault(int(number), {})[setting] = value
                else:
                    self.values[name] = value
        except Exception as error:
            line = (str(error).splitlines() or [type(error).__name__])[0]
            raise FileError(f"`{folder}` cannot be read as a checkpoint: {line}") from None
        if groups:
            self.values[_GROUPS.removesuffix(".")] = [groups[n] for n in sorted(groups)]

    def tensor(self, name: str) -> Tensor:
        """A whole tensor."""
        saved = self.tensors[name]
        stored = sum(self._place(chunk.key)[-1] for chunk in saved.chunks)
        needed = math.prod(saved.shape) * dtype_of(saved.dtype).itemsize
        if needed > stored:
            raise FileError(
                f"`{name}` takes {needed:,} bytes, `{self._folder}` has {stored:,} of it"
            )
        whole = torch.empty(saved.shape, dtype=dtype_of(saved.dtype))
        self.read(name, whole, offsets=(0,) * len(saved.shape))
        return whole

    def require_readable(self, name: str) -> None:
        """Raises FileError where a chunk of `name` has no place in a file."""
        for chunk in self.tensors[name].chunks:
            self._place(chunk.key)

    @torch.no_grad()
    def read(self, name: str, target: Tensor, *, offsets: Sequence[int]) -> None:
        """Copy into `target`, the box at `offsets` of the whole tensor `name`."""
        count = 0
        for chunk in self.tensors[name].chunks:
            box = overlap(chunk, offsets, target.shape)
            if box is not None:
                part = self._stored(chunk.key)[box[0]]
                target[box[1]].copy_(part)
                count += part.numel()
        if count != target.numel():
            raise FileError(f"`{self._folder}` has only a part of `{name}`")

    def _stored(self, key: str) -> Any:
        path, offset, length = self._place(key)
        try:
            with open_regular(path) as file:
                file.seek(offset)
                content = io.BytesIO(file.read(length))
            return torch.load(content, map_location="cpu", weights_only=True)
        except (OSError, RuntimeError, EOFError, ValueError, pickle.UnpicklingError) as error:
            line = (str(error).splitlines() or [type(error).__name__])[0]
            raise FileError(f"cannot read `{path}`: {line}") from None

    def _place(self, key: str) -> tuple[Path, int, int]:
        """File, offset and bytes of a value: no more than the file has."""
        place = self._places.get(key)
        name, offset, length = (
            getattr(place, field, None) for field in ("relative_path", "offset", "length")
        )
        if not isinstance(name, str) or not _FILE.fullmatch(name):
            raise FileError(f"`{name}` is no file of a checkpoint")
        path = self._folder / name
        if not (isinstance(offset, int) and isinstance(length, int) and 0 <= offset < 2**63):
            raise FileError(f"cannot read `{path}`: `{key}` has no place in it")
        try:
            size = path.stat().st_size
        except OSError as error:
            raise FileError(f"cannot read `{path}`: {error.strerror}") from None
        return path, offset, max(0, min(length, size))


def _pickle_of(path: Path) -> bytes:
    """The table, without claims that would make the unpickler take memory for what is not there.

    A position in the memo is an index into an array, and a length is allocated before it is read.
    """
    content = read_bytes(path)
    for opcode, argument, _ in pickletools.genops(content):  # checks lengths
        is_position = opcode.name in ("PUT", "BINPUT", "LONG_BINPUT")
        if is_position and int(argument or 0) > len(content):
            raise FileError(f"`{path}` names entry {argument} of fewer")
    return content


def _tensor(name: str, item: Any) -> SavedTensor:
    return SavedTensor(
        dtype=str(item.properties.dtype).removeprefix("torch."),
        shape=tuple(item.size),
        chunks=tuple(
            SavedChunk(
                offsets=tuple(chunk.offsets),
                sizes=tuple(chunk.sizes),
                file=file_of(0),  # not used: `key` leads to the place
                key=_key(name, chunk.offsets),
            )
            for chunk in item.chunks
        ),
    )


def _key(name: str, offsets: Sequence[int] | None) -> str:
    return name if offsets is None else f"{name}{list(offsets)}"
