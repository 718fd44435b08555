"""The manifest of a checkpoint: its files with sizes and hashes, and where each tensor lies."""

from __future__ import annotations

import hashlib
import json
import math
import re
from pathlib import Path
from typing import Annotated, Any, Literal, Self

from pydantic import Field, NonNegativeInt, model_validator

from profiles.errors import FileError, InputError
from profiles.record import Limits, Record, json_object, read_bytes
from profiles.units import GIB, KIB

MANIFEST = "manifest.json"
MOST_BYTES = GIB
"""Of a manifest: a million chunks, as 1000 ranks have of 1000 tensors, take an eighth of it."""
LIMITS = Limits(
    values=2**26,
    keys=2**26,
    depth=200,
    digits=4300,
    magnitude=math.inf,
    characters=MOST_BYTES,
    has_controls=True,
)
"""States are data of the job: long texts, all digits that Python writes, and three levels of JSON
for one level of a dict with keys that are no text (see `MOST_DEPTH` of the values)."""
FILE_NAME = re.compile(r"rank-[0-9]{5}\.safetensors")
FileName = Annotated[str, Field(pattern=f"^{FILE_NAME.pattern}$")]
"""Anchored: nothing outside the folder is read, or deleted with an old save."""


def file_of(rank: int) -> str:
    """Name of the file that `rank` writes."""
    return f"rank-{rank:05d}.safetensors"


class SavedFile(Record):
    """A file by its size in bytes and its SHA-256."""

    bytes: int = Field(ge=0)
    sha256: str


class SavedChunk(Record):
    """A box of a tensor: `sizes` elements at `offsets` in the whole, under `key` in `file`."""

    offsets: tuple[NonNegativeInt, ...]
    sizes: tuple[NonNegativeInt, ...]
    file: FileName
    key: str


class SavedTensor(Record):
    """A whole tensor and the chunks that make it up."""

    dtype: str
    shape: tuple[NonNegativeInt, ...]
    chunks: tuple[SavedChunk, ...]

    @model_validator(mode="after")
    def _chunks_have_its_dimensions(self) -> Self:
        dimensions = len(self.shape)
        for chunk in self.chunks:
            if not len(chunk.offsets) == len(chunk.sizes) == dimensions:
                raise FileError(f"a chunk of a tensor of {dimensions} dimensions has others")
        return self


class Manifest(Record):
    """All of a checkpoint but its tensors' values.

    Attributes:
        step: optimizer steps of the training when it was saved.
        saved_at: UTC time, ISO 8601.
        plan: under which it was saved; any other can load it.
        versions: of this project, torch and Python.
        tensors: by name: `model.*`, `optimizer.state.*`, `outer.*`, `replica*.*`, `rank*.*`.
        values: what is no tensor, encoded by `engines.state.checkpoint.values`.
        ranks: of each rank: random states and registered objects, encoded.
    """

    format: Literal[1] = 1
    step: int = Field(ge=0)
    saved_at: str
    plan: str
    world_size: int = Field(ge=1)
    versions: dict[str, str]
    files: dict[FileName, SavedFile]
    tensors: dict[str, SavedTensor]
    values: dict[str, Any]
    ranks: list[dict[str, Any]]

    def to_bytes(self) -> bytes:
        """JSON with the SHA-256 of its own content in the first line.

        Raises:
            FileError: larger than what can be read again.
        """
        content = json.dumps(self.model_dump(mode="json"), ensure_ascii=False).encode()
        if len(content) > MOST_BYTES - KIB:
            raise FileError(
                f"the manifest has {len(content):,} bytes, {MOST_BYTES:,} are allowed",
                hints=["keep what is large in tensors: their values are not in the manifest"],
            )
        return f'{{"sha256": "{hashlib.sha256(content).hexdigest()}", "manifest":\n'.encode() + (
            content + b"\n}\n"
        )


def read_manifest(folder: Path) -> Manifest:
    """The manifest of the checkpoint in `folder`, verified by its own hash.

    Raises:
        FileError: missing, cut off, or altered.
    """
    path = folder / MANIFEST
    content = read_bytes(path, most=MOST_BYTES)
    first, _, rest = content.partition(b"\n")
    body = rest.removesuffix(b"\n}\n")
    digest = hashlib.sha256(body).hexdigest()
    if first != f'{{"sha256": "{digest}", "manifest":'.encode() or body == rest:
        raise FileError(
            f"`{path}` is damaged: its content does not match its SHA-256",
            hints=["load another step of this folder: `parallel.load(folder, step=...)`"],
        )
    try:
        data = json_object(body.decode(), where=str(path), limits=LIMITS)
    except UnicodeDecodeError:
        raise FileError(f"`{path}` is not UTF-8 text") from None
    if data.get("format") != 1:
        raise FileError(
            f"`{path}` has format {str(data.get('format'))[:20]!r}, this release reads 1",
            hints=["load it with the release that wrote it, or a newer one"],
        )
    try:
        return Manifest.build(data)
    except InputError as error:
        raise FileError(f"`{path}` is damaged: {error.what}", where=error.where) from None
