"""Predictions of a plan, from the data sheet and from the bench."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass

import torch

from advisor.cost import CostModel, Estimate
from advisor.decide.reserved import replayed_bytes
from advisor.inputs.facts import Facts
from engines.plan import Plan
from engines.state.optimizer import OptimizerFactory
from profiles.machine.cluster import ClusterProfile
from profiles.model.profile import ModelProfile
from profiles.workload.optimizers import OPTIMIZERS as PROFILES
from profiles.workload.stack import TORCH, Stack
from profiles.workload.workload import Workload
from tests.gpu.results import Row, Unit

RATE = 1e-6  # keeps the numbers as they are
OPTIMIZERS: dict[str, OptimizerFactory] = {
    "adamw": functools.partial(torch.optim.AdamW, lr=RATE),
    "adamw fused": functools.partial(torch.optim.AdamW, lr=RATE, fused=True),
    "sgd-momentum": functools.partial(torch.optim.SGD, lr=RATE, momentum=0.9),
    "adafactor": functools.partial(torch.optim.Adafactor, lr=RATE),
}
"""By the names of `profiles.workload.optimizers`; fused kernels are the stack's affair."""
# Exact products, as `tests.gpu.setting` has them: cuDNN's default rounds fp32 to TF32.
ROUNDED = TORCH
EXACT = TORCH.model_copy(update={"tf32_convolutions": False})


@dataclass(frozen=True, slots=True)
class Predicted:
    """Estimates of one plan from the two."""

    sheet: Estimate
    bench: Estimate | None

    def row(
        self,
        term: str,
        unit: Unit,
        measured: float,
        of: Callable[[Estimate], float],
        note: str = "",
    ) -> Row:
        """A row with what `of` reads off both estimates."""
        return Row(
            term=term,
            unit=unit,
            measured=measured,
            from_sheet=of(self.sheet),
            from_bench=None if self.bench is None else of(self.bench),
            note=note,
        )


def predicted(
    plan: Plan,
    profile: ModelProfile,
    machines: tuple[ClusterProfile, ClusterProfile | None],
    *,
    optimizer: str = "adamw",
    stack: Stack = EXACT,
) -> Predicted:
    """Estimates of `plan` on the machines by their data sheet, and as timed.

    `optimizer`: one of `OPTIMIZERS`.
    """
    name, _, kind = optimizer.partition(" ")
    if kind == "fused":
        stack = stack.model_copy(update={"name": f"{stack.name}, fused", "fused_optimizer": True})

    workload = workload_of(plan, profile, name)

    def on(cluster: ClusterProfile) -> Estimate:
        facts = Facts(model=profile, cluster=cluster, workload=workload, stack=stack)
        costs = CostModel(facts)
        given = costs.estimate(plan)
        # A search takes the usual share of what is allocated; users are shown a replay.
        return given.model_copy(update={"reserved_bytes": replayed_bytes(costs, plan, given)})

    sheet, bench = machines
    return Predicted(on(sheet), None if bench is None else on(bench))


def workload_of(plan: Plan, profile: ModelProfile, optimizer: str) -> Workload:
    """The workload whose plan this is."""
    assert plan.global_batch_size is not None
    return Workload(
        global_batch_size=plan.global_batch_size,
        tokens_per_sample=profile.tokens_per_sample,
        optimizer=PROFILES[optimizer],
        precision=plan.precision.value,
    )


def allocated(estimate: Estimate) -> float:
    """Bytes of tensors at the peak: all but what the allocator does not know."""
    return estimate.memory.total - estimate.memory.context


def reserved(estimate: Estimate) -> float:
    """Bytes that the caching allocator reserves for them."""
    return estimate.reserved_bytes - estimate.memory.context
