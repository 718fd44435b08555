"""The arithmetic of a parameter server. No messages and no threads here.

One class for every kind of update, so that a simulation of delays runs the code that training runs.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import reduce

import torch
from torch import Tensor, nn

from engines.optional.async_updates.report import Tally

Gradients = Sequence[Tensor | None]
"""In the order of the server's parameters; None where a step did not use one."""


@dataclass(frozen=True, slots=True)
class _Received:
    """A worker's gradients of the mean of so many samples, and that mean loss."""

    gradients: Gradients
    count: float
    loss: float


class ParameterServer:
    """Parameters, their optimizer, and the clock of each worker.

    `version` counts updates. A synchronous server makes one of the first `needed` gradients that
    were computed at its version (Chen et al. 2016, "Revisiting Distributed Synchronous SGD"). An
    asynchronous one, `needed` None, makes one of each gradient as it comes (Dean et al. 2012,
    "Large Scale Distributed Deep Networks").

    Args:
        max_staleness: steps that a worker may be ahead of the slowest one before it has to wait (Ho
            et al. 2013, "Stale Synchronous Parallel Parameter Server").
        decides: a synchronous update is made as soon as `needed` workers have sent gradients; else
            when `use` names the workers.
    """

    def __init__(
        self,
        parameters: Iterable[nn.Parameter],
        optimizer: torch.optim.Optimizer,
        *,
        workers: Iterable[int],
        needed: int | None,
        max_staleness: int | None = None,
        decides: bool = True,
    ) -> None:
        self.parameters = list(parameters)
        self.version = 0
        self.clocks = dict.fromkeys(workers, 0)
        self.tally = Tally()
        self.loss = 0.0
        self._optimizer = optimizer
        self._needed = needed
        self._max_staleness = max_staleness
        self._decides = decides
        self._received: dict[int, _Received] = {}
        self._used: dict[int, int] = {}  # the version at which a worker's gradients were used last

    def push(
        self,
        worker: int,
        version: int,
        gradients: Gradients,
        *,
        count: float = 1.0,
        loss: float = 0.0,
    ) -> int | None:
        """Take a worker's gradients, computed at the parameters of `version`.

        Returns their staleness; None where they came too late and were dropped. See `is_used`.
        """
        received = _Received(gradients, count, loss)
        staleness = self.version - version
        if self._needed is None:
            self.clocks[worker] += 1
            self.tally.staleness[staleness] += 1
            self._update([received])
        elif staleness:
            # The worker goes on from here: the steps that it missed are over.
            self.clocks[worker] = self.version
            self.tally.dropped += 1
            return None
        else:
            self.clocks[worker] = self.version + 1
            self._received[worker] = received
            if self._decides and len(self._received) == self._needed:
                self.use(list(self._received))
        return staleness

    def use(self, workers: Sequence[int]) -> None:
        """Update by these workers' gradients; those of others came too late."""
        received = [self._received[worker] for worker in workers]
        self.tally.staleness[0] += len(received)
        self.tally.dropped += len(self._received) - len(received)
        self._used |= dict.fromkeys(workers, self.version)
        self._received = {}
        self._update(received)

    def is_used(self, worker: int, version: int) -> bool:
        """True if the worker's gradients of `version` are in an update."""
        return not self.is_synchronous or self._used.get(worker) == version

    def catch_up(self, worker: int) -> int:
        """Advance the clock of a worker that fetches parameters: synchronous steps that others made
        since it sent its gradients are over for it too. Returns its clock."""
        if self.is_synchronous and worker in self.clocks:
            self.clocks[worker] = max(self.clocks[worker], self.version)
        return self.clocks.get(worker, 0)

    def may_go_on(self, worker: int) -> bool:
        """True if a worker that has sent its gradients may fetch parameters for the next step."""
        if self._needed is not None:
            return self.version >= self.clocks[worker]
        if self._max_staleness is None:
            return True
        return self.clocks[worker] - min(self.clocks.values()) <= self._max_staleness

    def behind(self, worker: int) -> list[int]:
        """The workers that this one has to wait for."""
        least = self.clocks[worker] - (self._max_staleness or 0)
        return [other for other, clock in self.clocks.items() if clock < least]

    def lose(self, worker: int) -> None:
        """Remove a worker."""
        if self.clocks.pop(worker, None) is not None:
            self.tally.gone.append(worker)

    @property
    def needed(self) -> int:
        """Number of workers whose gradients make an update."""
        return self._needed or 1

    @property
    def is_synchronous(self) -> bool:
        return self._needed is not None

    @property
    def lacks_workers(self) -> bool:
        """True if fewer workers are left than a step needs."""
        return len(self.clocks) < self.needed

    @torch.no_grad()
    def _update(self, received: Sequence[_Received]) -> None:
        """One optimizer step by the mean over all their samples."""
        total = sum(each.count for each in received) or 1.0
        self.loss = sum(each.loss * each.count for each in received) / total
        for place, parameter in enumerate(self.parameters):
            parts = [(each.gradients[place], each.count / total) for each in received]
            weighted = [gradient * share for gradient, share in parts if gradient is not None]
            parameter.grad = reduce(torch.add, weighted) if weighted else None
        self._optimizer.step()
        self._optimizer.zero_grad(set_to_none=True)
        self.version += 1
