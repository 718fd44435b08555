"""Files of tensors: readable by safetensors, hashed, and read box by box."""

from __future__ import annotations

import hashlib
from pathlib import Path

import pytest
import safetensors.torch
import torch

from engines.state.checkpoint.manifest import Manifest, SavedChunk, SavedTensor, file_of
from engines.state.checkpoint.shard_file import ShardReader, file_problem, write_shard
from profiles.errors import FileError

EVERY = {
    str(dtype).removeprefix("torch."): torch.arange(6).reshape(2, 3).to(dtype)
    for dtype in (
        torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.float8_e4m3fn,
        torch.float8_e5m2, torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8,
        torch.uint16, torch.uint32, torch.uint64, torch.bool,
    )
}  # fmt: skip
EVERY |= {
    "a number": torch.tensor(3.5),
    "nothing": torch.empty(0, 4),
    "transposed": torch.randn(3, 5).t(),
    "expanded": torch.ones(1).expand(4),
}


def bits(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.contiguous().reshape(-1).view(torch.uint8)


def test_safetensors_reads_every_dtype_and_layout(tmp_path: Path) -> None:
    saved = write_shard(tmp_path / "x.safetensors", EVERY)
    back = safetensors.torch.load_file(tmp_path / "x.safetensors")
    assert back.keys() == EVERY.keys()
    for name, tensor in EVERY.items():
        assert back[name].dtype == tensor.dtype
        assert torch.equal(bits(back[name]), bits(tensor))
    content = (tmp_path / "x.safetensors").read_bytes()
    assert saved.bytes == len(content)
    assert saved.sha256 == hashlib.sha256(content).hexdigest()


def test_a_file_is_never_written_over(tmp_path: Path) -> None:
    (tmp_path / "x.safetensors").symlink_to(tmp_path / "elsewhere")
    with pytest.raises(FileExistsError):
        write_shard(tmp_path / "x.safetensors", EVERY)
    assert not (tmp_path / "elsewhere").exists()


def test_every_flipped_bit_is_a_problem(tmp_path: Path) -> None:
    path = tmp_path / "x.safetensors"
    saved = write_shard(path, {"w": torch.randn(3)})
    content = path.read_bytes()
    for bit in range(8 * len(content)):
        damaged = bytearray(content)
        damaged[bit // 8] ^= 1 << bit % 8
        path.write_bytes(damaged)
        assert "does not match its SHA-256" in file_problem(path, saved)
    path.write_bytes(content[:-1])
    assert "bytes" in file_problem(path, saved)
    path.write_bytes(content)
    assert file_problem(path, saved) == ""


def manifest_of(boxes: list[tuple[int, int, int, int]]) -> Manifest:
    """Of one 4 x 6 tensor in chunks (row, column, rows, columns), one for each rank."""
    chunks = tuple(
        SavedChunk(offsets=(r, c), sizes=(h, w), file=file_of(rank), key="w")
        for rank, (r, c, h, w) in enumerate(boxes)
    )
    tensors = {"w": SavedTensor(dtype="float32", shape=(4, 6), chunks=chunks)}
    return Manifest(
        step=0, saved_at="", plan="", world_size=len(boxes), versions={}, files={}, values={},
        tensors=tensors, ranks=[],
    )  # fmt: skip


def test_any_box_is_put_together_from_any_chunks(tmp_path: Path) -> None:
    whole = torch.arange(24.0).reshape(4, 6)
    boxes = [(0, 0, 1, 6), (1, 0, 3, 2), (1, 2, 3, 4)]
    for rank, (r, c, h, w) in enumerate(boxes):
        write_shard(tmp_path / file_of(rank), {"w": whole[r : r + h, c : c + w]})
    reader = ShardReader(tmp_path, manifest_of(boxes))
    for r, c, h, w in [(0, 0, 4, 6), (0, 1, 3, 3), (2, 3, 1, 1), (1, 0, 2, 6)]:
        target = torch.empty(h, w)
        reader.read("w", target, offsets=(r, c))
        assert torch.equal(target, whole[r : r + h, c : c + w])
    assert torch.equal(reader.tensor("w"), whole)


def test_elements_that_no_chunk_has_are_an_error(tmp_path: Path) -> None:
    write_shard(tmp_path / file_of(0), {"w": torch.ones(2, 6)})
    reader = ShardReader(tmp_path, manifest_of([(0, 0, 2, 6)]))
    with pytest.raises(FileError, match="12 of 24 elements of `w`"):
        reader.tensor("w")


def test_complex_numbers_come_back(tmp_path: Path) -> None:
    values = torch.randn(4, 6, dtype=torch.complex64)
    write_shard(tmp_path / file_of(0), {"w": values})
    manifest = manifest_of([(0, 0, 4, 6)])
    saved = manifest.tensors["w"].model_copy(update={"dtype": "complex64"})
    reader = ShardReader(tmp_path, manifest.model_copy(update={"tensors": {"w": saved}}))
    assert torch.equal(reader.tensor("w"), values)
