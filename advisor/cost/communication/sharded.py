"""Sharded data parallelism of a unit: gathers of parameters, reductions of gradients."""

from __future__ import annotations

from dataclasses import dataclass

from advisor.cost.communication.groups import expert_copies, replica_group, shard_group
from advisor.cost.ledger import Ledger
from engines.plan import DataParallel, Plan
from profiles.machine.cluster import Collective
from profiles.workload.stack import TORCH, Stack

Group = tuple[int, int]
"""Size of a group of ranks, and the stride between them."""


@dataclass(frozen=True, slots=True)
class Sharded:
    """Collectives of FSDP2: gathers in the compute dtype, reductions in that of the masters.

    Experts are sharded among the ranks that hold the same ones. HSDP adds an all-reduce of gradient
    shards between replicas. Payloads are bytes of unsharded units as built.

    Attributes:
        shards, experts: groups that shard a unit, and its experts.
        replicas: group that holds the same shard; only of HSDP.
        compute_share: share of a parameter's bytes in its copy for compute.
        reduced_share: bytes sent per byte of gradient as built.
        to_host: whether shards are in main memory.
    """

    shards: Group
    experts: Group
    replicas: Group
    compute_share: float
    reduced_share: float
    to_host: bool

    @classmethod
    def of(
        cls,
        plan: Plan,
        *,
        compute_share: float,
        reduced_share: float,
        has_host: bool,
        stack: Stack = TORCH,
    ) -> Sharded:
        """Groups of a plan of a sharded kind; `has_host` if devices have memory of their own."""
        is_hybrid = plan.data_parallel is DataParallel.HYBRID_SHARD
        return cls(
            shards=shard_group(plan),
            experts=expert_copies(plan, stack),
            replicas=replica_group(plan) if is_hybrid else (1, 1),
            compute_share=compute_share,
            reduced_share=reduced_share,
            to_host=plan.offload.states and has_host,
        )

    def gather_s(
        self, ledger: Ledger, nbytes: float, expert_bytes: float = 0.0, *, count: float = 1
    ) -> float:
        """Seconds to gather a unit of `nbytes` once, `expert_bytes` of them experts."""
        parts = self.compute_share * (nbytes - expert_bytes), self.compute_share * expert_bytes
        seconds = self._among_shards(ledger, Collective.ALL_GATHER, "parameters", parts, count)
        return seconds + self._host_s(ledger, nbytes, count)

    def reduce_s(
        self, ledger: Ledger, nbytes: float, expert_bytes: float = 0.0, *, count: float = 1
    ) -> float:
        """Seconds to reduce the gradients of a unit once, each rank to its shard."""
        parts = self.reduced_share * (nbytes - expert_bytes), self.reduced_share * expert_bytes
        seconds = self._among_shards(ledger, Collective.REDUCE_SCATTER, "gradients", parts, count)
        return seconds + self._host_s(ledger, self.reduced_share * nbytes, count)

    def replicate_s(self, ledger: Ledger, nbytes: float, *, count: float = 1) -> float:
        """Seconds to sum the gradient shards of a unit between replicas."""
        shard = self.reduced_share * nbytes / self.shards[0]
        kind, purpose = Collective.ALL_REDUCE, "gradient shards"
        return _charged(ledger, kind, purpose, shard, self.replicas, count)

    def _among_shards(
        self,
        ledger: Ledger,
        kind: Collective,
        purpose: str,
        parts: tuple[float, float],
        count: float,
    ) -> float:
        """Charge a unit's bytes without experts, and its experts."""
        rest, experts = parts
        return _charged(ledger, kind, purpose, rest, self.shards, count) + _charged(
            ledger, kind, f"{purpose} of experts", experts, self.experts, count
        )

    def _host_s(self, ledger: Ledger, nbytes: float, count: float) -> float:
        return ledger.to_host(nbytes / self.shards[0], count=count) if self.to_host else 0.0


def _charged(
    ledger: Ledger, kind: Collective, purpose: str, payload: float, group: Group, count: float
) -> float:
    size, stride = group
    return ledger.charge(kind, purpose, payload, group_size=size, stride=stride, count=count)
