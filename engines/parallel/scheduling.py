"""The learning rate's schedule, stepped with the optimizer: a part of ParallelModel."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch.optim.lr_scheduler import LRScheduler, ReduceLROnPlateau

from engines.data.finite import FiniteGuard
from engines.optional.async_updates.exchange import UpdateExchange
from profiles.errors import InputError, a_type

SchedulerFactory = Callable[[torch.optim.Optimizer], LRScheduler]
NAME = "scheduler"
"""Of the schedule in checkpoints."""


class SchedulingMixin:
    """Counts optimizer steps, and advances the schedule with them.

    Attributes:
        scheduler: made by the factory that was given, and stepped after every step of `optimizer`
            that was not left out, in loops of one's own too; None where none was given.
    """

    optimizer: torch.optim.Optimizer
    register: Callable[..., None]
    scheduler: LRScheduler | None = None
    step: int
    _exchange: UpdateExchange
    _finite: FiniteGuard
    _is_probing: bool = False

    def follow_schedule(self, factory: SchedulerFactory) -> None:
        """Step `factory(optimizer)` with the optimizer from now on; save and load it too.

        Raises:
            InputError: it makes no scheduler, one of another optimizer, or one that wants a metric.
        """
        hint = "scheduler=lambda optimizer: LambdaLR(optimizer, lambda step: ...)"
        is_built = hasattr(factory, "state_dict") and not isinstance(factory, type)
        if is_built or not callable(factory):
            raise InputError(
                f"`scheduler` is {a_type(factory)}: the plan's own optimizer is wanted in"
                " it, which is not there yet",
                hints=[f"give a factory: `{hint}`"],
            )
        made = factory(self.optimizer)
        if isinstance(made, ReduceLROnPlateau):
            raise InputError(
                "a ReduceLROnPlateau wants a metric at each step",
                where="scheduler",
                hints=[
                    "make it on `parallel.optimizer`, step it in your loop or in `on_step` of"
                    " `fit`, and keep it with `parallel.register`"
                ],
            )
        if not hasattr(made, "step") or getattr(made, "optimizer", None) is not self.optimizer:
            raise InputError(
                f"`scheduler` made {a_type(made)} that is none of the plan's optimizer",
                hints=[f"make it of the argument: `{hint}`"],
            )
        self.scheduler = made
        self.register(**{NAME: made})

    def _count_step(self, *_: object) -> None:
        """After each step of the optimizer."""
        if self._is_probing:
            return
        # One that serves counts the steps it was called for; updates may be more.
        self.step += not self._exchange.serves
        if self.scheduler is not None and not self._finite.is_last_skipped:
            self.scheduler.step()

    @contextmanager
    def _probing(self) -> Iterator[None]:
        """Around reading the optimizer's states: torch makes missing ones by a step of zeros, which
        is no step of the training."""
        self._is_probing = True
        try:
            yield
        finally:
            self._is_probing = False


def base_rates(scheduler: Any) -> list[list[Any]]:
    """Lists of the rates that a scheduler starts from, and those that it is made of."""
    parts = getattr(scheduler, "_schedulers", ())
    own = getattr(scheduler, "base_lrs", None)
    return [*([own] if isinstance(own, list) else []), *(r for p in parts for r in base_rates(p))]
