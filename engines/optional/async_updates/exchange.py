"""The exchange of parameters or gradients around a rank's own step."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
import torch.distributed as dist
from torch import Tensor

from engines.optional.async_updates.report import UpdateReport


class UpdateExchange:
    """A rank's side of the updates, called by `ParallelModel` and by hooks of its optimizer.

    This base class is for plans whose steps exchange gradients themselves: it does nothing.

    Attributes:
        replica, replicas: this rank's part of the batches, and their number.
        loss: of the last step: the mean over the samples of the update, where this rank knows it.
        serves: this rank has no part of a batch: it steps parameters by others' gradients.
        keeps_states: this rank's optimizer steps parameters.
        outer: the outer optimizer of DiLoCo.
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

    def replace_step(self) -> bool:
        """Do the step of a rank that computes no gradients in it; False where it computes some."""
        return False

    def note(self, loss: Tensor, count: float) -> None:
        """Note the samples of the gradients that the optimizer sees next, and their mean loss."""
        self.loss, self._count = loss, count

    def take_loss(self) -> Tensor:
        """Return the loss of the last step and forget it."""
        loss, self.loss = self.loss, self._none
        return loss

    def average(self, loss: Tensor, count: float) -> Tensor:
        """The mean loss over the samples of all ranks that are left; all of them call it."""
        return loss

    def synchronise(self) -> None:
        """Bring this rank's parameters up to date; all ranks call it."""

    @contextmanager
    def saving(self) -> Iterator[dist.ProcessGroup | None]:
        """Around writing a checkpoint; yields the group of ranks that write, None for all."""
        yield None

    @contextmanager
    def loading(self) -> Iterator[None]:
        """Around loading parameters, and maybe optimizer states, the same on all ranks."""
        yield

    def outer_states(self) -> dict[str, Tensor]:
        """States of the outer optimizer, made where there are none yet."""
        return {}

    def forget_outer_states(self) -> None:
        """Reset the outer states: a checkpoint had none."""

    @property
    def report(self) -> UpdateReport | None:
        """Counts of updates so far; None where every step waits for all."""
        return None
