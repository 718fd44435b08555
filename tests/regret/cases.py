"""Cases: a model on machines with a memory budget, and the leaf of the tree that each is for.

Budgets follow by rule from the model's own numbers, so that each branch of the tree is taken by
some case. The order is that of a run that may be ended early: the first ones differ most.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from advisor.cost import CostModel
from advisor.decide.candidates import legal_plans
from advisor.decide.walk import _unit_bytes
from advisor.inputs.facts import Facts
from advisor.inputs.policy import Policy
from engines.plan import DataParallel, PartialPlan
from profiles.machine.cluster import ClusterProfile
from profiles.provenance import Quantity, Source
from tests.engines.cases import Case as Subject
from tests.regret.models import MODELS

KIB, MIB = 2**10, 2**20
SHORT, SHORTER = 0.85, 0.9
MBIT = 1e6 / 8


@dataclass(frozen=True)
class Machines:
    """Nodes of CPU ranks.

    Attributes:
        rate_bytes_per_s: of the link between nodes, each way; None: as fast as the machine can.
    """

    nodes: int
    ranks_per_node: int
    rate_bytes_per_s: float | None = None

    @property
    def ranks(self) -> int:
        return self.nodes * self.ranks_per_node


MACHINES = {
    "1x1": Machines(1, 1),
    "1x2": Machines(1, 2),
    "1x4": Machines(1, 4),
    "2x2 100 Mbit": Machines(2, 2, 100 * MBIT),
    "2x2 300 Mbit": Machines(2, 2, 300 * MBIT),
    "2x2 1 Gbit": Machines(2, 2, 1000 * MBIT),
    "2x2 2 Gbit": Machines(2, 2, 2000 * MBIT),
    "2x2 unshaped": Machines(2, 2),
}


class Budget(StrEnum):
    """Memory for a rank's tensors."""

    MACHINE = "all"  # the rank's share of the machine's
    WHOLE = "whole"  # `SHORT` of the least that a plan takes which keeps the model whole
    LAYER = "layer"  # `SHORTER` of what the largest layer takes with its states

    def nbytes(self, facts: Facts) -> float:
        """Of each rank, in whole KiB; `facts` are those with the machine's memory."""
        policy, cluster = Policy(), facts.cluster
        match self:
            case Budget.MACHINE:
                return cluster.device.memory_bytes.value
            case Budget.WHOLE:
                usable = SHORT * least_whole_bytes(facts)
            case Budget.LAYER:
                usable = SHORTER * _unit_bytes(facts.model.largest_unit, facts)
        return usable / (1 - policy.headroom_fraction) // KIB * KIB


def least_whole_bytes(facts: Facts) -> float:
    """Upper end of the peak of the smallest plan without sharding, stages, split layers."""
    kind = DataParallel.NONE if facts.cluster.world_size == 1 else DataParallel.REPLICATE
    costs = CostModel(facts)
    plans = legal_plans(facts, PartialPlan(pp=1, cp=1, tp=1, data_parallel=kind), costs=costs)
    return min(costs.estimate(plan).peak_high_bytes for plan in plans)


def limited(cluster: ClusterProfile, nbytes: float) -> ClusterProfile:
    """`cluster` with so much memory for the tensors of each rank, and nothing else in it."""
    update = {
        "memory_bytes": Quantity(value=nbytes, source=Source.ASSUMED, origin="the case's budget"),
        "context_bytes": Quantity(value=0.0, source=Source.ASSUMED, origin="tensors alone count"),
    }
    return cluster.model_copy(update={"device": cluster.device.model_copy(update=update)})


@dataclass(frozen=True)
class Case:
    """One case.

    Attributes:
        model, machines: names in `MODELS`, `MACHINES`.
        rows: of a global batch.
        leaf: of the tree that it is meant for; links as they were benched decide.
    """

    model: str
    machines: str
    rows: int
    leaf: str
    budget: Budget = Budget.MACHINE

    @property
    def name(self) -> str:
        return f"{self.model}, {self.machines}, {self.budget}"

    @property
    def subject(self) -> Subject:
        return MODELS[self.model]

    @property
    def ranks(self) -> int:
        return MACHINES[self.machines].ranks


_DDP, _SLOW = "replicate", "replicate-across-nodes"
_ZERO, _ALL = "shard-across-nodes", "everything"
CASES = {
    case.name: case
    for case in (
        Case("gpt-small", "2x2 300 Mbit", 16, _SLOW),
        Case("huge-layer", "1x4", 64, "split-layer", Budget.LAYER),
        Case("resnet", "1x2", 16, _DDP),
        Case("recommender", "2x2 1 Gbit", 256, _ALL, Budget.WHOLE),
        Case("gpt-large", "2x2 unshaped", 32, _ZERO, Budget.WHOLE),
        Case("vit", "1x4", 16, "shard-or-split", Budget.WHOLE),
        Case("gpt-small", "1x1", 16, "offload", Budget.WHOLE),
        Case("recommender", "1x4", 256, "split-first", Budget.WHOLE),
        Case("t5", "2x2 1 Gbit", 16, _SLOW),
        Case("moe", "1x4", 16, _DDP),
        Case("unet", "2x2 300 Mbit", 8, _ALL, Budget.WHOLE),
        Case("gpt-small", "1x1", 16, "single"),
        Case("gpt-large", "2x2 2 Gbit", 16, _ALL, Budget.WHOLE),
        Case("resnet", "2x2 2 Gbit", 16, _SLOW),
        Case("huge-layer", "2x2 100 Mbit", 64, _SLOW),
        Case("vit", "1x2", 16, _DDP),
        Case("moe", "2x2 unshaped", 16, _ZERO),
        Case("t5", "1x4", 16, "shard-or-split", Budget.WHOLE),
        Case("recommender", "1x2", 256, _DDP),
        Case("gpt-large", "1x4", 16, _DDP),
        Case("gpt-small", "2x2 100 Mbit", 16, _ALL, Budget.WHOLE),
        Case("unet", "1x4", 8, "shard-or-split", Budget.WHOLE),
        Case("vit", "2x2 unshaped", 16, _ZERO),
        Case("huge-layer", "1x2", 64, "split-layer", Budget.LAYER),
    )
}
QUICK = tuple(CASES)[:4]
"""One of each: stages over a slow link, a split layer, replicas, a budget across nodes."""
