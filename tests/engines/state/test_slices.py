"""Slices deal out as torch.chunk does, and fused weights pack by pack."""

from __future__ import annotations

import pytest
import torch

from engines.state.slices import Slice


@pytest.mark.parametrize(("length", "size"), [(8, 2), (99, 2), (99, 4), (5, 4), (3, 4)])
def test_parts_are_those_of_torch_chunk(length: int, size: int) -> None:
    whole = torch.arange(length * 3).reshape(length, 3)
    chunks = [*whole.chunk(size), *[whole[:0]] * size][:size]
    parts = [Slice(0).part(whole, rank=rank, size=size) for rank in range(size)]
    assert all(torch.equal(part, chunk) for part, chunk in zip(parts, chunks, strict=True))
    assert torch.equal(Slice(0).whole(parts), whole)


def test_every_rank_has_the_same_part_of_each_of_three_fused_weights() -> None:
    query, key, value = (torch.full((2, 4), float(n)) for n in range(3))
    fused = torch.cat([query, key, value], 1)
    parts = [Slice(1, packs=3).part(fused, rank=rank, size=2) for rank in range(2)]
    assert parts[0].tolist() == parts[1].tolist() == [[0, 0, 1, 1, 2, 2]] * 2
    assert torch.equal(Slice(1, packs=3).whole(parts), fused)
