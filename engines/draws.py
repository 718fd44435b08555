"""Random numbers of ranks that compute on the same values."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
import torch.distributed as dist

from engines.mesh import Axis


class SameDraws:
    """The ranks of the tp axis drop out the same elements: what is whole on all of them must agree.

    Replicas and stages draw each for themselves.
    """

    def __init__(self, tp: Axis, device: torch.device) -> None:
        self._tp = tp
        self._device = device
        self._is_agreed = False

    @contextmanager
    def agreed(self) -> Iterator[None]:
        """Inside, all ranks of the axis draw the same numbers, other ones each time and on every
        such axis; they enter it together. The first rank's generator moves on by one number."""
        if self._tp.group is None or self._is_agreed:
            yield
            return
        seed = torch.zeros(1, dtype=torch.int64)
        if self._tp.is_first:
            seed.random_(2**62)  # room for the rank number that is added
        seed = seed.to(self._device)
        dist.broadcast(seed, group=self._tp.group, group_src=0)
        devices = [self._device] if self._device.type == "cuda" else []
        self._is_agreed = True
        try:
            with torch.random.fork_rng(devices=devices):
                # Scripts seed all ranks alike; replicas draw each for themselves all the same.
                torch.manual_seed(int(seed) + self._tp.ranks[0])
                yield
        finally:
            self._is_agreed = False
