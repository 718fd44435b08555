"""Asynchronous and periodic updates: a part of ParallelModel."""

from __future__ import annotations

import torch

from engines.optional.async_updates.exchange import UpdateExchange
from engines.optional.async_updates.report import UpdateReport
from engines.plan import Plan
from profiles.errors import PlanError


class AsyncUpdatesMixin:
    """The part of ParallelModel about asynchronous and periodic updates."""

    plan: Plan
    _exchange: UpdateExchange

    def synchronise(self) -> None:
        """Bring every rank's parameters up to date; all ranks call it.

        Replicas that update on their own average, and workers fetch from servers. Under other plans
        parameters are up to date after every step.
        """
        self._exchange.synchronise()

    @property
    def update_report(self) -> UpdateReport | None:
        """Staleness of updates, and their counts; None where a step waits for all."""
        return self._exchange.report

    @property
    def outer_optimizer(self) -> torch.optim.Optimizer | None:
        """DiLoCo's, on every replica the same; None for other plans."""
        return self._exchange.outer

    def _require_own_step(self) -> None:
        """Refuse a classic loop where another rank steps the parameters."""
        if self.plan.servers:
            raise PlanError(
                "servers step the parameters: a classic loop would step this rank's copy",
                where=f"plan: {self.plan}",
                hints=["use `train_step(batch)` on all ranks"],
            )

    def _require_own_batch(self) -> None:
        if self._exchange.serves:
            raise PlanError(
                "this rank serves parameters, it has no gradients",
                where=f"plan: {self.plan}",
                hints=["use `train_step(batch)`, which serves one step"],
            )
