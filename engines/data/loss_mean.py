"""The mean loss of a step over all ranks, which tells all of them if a gradient is not finite."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor

from engines.data.finite import FiniteGuard
from engines.runtime.mesh import Mesh
from engines.runtime.world import World
from profiles.torch_compat import start_all_reduce


class LossMean:
    """Averages losses over replicas and parts of a sequence; ranks of a pipeline without a loss
    have zero, and those of the tp axis all have the same.

    Args:
        is_early: the ranks are replicas and nothing else. They have equal gradients after the
            backward, so that each sees alone if one is not finite, and losses are summed beside
            the backward. Other ranks mark theirs after it, and wait once more.
    """

    def __init__(self, world: World, mesh: Mesh, guard: FiniteGuard, *, is_early: bool) -> None:
        self._world, self._guard = world, guard
        self._holders = mesh.replicas.size * mesh.tp.size
        self._is_early = is_early
        self._sum: Tensor | None = None
        self._work: dist.Work | None = None

    def begin(self, loss: Tensor) -> None:
        """Send this rank's loss of a step, before its last backward, where that is early enough."""
        if self._is_early:
            self._sum = loss / self._holders
            self._work = start_all_reduce(self._sum)

    def finish(self, loss: Tensor, extra: Tensor | None = None) -> tuple[Tensor, Tensor | None]:
        """After the backward: the mean, nan where a gradient is not finite on some rank; and that
        of a vector that is sent with it. All ranks call it."""
        if self._work is not None and self._sum is not None:
            self._work.wait()
            mean, self._work, self._sum = self._sum, None, None
            return self._guard.marked(mean), extra
        marked = self._guard.marked(loss)
        if extra is None:
            return self.of(marked), None
        means = self.of(torch.cat([marked.reshape(1), extra]))
        return means[0], means[1:]

    def of(self, value: Tensor) -> Tensor:
        """The mean of a value that every rank has, in place; all ranks call it."""
        if self._world.size > 1:
            dist.all_reduce(value)
            value /= self._holders
        return value
