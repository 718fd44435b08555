"""The exchange of parameters or gradients around a rank's own step."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
import torch.distributed as dist
from torch import Tensor

from engines.optional.async_updates.report import UpdateReport


class Exchange:
    """One rank's side of it, called by `ParallelModel` and by hooks of its optimizer.

    This one is that of plans whose steps exchange gradients themselves: nothing is left to do.

    Attributes:
        replica, replicas: which part of the batches this rank works on, of how many.
        loss: of the last step: the mean over what the update was made of, where this rank knows.
        serves: whether this rank has no part of a batch, but steps what others work for.
        keeps_states: whether this rank's optimizer is one that steps.
        outer: the optimizer of DiLoCo's meetings.
        states_of: the replica whose optimizer states are this rank's; 0 where all share them.
    """

    serves = False
    keeps_states = True
    outer: torch.optim.Optimizer | None = None
    states_of = 0

    def __init__(self, device: torch.device, *, replica: int, replicas: int) -> None:
        self.replica, self.replicas = replica, replicas
        self._none = torch.zeros((), device=device)
        self.loss = self._none
        self._count = 0.0

    def instead(self) -> bool:
        """A whole step of a rank that has no part of its own in it; False where it has."""
        return False

    def note(self, loss: Tensor, count: float) -> None:
        """Note the samples of the gradients that the optimizer sees next, and their mean loss."""
        self.loss, self._count = loss, count

    def taken(self) -> Tensor:
        """The loss of the last step, which is the caller's from now on: nothing is kept of it."""
        loss, self.loss = self.loss, self._none
        return loss

    def average(self, loss: Tensor, count: float) -> Tensor:
        """The mean loss over the samples of all ranks that are left; all of them call it."""
        return loss

    def synchronise(self) -> None:
        """Bring this rank's parameters to where all are; all ranks call it."""

    @contextmanager
    def saving(self) -> Iterator[dist.ProcessGroup | None]:
        """Around writing a checkpoint: the ranks that do it, None for all of them."""
        yield None

    @contextmanager
    def loading(self) -> Iterator[None]:
        """Around loading parameters, and maybe optimizer states, on all ranks the same."""
        yield

    def outer_states(self) -> dict[str, Tensor]:
        """The tensors that the outer optimizer keeps, made where there are none yet."""
        return {}

    def forget_outer_states(self) -> None:
        """Begin with them anew: a checkpoint had none."""

    @property
    def report(self) -> UpdateReport | None:
        """Counts of updates so far; None where every step waits for all."""
        return None
