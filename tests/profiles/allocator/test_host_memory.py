"""Main memory to load: closed forms, and storages of a real model."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from profiles.allocator.host_memory import Loading, load_memory
from profiles.capture.capture import capture
from tests.contract.watch import LiveBytes
from tests.factories import chain


def test_every_rank_of_a_node_builds_the_whole_model() -> None:
    model = chain(units=4, parameters=1_000_000)  # 16 MB of fp32
    actual = load_memory(model, ranks_per_node=8)
    assert (actual.per_rank_bytes, actual.per_node_bytes) == (16_000_000, 128_000_000)


def test_shards_take_their_part_and_the_largest_tensor() -> None:
    model = capture(nn.Sequential(nn.Linear(100, 300), nn.Linear(300, 10)), torch.zeros(2, 100))
    whole = 4 * (100 * 300 + 300 + 300 * 10 + 10)
    actual = load_memory(model, Loading.SHARDS, ranks_per_node=4, shards=8)
    assert actual.per_rank_bytes == whole / 8 + 4 * 100 * 300
    assert actual.per_node_bytes == 4 * actual.per_rank_bytes


def test_buffers_are_whole_on_every_rank() -> None:
    model = capture(nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8)), torch.zeros(4, 8))
    buffers = 8 * 4 + 8 * 4 + 8  # mean, variance, an int64 counter
    linear = 4 * (64 + 8)
    for way, parameters in (
        (Loading.WHOLE, linear + 4 * 16),
        (Loading.SHARDS, (linear + 4 * 16) / 2 + 4 * 64),
    ):
        actual = load_memory(model, way, ranks_per_node=1, shards=2)
        assert actual.per_rank_bytes == parameters + buffers


def test_predicted_host_memory_equals_that_of_building() -> None:
    def build() -> nn.Module:
        return nn.Sequential(*(nn.Linear(256, 256) for _ in range(6)))

    said = load_memory(capture(build(), torch.zeros(2, 256)), ranks_per_node=1)
    watched = LiveBytes([])
    with watched:
        _ = build()
    assert watched.peak_bytes == pytest.approx(said.per_rank_bytes, rel=0.02)
