"""Model states of stacks that manage their own: weights, gradients, masters and moments on a
rank."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from advisor.cost.load.loads import Loads
from engines.plan import DataParallel, Plan
from profiles.workload.optimizer_states import FP32_BYTES
from profiles.workload.optimizers import Upkeep
from profiles.workload.stack import States

_LEVELS = {
    DataParallel.ZERO1: 1,
    DataParallel.ZERO2: 2,
    DataParallel.FULL_SHARD: 3,
    DataParallel.HYBRID_SHARD: 3,
}


@dataclass(frozen=True, slots=True)
class ResidentStates:
    """Bytes on one rank between steps."""

    parameters: float
    gradients: float
    optimizer: float

    @property
    def total(self) -> float:
        return self.parameters + self.gradients + self.optimizer


def zero_level(plan: Plan) -> int:
    """ZeRO stage of a plan, 0 (unsharded) to 3 (arXiv:1910.02054)."""
    return zero_level_of(plan.data_parallel)


def zero_level_of(kind: DataParallel) -> int:
    """ZeRO stage of a data-parallel kind."""
    return _LEVELS.get(kind, 0)


def resident_states(
    states: States,
    plan: Plan,
    parts: Sequence[Loads],
    *,
    update: Upkeep,
    degree: int,
    copied_bytes: float = 0.0,
    folds_experts: bool = False,
) -> ResidentStates:
    """States of a rank with these `parts` of the model.

    Experts are sharded over the ranks that hold the same ones, degree / ep of them.

    Args:
        update: of the optimizer, for one shard.
        degree: over how many ranks states are sharded.
        folds_experts: see `Stack`.
        copied_bytes: parameters that another stage counts, in fp32.
    """
    whole = (sum(part.parameter_bytes for part in parts) + copied_bytes) / FP32_BYTES
    experts = sum(part.expert_bytes for part in parts) / FP32_BYTES
    among = degree * (plan.tp if folds_experts else 1)
    level, copies = zero_level(plan), max(1.0, among / plan.ep)

    def spread(nbytes: float, from_level: int) -> float:
        rest = (whole - experts) * _part(level, from_level, degree)
        return nbytes * (rest + experts * _part(level, from_level, copies))

    moments = update.state_bytes if states.moments is None else spread(states.moments, 1)
    return ResidentStates(
        parameters=spread(states.weight, 3),
        gradients=spread(states.gradient, 2),
        optimizer=spread(states.master, 1) + moments,
    )


def own_share(states: States, level: int, degree: float, *, on_device: bool = True) -> float:
    """State bytes on a rank per byte of fp32 parameters, without the optimizer's own moments; a
    lower bound of `resident_states`, since experts are sharded over fewer ranks.

    Args:
        level: see `zero_level`.
        degree: over how many ranks states are sharded.
        on_device: whether weights and the optimizer's states are on the device.
    """
    share = states.gradient * _part(level, 2, degree)
    if on_device:
        share += states.weight * _part(level, 3, degree)
        share += (states.master + (states.moments or 0.0)) * _part(level, 1, degree)
    return share / FP32_BYTES


def _part(level: int, from_level: int, degree: float) -> float:
    """Share of a rank, of states that are sharded from a ZeRO stage on."""
    return 1 / degree if level >= from_level else 1.0
