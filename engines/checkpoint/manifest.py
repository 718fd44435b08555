"""The manifest of a checkpoint: its files with sizes and hashes, and where each tensor lies."""

from __future__ import annotations

import hashlib
import json
import re
from pathlib import Path
from typing import Any, Literal

from pydantic import Field

from profiles.errors import FileError
from profiles.record import Record

MANIFEST = "manifest.json"
FILE_NAME = re.compile(r"rank-\d{5}\.safetensors")


def file_of(rank: int) -> str:
    """Name of the file that `rank` writes."""
    return f"rank-{rank:05d}.safetensors"


class SavedFile(Record):
    """A file by its size in bytes and its SHA-256."""

    bytes: int = Field(ge=0)
    sha256: str


class SavedChunk(Record):
    """A box of a tensor: `sizes` elements at `offsets` in the whole, under `key` in `file`."""

    offsets: tuple[int, ...]
    sizes: tuple[int, ...]
    file: str = Field(pattern=FILE_NAME.pattern)
    key: str


class SavedTensor(Record):
    """A whole tensor and the chunks that make it up."""

    dtype: str
    shape: tuple[int, ...]
    chunks: tuple[SavedChunk, ...]


class Manifest(Record):
    """All of a checkpoint but its tensors' values.

    Attributes:
        step: optimizer steps of the training when it was saved.
        saved_at: UTC time, ISO 8601.
        plan: under which it was saved; any other can load it.
        versions: of this project, torch and Python.
        tensors: by name: `model.*`, `optimizer.state.*`, `outer.*`, `replica*.*`, `rank*.*`.
        values: what is no tensor, encoded by `engines.checkpoint.values`.
        ranks: of each rank: random states and registered objects, encoded.
    """

    format: Literal[1] = 1
    step: int = Field(ge=0)
    saved_at: str
    plan: str
    world_size: int = Field(ge=1)
    versions: dict[str, str]
    files: dict[str, SavedFile]
    tensors: dict[str, SavedTensor]
    values: dict[str, Any]
    ranks: list[dict[str, Any]]

    def to_bytes(self) -> bytes:
        """JSON with the SHA-256 of its own content in the first line."""
        content = json.dumps(self.model_dump(mode="json"), ensure_ascii=False).encode()
        return f'{{"sha256": "{hashlib.sha256(content).hexdigest()}", "manifest":\n'.encode() + (
            content + b"\n}\n"
        )


def read_manifest(folder: Path) -> Manifest:
    """The manifest of the checkpoint in `folder`, verified by its own hash.

    Raises:
        FileError: missing, cut off, or altered.
    """
    path = folder / MANIFEST
    try:
        content = path.read_bytes()
    except OSError as error:
        raise FileError(f"cannot read `{path}`: {error.strerror}") from None
    first, _, rest = content.partition(b"\n")
    body = rest.removesuffix(b"\n}\n")
    digest = hashlib.sha256(body).hexdigest()
    if first != f'{{"sha256": "{digest}", "manifest":'.encode() or body == rest:
        raise FileError(
            f"`{path}` is damaged: its content does not match its SHA-256",
            hints=["load another step of this folder: `parallel.load(folder, step=...)`"],
        )
    try:
        data = json.loads(body)
    except (ValueError, RecursionError):
        raise FileError(f"`{path}` is not JSON") from None
    if isinstance(data, dict) and data.get("format") != 1:
        raise FileError(
            f"`{path}` has format {data.get('format')!r}, this release reads 1",
            hints=["load it with the release that wrote it, or a newer one"],
        )
    return Manifest.build(data, where=str(path))
