"""Placement of axes on links: of all placements the order of the mesh has the fastest plan.

A single plan may well be faster under another order. Such a plan sends most along its outer axes,
and then another plan, which sends it along inner axes, is faster still.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import permutations

import pytest

from advisor.cost import CostModel, Estimate
from advisor.cost.ledger import Ledger
from advisor.decide.candidates import legal_plans
from advisor.inputs.facts import Facts
from advisor.inputs.policy import Policy
from advisor.search.ranking import tie_limit_s, weigh
from engines.plan import AXES, PartialPlan, Plan, Recompute, Schedule
from profiles.closed_forms.families import profile_from_config
from profiles.machine.cluster import ClusterProfile, Collective
from profiles.model.profile import Numerics
from tests.factories import facts, gpus

CONFIG: dict[str, object] = {
    "model_type": "llama",
    "hidden_size": 1024,
    "intermediate_size": 3072,
    "num_hidden_layers": 4,
    "num_attention_heads": 16,
    "num_key_value_heads": 16,
    "vocab_size": 8000,
}
MODEL = profile_from_config(
    CONFIG, samples=1, sequence_length=1024, name="small", numerics=tuple(Numerics)
)
# Nodes, devices of each, GB/s between nodes (360 inside); memory that keeps DDP out in the last.
SHAPES = ((2, 4, 1, 80.0), (2, 4, 400, 80.0), (4, 2, 25, 80.0), (2, 6, 5, 5.0))
PLAIN = (None, Schedule.NAIVE, Schedule.GPIPE, Schedule.ONE_F_ONE_B)


class _Placed(CostModel):
    """The cost model of plans whose axes lie elsewhere: every group has another stride."""

    strides: dict[tuple[int, int], int]

    def ledger(self) -> Ledger:
        return _PlacedLedger(self.facts.cluster, self.strides)


class _PlacedLedger(Ledger):
    def __init__(self, cluster: ClusterProfile, strides: dict[tuple[int, int], int]) -> None:
        super().__init__(cluster, {})
        self._strides = strides

    def charge(
        self,
        kind: Collective,
        purpose: str,
        payload_bytes: float,
        *,
        group_size: int,
        stride: int = 1,
        count: int = 1,
    ) -> float:
        stride = self._strides.get((group_size, stride), stride)
        return super().charge(
            kind, purpose, payload_bytes, group_size=group_size, stride=stride, count=count
        )


def _strides(plan: Plan, order: Sequence[str]) -> dict[str, int]:
    """Return the distance between the ranks of each axis, the last axis innermost."""
    strides, stride = {}, 1
    for axis in reversed(order):
        strides[axis] = stride
        stride *= getattr(plan, axis)
    return strides


def _orders(plan: Plan) -> list[tuple[str, ...]]:
    """List every other order of the axes that the plan uses."""
    used = [axis for axis in AXES if getattr(plan, axis) > 1]
    return [order for order in permutations(used) if list(order) != used]


def _placed(plan: Plan, whole: Facts, order: Sequence[str]) -> Estimate:
    """Estimate a plan whose axes lie in this order."""
    now, costs = _strides(plan, AXES), _Placed(whole)
    costs.strides = {
        (2 if axis == "pp" else getattr(plan, axis), now[axis]): stride
        for axis, stride in _strides(plan, order).items()
        if getattr(plan, axis) > 1
    }
    return costs.estimate(plan)


@pytest.mark.parametrize(("nodes", "devices", "gb_per_s", "memory_gib"), SHAPES)
def test_no_order_of_axes_beats_the_fastest_plan_in_mesh_order(
    nodes: int, devices: int, gb_per_s: float, memory_gib: float
) -> None:
    cluster = gpus(nodes, devices, inter_bytes_per_s=gb_per_s * 1e9, memory_gib=memory_gib)
    whole, policy = facts(MODEL, cluster, batch=2 * nodes * devices), Policy()
    partial = PartialPlan.build({"recompute": Recompute.NONE, "microbatch_size": 1})
    plans = [plan for plan in legal_plans(whole, partial) if plan.schedule in PLAIN]
    fitting = [c for c in weigh(plans, CostModel(whole), policy) if c.fits]
    best = min((c.estimate for c in fitting), key=lambda estimate: estimate.step_s)
    tried = 0
    for plan, time in ((c.plan, c.estimate.time) for c in fitting):
        if time.compute_s + time.optimizer_s + time.launch_s > best.step_s:
            continue  # wherever it is placed
        for order in _orders(plan):
            cost, tried = _placed(plan, whole, order), tried + 1
            assert best.step_s <= tie_limit_s(cost.step_s, policy), (plan, order)
    assert tried


def test_a_single_plan_may_be_faster_under_another_order() -> None:
    """Shards between slow nodes are gathered over and over for few tokens: split layers would send
    less there. Neither is near the fastest plan, which cuts the model into stages."""
    whole = facts(MODEL, gpus(2, 4, inter_bytes_per_s=1e9), batch=16)
    partial = PartialPlan.build(
        {"tp": 4, "dp_shard": 2, "microbatch_size": 1, "recompute": Recompute.NONE}
    )
    (plan,) = legal_plans(whole, partial)
    here = CostModel(whole).estimate(plan)
    assert _placed(plan, whole, AXES).step_s == here.step_s
    assert _placed(plan, whole, ("tp", "dp_shard")).step_s < 0.5 * here.step_s
