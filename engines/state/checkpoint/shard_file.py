"""One rank's tensors in a safetensors file, written with its hash and read chunk by chunk.

Written here, since safetensors' own writer first copies all tensors to bytes and cannot hash as it
goes; read by safetensors. Format: https://github.com/huggingface/safetensors#format.
"""

from __future__ import annotations

import hashlib
import json
import math
import operator
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Self

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from engines.state.checkpoint.manifest import Manifest, SavedChunk, SavedFile, SavedTensor
from engines.state.checkpoint.values import dtype_of
from profiles.errors import FileError
from profiles.record import open_regular
from profiles.units import MIB

_NAMES = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.float8_e4m3fn: "F8_E4M3",
    torch.float8_e5m2: "F8_E5M2",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.int16: "I16",
    torch.int8: "I8",
    torch.uint64: "U64",
    torch.uint32: "U32",
    torch.uint16: "U16",
    torch.uint8: "U8",
    torch.bool: "BOOL",
}
DTYPES = {name: dtype for dtype, name in _NAMES.items()}
"""By their names in safetensors files."""
_READ_BYTES = 8 * MIB


def write_shard(path: Path, tensors: Mapping[str, Tensor]) -> SavedFile:
    """Write a new file and wait until the disk has it; one tensor at a time is in host memory."""
    forms = {key: (tuple(tensor.shape), tensor.dtype) for key, tensor in tensors.items()}
    writer = ShardWriter(path, forms)
    with writer:
        for tensor in tensors.values():
            writer.write(tensor)
    return writer.saved


class ShardWriter:
    """A new file whose tensors come one by one, in the order that was said.

    Attributes:
        saved: the file, when the context is left and the disk has it.
    """

    saved: SavedFile

    def __init__(
        self,
        path: Path,
        forms: Mapping[str, tuple[Sequence[int], torch.dtype]],
        metadata: Mapping[str, str] | None = None,
    ) -> None:
        """`forms`: shapes and dtypes by name; `metadata`: texts for the header."""
        header: dict[str, Any] = {"__metadata__": dict(metadata)} if metadata else {}
        place = 0
        for key, (shape, dtype) in forms.items():
            nbytes = math.prod(shape) * dtype.itemsize
            header[key] = {
                "dtype": _name(dtype, key),
                "shape": [*shape, *([2] * dtype.is_complex)],
                "data_offsets": [place, place + nbytes],
            }
            place += nbytes
        text = json.dumps(header).encode()
        text += b" " * (-len(text) % 8)  # tensors begin at a multiple of eight bytes
        self._digest, self._size = hashlib.sha256(), 0
        self._file = open(path, "xb")  # noqa: SIM115 (closed by __exit__)
        self._write(memoryview(len(text).to_bytes(8, "little") + text))

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, *error: object) -> None:
        with self._file as file:
            if kind is None:
                file.flush()
                os.fsync(file.fileno())
                self.saved = SavedFile(bytes=self._size, sha256=self._digest.hexdigest())

    def write(self, tensor: Tensor) -> None:
        """Append the next tensor."""
        if tensor.numel():
            flat = _stored(tensor).cpu().contiguous().reshape(-1).view(torch.uint8)
            self._write(flat.numpy().data)

    def _write(self, part: memoryview) -> None:
        self._file.write(part)
        self._digest.update(part)
        self._size += len(part)


def _stored(tensor: Tensor) -> Tensor:
    """Complex numbers as pairs of reals: the format has none."""
    tensor = tensor.detach()
    return torch.view_as_real(tensor.resolve_conj()) if tensor.is_complex() else tensor


def _name(dtype: torch.dtype, key: str) -> str:
    real = {torch.complex64: torch.float32, torch.complex128: torch.float64}.get(dtype, dtype)
    if real not in _NAMES:
        raise FileError(f"`{key}` is {dtype}, which checkpoints cannot hold")
    return _NAMES[real]


def file_problem(path: Path, saved: SavedFile) -> str:
    """Read a file and compare it with the one that was saved: the first difference, else empty."""
    digest = hashlib.sha256()
    try:
        with open_regular(path) as file:
            size = os.fstat(file.fileno()).st_size
            if size != saved.bytes:
                return f"`{path.name}` has {size:,} bytes, {saved.bytes:,} were saved"
            while part := file.read(_READ_BYTES):
                digest.update(part)
    except FileError as error:
        return error.what
    except OSError as error:
        return f"`{path.name}` cannot be read: {error.strerror}"
    same = digest.hexdigest() == saved.sha256
    return "" if same else f"the content of `{path.name}` does not match its SHA-256"


class ShardReader:
    """Tensors of a checkpoint, read slice by slice from the files of all ranks."""

    def __init__(self, folder: Path, manifest: Manifest) -> None:
        self._folder, self._tensors = folder, manifest.tensors
        self._open: dict[str, Any] = {}

    def tensor(self, name: str) -> Tensor:
        """The whole tensor `name`.

        Raises:
            FileError: there is none, or its file cannot be read.
        """
        if name not in self._tensors:
            raise FileError(f"`{self._folder}` has no tensor `{name}`")
        saved = self._tensors[name]
        self._require_stored(name, saved)
        whole = torch.empty(saved.shape, dtype=dtype_of(saved.dtype))
        self.read(name, whole, offsets=(0,) * len(saved.shape))
        return whole

    def _require_stored(self, name: str, saved: SavedTensor) -> None:
        """Refuse a shape that the files have no room for, before memory is taken for it."""
        needed = math.prod(saved.shape) * dtype_of(saved.dtype).itemsize
        paths = {self._folder / chunk.file for chunk in saved.chunks}
        try:
            stored = sum(path.stat().st_size for path in paths)
        except OSError as error:
            raise FileError(f"cannot read `{self._folder}`: {error}") from None
        if needed > stored:
            raise FileError(
                f"`{name}` takes {needed:,} bytes, its files in `{self._folder}` have {stored:,}"
            )

    def require_readable(self, name: str) -> None:
        """Compare what the files say of the chunks of `name` with the manifest; no value is read.

        Raises:
            FileError: a file has no such chunk, or one of another shape or dtype; or together they
                are not the tensor.
        """
        saved = self._tensors[name]
        dtype, count = dtype_of(saved.dtype), 0
        for chunk in saved.chunks:
            ends = map(operator.add, chunk.offsets, chunk.sizes)
            if all(map(operator.le, ends, saved.shape)):
                count += math.prod(chunk.sizes)
            try:
                stored = self._file(chunk).get_slice(chunk.key)
                shape, kind = list(stored.get_shape()), stored.get_dtype()
            except (OSError, SafetensorError) as error:
                raise FileError(f"cannot read `{self._folder / chunk.file}`: {error}") from None
            if shape != [*chunk.sizes, *([2] * dtype.is_complex)] or kind != _name(dtype, name):
                raise FileError(
                    f"`{chunk.key}` in `{self._folder / chunk.file}` is {kind} of {shape}, its"
                    f" manifest says {saved.dtype} of {list(chunk.sizes)}"
                )
        if count != math.prod(saved.shape):
            raise FileError(
                f"`{self._folder}` has {count:,} of {math.prod(saved.shape):,} elements of `{name}`"
            )

    @torch.no_grad()
    def read(self, name: str, target: Tensor, *, offsets: Sequence[int]) -> None:
        """Copy into `target`, the box at `offsets` of the whole tensor `name`.

        Raises:
            FileError: the file cannot be read, or no chunk has some of the elements.
        """
        count = 0
        for chunk in self._tensors[name].chunks:
            box = overlap(chunk, offsets, target.shape)
            if box is not None:
                inside, into = box
                part = self._slice(chunk, inside, complex_=target.is_complex())
                if part.shape != target[into].shape:
                    raise FileError(
                        f"`{chunk.key}` in `{self._folder / chunk.file}` has another shape than"
                        " its manifest says"
                    )
                target[into].copy_(part)
                count += part.numel()
        if count != target.numel():
            raise FileError(
                f"`{self._folder}` has {count:,} of {target.numel():,} elements of `{name}`"
            )

    def _file(self, chunk: SavedChunk) -> Any:
        if chunk.file not in self._open:
            path = self._folder / chunk.file
            open_regular(path).close()  # safetensors would wait for a FIFO's writer
            self._open[chunk.file] = safe_open(str(path), framework="pt", device="cpu")
        return self._open[chunk.file]

    def _slice(self, chunk: SavedChunk, inside: tuple[slice, ...], *, complex_: bool) -> Tensor:
        try:
            file = self._file(chunk)
            whole = not inside  # a number: it has no dimension to slice
            part: Tensor = (
                file.get_tensor(chunk.key) if whole else file.get_slice(chunk.key)[inside]
            )
            return torch.view_as_complex(part) if complex_ else part
        except (OSError, SafetensorError, RuntimeError, IndexError) as error:
            raise FileError(f"cannot read `{self._folder / chunk.file}`: {error}") from None


Slices = tuple[slice, ...]


def overlap(
    chunk: SavedChunk, offsets: Sequence[int], sizes: Sequence[int]
) -> tuple[Slices, Slices] | None:
    """The elements that a chunk and a box share, as slices of the one and of the other."""
    inside, into = [], []
    for start, length, offset, size in zip(chunk.offsets, chunk.sizes, offsets, sizes, strict=True):
        low, high = max(start, offset), min(start + length, offset + size)
        if low >= high:
            return None
        inside.append(slice(low - start, high - start))
        into.append(slice(low - offset, high - offset))
    return tuple(inside), tuple(into)
