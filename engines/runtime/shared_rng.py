"""Shared random numbers for ranks that compute on the same values."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext

import torch
import torch.distributed as dist

from engines.runtime.mesh import Axis
from engines.runtime.random_states import random_states, restore_random_states, seed_all
from profiles.errors import ModelError


class SharedRng:
    """Shared random numbers of the tp axis: dropout of tensors that all its ranks have must agree.

    Replicas and stages draw different numbers.
    """

    def __init__(self, tp: Axis, device: torch.device, *, is_uneven: bool = False) -> None:
        """`is_uneven`: some layers have larger parts on one rank than on another."""
        self._tp = tp
        self._device = device
        self._is_uneven = is_uneven
        self._is_agreed = False

    def shared(self) -> AbstractContextManager[None]:
        """Inside, all ranks of the axis draw the same numbers, torch's, Python's and numpy's:
        different ones each time and on every other axis; all of them enter it. The first rank's
        generator advances by one number.

        Raises:
            ModelError: where layers are uneven, the ranks drew different amounts of numbers, and
                different numbers after that.
        """
        is_alone = self._tp.group is None or self._is_agreed
        return nullcontext() if is_alone else self._agreeing()

    @contextmanager
    def _agreeing(self) -> Iterator[None]:
        seed = torch.zeros(1, dtype=torch.int64)
        if self._tp.is_first:
            seed.random_(2**62)  # room for the rank number that is added
        seed = seed.to(self._device)
        dist.broadcast(seed, group=self._tp.group, group_src=0)
        before = random_states(self._device)
        self._is_agreed = True
        try:
            # Scripts seed all ranks alike; replicas draw different numbers all the same.
            seed_all(int(seed) + self._tp.ranks[0])
            yield
            if self._is_uneven:
                self._require_agreement()
        finally:
            restore_random_states(before, self._device)
            self._is_agreed = False

    def _require_agreement(self) -> None:
        drawn = torch.randint(2**62, (1,), device=self._device)
        span = torch.cat([drawn, -drawn])
        dist.all_reduce(span, op=dist.ReduceOp.MAX, group=self._tp.group)
        if int(span.sum()):  # the largest and the smallest number differ
            raise ModelError(
                f"dropout within a layer that has no equal parts for {self._tp.size} ranks: they"
                " drew different amounts of random numbers, and would drop out different elements"
                " of shared tensors",
                hints=[
                    "choose a tp that divides the layer, leave it out of `tensor_styles`, or"
                    " switch its dropout off"
                ],
            )
