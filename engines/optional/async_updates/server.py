"""A parameter server: what it does with gradients. No messages and no threads here.

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
class _Given:
    """A worker's gradients of the mean of so many samples, and that mean loss."""

    gradients: Gradients
    count: float
    loss: float


class ParameterServer:
    """Parameters, their optimizer, and how far each worker is.

    `version` counts updates. A synchronous server makes one of the first `needed` gradients that
    were computed at its version (Chen et al. 2016, "Revisiting Distributed Synchronous SGD"). An
    asynchronous one, `needed` None, makes one of each gradient as it comes (Dean et al. 2012,
    "Large Scale Distributed Deep Networks").

    Args:
        max_staleness: steps that a worker may be ahead of the slowest one before it has to wait (Ho
            et al. 2013, "Stale Synchronous Parallel Parameter Server").
        decides: whether a synchronous update is made as soon as `needed` have given; else when
            `use` says of whose gradients.
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
        self._given: dict[int, _Given] = {}
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

        Returns how stale they were; None where they came too late and were dropped. See `is_used`.
        """
        given = _Given(gradients, count, loss)
        staleness = self.version - version
        if self._needed is None:
            self.clocks[worker] += 1
            self.tally.staleness[staleness] += 1
            self._update([given])
        elif staleness:
            # The worker goes on from here: the steps that it missed are over.
            self.clocks[worker] = self.version
            self.tally.dropped += 1
            return None
        else:
            self.clocks[worker] = self.version + 1
            self._given[worker] = given
            if self._decides and len(self._given) == self._needed:
                self.use(list(self._given))
        return staleness

    def use(self, workers: Sequence[int]) -> None:
        """Make the update of these workers' gradients; those of others came too late."""
        given = [self._given[worker] for worker in workers]
        self.tally.staleness[0] += len(given)
        self.tally.dropped += len(self._given) - len(given)
        self._used |= dict.fromkeys(workers, self.version)
        self._given = {}
        self._update(given)

    def is_used(self, worker: int, version: int) -> bool:
        """True if the worker's gradients of `version` are in an update."""
        return not self.is_synchronous or self._used.get(worker) == version

    def caught_up(self, worker: int) -> int:
        """A worker takes parameters: of the steps that others have made since it gave its
        gradients, synchronous ones are over for it too. How far it is now."""
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
        """The workers without which this one may not go on."""
        least = self.clocks[worker] - (self._max_staleness or 0)
        return [other for other, clock in self.clocks.items() if clock < least]

    def lose(self, worker: int) -> None:
        """Go on without a worker."""
        if self.clocks.pop(worker, None) is not None:
            self.tally.gone.append(worker)

    @property
    def needed(self) -> int:
        """Workers whose gradients make an update."""
        return self._needed or 1

    @property
    def is_synchronous(self) -> bool:
        return self._needed is not None

    @property
    def lacks_workers(self) -> bool:
        """True if fewer workers are left than a step needs."""
        return len(self.clocks) < self.needed

    @torch.no_grad()
    def _update(self, given: Sequence[_Given]) -> None:
        """One optimizer step by the mean over all their samples."""
        total = sum(each.count for each in given) or 1.0
        self.loss = sum(each.loss * each.count for each in given) / total
        for place, parameter in enumerate(self.parameters):
            parts = [(each.gradients[place], each.count / total) for each in given]
            there = [gradient * share for gradient, share in parts if gradient is not None]
            parameter.grad = reduce(torch.add, there) if there else None
        self._optimizer.step()
        self._optimizer.zero_grad(set_to_none=True)
        self.version += 1
