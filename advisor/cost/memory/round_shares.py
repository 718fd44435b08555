"""Model states of a stage during a round: shares that a rank holds.

The cost model multiplies them with one rank's bytes, the search with columns.
"""

from __future__ import annotations

from dataclasses import dataclass

from advisor.cost.memory.buffers import KEEPS_PARAMETERS, shard_degree
from advisor.cost.memory.offload import states_leave
from advisor.cost.memory.states import own_share, zero_level
from engines.plan import DataParallel, Plan
from profiles.machine.cluster import Device
from profiles.workload.stack import TORCH, Stack


@dataclass(frozen=True, slots=True)
class RoundShares:
    """Bytes on a rank per byte of its stages, until a round ends.

    Attributes:
        parameters: of parameters; in a stack with states of its own, with gradients and masters.
        gathered: of parameters, as whole copies for the step.
        gradients: of gradients as built.
        optimizer: of the rank's optimizer states.
        root: of the parameters that FSDP2 gathers as one group.
    """

    parameters: float
    gathered: float
    gradients: float
    optimizer: float
    root: float

    @property
    def of_parameters(self) -> float:
        """Shares that scale with parameters."""
        return self.parameters + self.gathered


def round_shares(
    plan: Plan, device: Device, *, compute_share: float, stack: Stack = TORCH
) -> RoundShares:
    """FSDP2 reduces when a round ends: gradients are unsharded until then, next to the shards of
    earlier rounds; ZeRO-1 accumulates all of them unsharded."""
    kind, degree = plan.data_parallel, shard_degree(plan)
    on_device = not states_leave(plan, device)
    if stack.states is not None:
        return RoundShares(
            parameters=own_share(stack.states, zero_level(plan), degree, on_device=on_device),
            gathered=0.0,
            gradients=0.0,
            optimizer=float(on_device and stack.states.moments is None),
            root=compute_share * (zero_level(plan) == 3),
        )
    reduces = kind.is_sharded and kind is not DataParallel.ZERO1 and plan.accumulation > 1
    return RoundShares(
        parameters=on_device / degree,
        gathered=compute_share * (kind in KEEPS_PARAMETERS),
        gradients=1 + reduces * on_device / degree,
        optimizer=float(on_device),
        root=compute_share * (kind.is_sharded and kind not in KEEPS_PARAMETERS),
    )
