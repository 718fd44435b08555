"""Periodic updates: replicas step on their own and average every so many steps."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager

import torch
import torch.distributed as dist
from torch import Tensor, nn

from engines.data.replicas import sum_flat
from engines.optional.async_updates.exchange import UpdateExchange
from engines.optional.async_updates.report import Tally, UpdateReport
from engines.runtime.broadcast import send_from_first
from engines.runtime.world import World, rank_error_context
from engines.state.optimizer import OptimizerFactory


def nesterov(parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
    """DiLoCo's outer optimizer, with the values that the paper found best (Douillard et al. 2023,
    arXiv:2311.08105, section 3.1: rate 0.7, momentum 0.9)."""
    return torch.optim.SGD(parameters, lr=0.7, momentum=0.9, nesterov=True)


class PeriodicExchange(UpdateExchange):
    """One replica. Its optimizer steps by its own gradients; states of the optimizer stay its own.

    Local SGD (Stich 2019, arXiv:1805.09767) averages the parameters. DiLoCo takes the mean change
    of replicas since the last average as the gradient of an outer optimizer, which steps the
    parameters from that average; that takes memory for a copy of them and the outer states.

    Args:
        outer: makes the outer optimizer; None averages.
        every: optimizer steps between two averages.
        buffers: statistics that are copied from the first replica when replicas average.
    """

    def __init__(
        self,
        parameters: Iterable[nn.Parameter],
        optimizer: torch.optim.Optimizer,
        *,
        outer: OptimizerFactory | None,
        every: int,
        buffers: Iterable[Tensor],
        world: World,
    ) -> None:
        super().__init__(world.device, replica=world.rank, replicas=world.size)
        self.states_of = world.rank
        self._parameters = [p for p in parameters if p.requires_grad]
        self._buffers = list(buffers)
        self._every = every
        self._world = world
        self._ahead = 0
        self._is_loading = False
        self._tally = Tally()
        self._sent_bytes = 0
        self._anchors = [nn.Parameter(p.detach().clone()) for p in self._parameters if outer]
        self.outer = outer(self._anchors) if outer else None
        optimizer.register_step_post_hook(self._on_step)

    def average(self, loss: Tensor, count: float) -> Tensor:
        sums = torch.stack([loss.double() * count, loss.new_tensor(count, dtype=torch.float64)])
        with rank_error_context("averaging the loss"):
            dist.all_reduce(sums)
        return (sums[0] / sums[1].clamp(min=1.0)).to(loss.dtype)

    def synchronise(self) -> None:
        """Average now, if there were steps since the last one; the next is `every` steps later."""
        if not self._ahead:
            return
        self._ahead = 0
        with torch.no_grad(), rank_error_context("averaging replicas"):
            if self.outer is None:
                self._sum([p.detach() for p in self._parameters])
            else:
                self._outer_step(self.outer)
            send_from_first(self._buffers, self._world.device)

    @contextmanager
    def saving(self) -> Iterator[None]:
        """torch gives an optimizer without states some by a step of zeros: it is none of ours."""
        self._is_loading = True
        try:
            yield
        finally:
            self._is_loading = False

    @contextmanager
    def loading(self) -> Iterator[None]:
        """The loaded parameters are the last average."""
        with self.saving(), torch.no_grad():
            yield
            self._ahead = 0
            for anchor, parameter in zip(
                self._anchors, self._parameters, strict=bool(self._anchors)
            ):
                anchor.copy_(parameter)

    def outer_states(self) -> dict[str, Tensor]:
        """Make them by a step of zeros, and restore the parameters."""
        if self.outer is None:
            return {}
        if not self.outer.state:
            before_step = [anchor.detach().clone() for anchor in self._anchors]
            for anchor in self._anchors:
                anchor.grad = torch.zeros_like(anchor)
            self.outer.step()
            self.outer.zero_grad(set_to_none=True)
            with torch.no_grad():
                for anchor, before in zip(self._anchors, before_step, strict=True):
                    anchor.copy_(before)
        return {
            f"{place}.{key}": value
            for place, anchor in enumerate(self._anchors)
            for key, value in self.outer.state[anchor].items()
            if isinstance(value, Tensor)
        }

    def forget_outer_states(self) -> None:
        if self.outer is not None:
            self.outer.state.clear()

    @property
    def report(self) -> UpdateReport:
        sent = self._sent_bytes
        return self._tally.report(sent_bytes=sent, received_bytes=sent)

    def _on_step(self, *_: object) -> None:
        if self._is_loading:
            return
        self._tally.staleness[self._ahead] += 1
        self._ahead += 1
        if self._ahead == self._every:
            self.synchronise()

    def _outer_step(self, outer: torch.optim.Optimizer) -> None:
        moved = [anchor - p for anchor, p in zip(self._anchors, self._parameters, strict=True)]
        self._sum(moved)
        for anchor, gradient in zip(self._anchors, moved, strict=True):
            anchor.grad = gradient
        outer.step()
        outer.zero_grad(set_to_none=True)
        for anchor, parameter in zip(self._anchors, self._parameters, strict=True):
            parameter.copy_(anchor)

    def _sum(self, tensors: list[Tensor]) -> None:
        sum_flat(tensors, None, divisor=self._world.size)
        self._sent_bytes += sum(tensor.nbytes for tensor in tensors)
