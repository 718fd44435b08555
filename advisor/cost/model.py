"""The cost model: estimates for any plan of the same facts."""

from __future__ import annotations

from copy import copy

from advisor.cost.breakdown import Estimate
from advisor.cost.calibration import CALIBRATION, Calibration
from advisor.cost.context import CostContext
from advisor.cost.estimates.one_stage import one_stage
from advisor.cost.estimates.staged import staged
from advisor.cost.estimates.threads import threaded
from advisor.cost.estimates.updates import updated
from advisor.inputs.facts import Facts
from engines.plan import DataParallel, PartialPlan, Plan, Precision
from profiles.errors import PlanError
from profiles.workload.stack import chunked, compiled, in_eight_bits


class CostModel(CostContext):
    """`estimate` for many plans of the same facts."""

    def __init__(self, facts: Facts, calibration: Calibration = CALIBRATION) -> None:
        super().__init__(facts, calibration)
        # A plan names its whole batch, and its cost does not depend on the amount of memory.
        self._estimates: dict[Plan, Estimate] = {}
        self._others: dict[str, CostModel] = {}

    def estimate(self, plan: Plan) -> Estimate:
        """See `advisor.cost.estimate`."""
        own = self.under(plan)
        if own is not self:
            return own.estimate(plan)
        if plan not in self._estimates:
            self._estimates[plan] = self._estimate(plan)
        return self._estimates[plan]

    def _estimate(self, plan: Plan) -> Estimate:
        if plan.microbatch_size is None:
            raise PlanError(
                "the plan leaves microbatch_size open, so it has no cost", where=f"plan: {plan}"
            )
        if plan.pp > 1:
            return staged(self, plan)
        if plan.data_parallel is DataParallel.THREADS:
            return threaded(self, plan)
        return one_stage(self, plan) if plan.updates_in_step else updated(self, plan)

    def shares_sums(self, facts: Facts) -> bool:
        """Return True if `facts` differ only in links, memory or batch."""
        mine, other = self.facts, facts
        device = other.cluster.device.model_copy(
            update={"memory_bytes": mine.cluster.device.memory_bytes}
        )
        batch = {"global_batch_size": mine.workload.global_batch_size}
        return (
            mine.model is other.model
            and mine.stack == other.stack
            and mine.cluster.world_size == other.cluster.world_size
            and mine.cluster.devices_per_node == other.cluster.devices_per_node
            and mine.cluster.device == device
            and mine.cluster.learned == other.cluster.learned
            and mine.workload == other.workload.model_copy(update=batch)
        )

    def for_facts(self, facts: Facts) -> CostModel:
        """Create a cost model of other facts, sharing cached sums if `shares_sums`."""
        if not self.shares_sums(facts):
            return CostModel(facts)
        mine, model = self.facts.cluster, copy(self)
        model.facts, model._others = facts, {}
        if mine != facts.cluster.model_copy(update={"device": mine.device}):
            model._algorithms, model._estimates, model._stages = {}, {}, {}
        return model

    def under(self, plan: Plan | PartialPlan) -> CostModel:
        """Cost model of the same facts, with what the settings of `plan` change of the stack."""
        stack = self.stack
        if plan.compile and not stack.compiled:
            stack = compiled(stack)
        if plan.loss_chunks and plan.loss_chunks > 1:
            stack = chunked(stack, plan.loss_chunks)
        precision = plan.precision or self.facts.precision
        if precision is Precision.FP8:
            stack = in_eight_bits(stack, precision.product_dtype)
        if stack is self.stack:
            return self
        if stack.name not in self._others:
            facts = self.facts
            other = CostModel(
                Facts(
                    model=facts.model,
                    cluster=facts.cluster,
                    workload=facts.workload,
                    stack=stack,
                ),
                self.calibration,
            )
            # Of the model alone.
            other.stages, other._styled, other._styles = self.stages, self._styled, self._styles
            self._others[stack.name] = other
        return self._others[stack.name]
