"""One rank of a job of any size, in this process alone: the other ranks do not exist.

torch's fake process groups start every collective and exchange nothing. What this rank computes,
allocates and updates is as in the real job; received values are whatever is in its
buffers, so its losses mean nothing.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta

import torch
import torch.distributed as dist

from engines.runtime.world import DEFAULT_TIMEOUT_S, World
from profiles.torch_compat import forget_groups, register_fake_groups


@contextmanager
def fake_world(rank: int, size: int, device: torch.device) -> Iterator[World]:
    """Inside, this process is rank `rank` of `size`; all ranks count as having the same rows."""
    register_fake_groups()
    store = EchoStore()  # torch itself references only its C++ part
    dist.init_process_group("fake", store=store, rank=rank, world_size=size)
    try:
        yield World(rank, size, device, timeout_s=DEFAULT_TIMEOUT_S, is_fake=True)
    finally:
        dist.destroy_process_group()
        forget_groups()


class EchoStore(dist.Store):
    """A rendezvous store on which every rank has the values of this one: keys end in a rank."""

    def __init__(self) -> None:
        super().__init__()
        self._values: dict[str, bytes] = {}
        self._counts: Counter[str] = Counter()

    def set(self, key: str, value: str | bytes) -> None:
        self._values[_without_rank(key)] = (
            value.encode() if isinstance(value, str) else bytes(value)
        )

    def get(self, key: str) -> bytes:
        return self._values[_without_rank(key)]

    def add(self, key: str, amount: int) -> int:
        self._counts[key] += amount
        return self._counts[key]

    def check(self, keys: Sequence[str]) -> bool:
        return all(_without_rank(key) in self._values for key in keys)

    def wait(self, keys: Sequence[str], timeout: timedelta | None = None) -> None:
        pass


def _without_rank(key: str) -> str:
    return key.rpartition("/")[0]
