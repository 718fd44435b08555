"""Cache of searches over one model: many decisions then cost little more than one."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from functools import cache

from advisor.cost import CostModel
from advisor.cost.memory.peak import shard_degree
from advisor.cost.stages.stage_borders import HandedOn
from advisor.inputs.facts import Facts
from advisor.search.legal import Styles, is_too_long, space_of, styles_of
from advisor.search.microbatch import BorderTraffic, Microbatch, border_traffic, microbatch
from advisor.search.space import Space
from advisor.search.step_moments import StepMoments
from engines.plan import Offload, PartialPlan, Plan
from profiles.machine.cluster import Collective
from profiles.model.profile import Numerics

# Collectives of split layers (tp) and split sequences (cp).
_SPLIT_LAYERS = (Collective.ALL_REDUCE, Collective.ALL_GATHER, Collective.REDUCE_SCATTER)


class SearchCache:
    """Cost model of some facts, and cached spaces and microbatches.

    `for_facts` shares with other facts what does not depend on the difference.
    """

    def __init__(self, costs: CostModel) -> None:
        self.costs = costs
        self._others: dict[str, SearchCache] = {}
        self._spaces: dict[Hashable, Space] = {}
        self._microbatches: dict[Hashable, Microbatch] = {}
        self._traffic: dict[tuple[Numerics, tuple[int, ...], HandedOn], BorderTraffic] = {}
        self.step_moments: dict[Hashable, StepMoments] = {}
        self._styles: dict[bool | None, Styles] = {}

    def for_facts(self, facts: Facts) -> SearchCache:
        """Create a cache for other facts; shared with this one if only links, memory or batch
        differ."""
        if not self.costs.shares_sums(facts):
            return SearchCache(CostModel(facts))
        other = SearchCache(self.costs.for_facts(facts))
        other._spaces = self._spaces
        other._microbatches = self._microbatches
        other._traffic = self._traffic
        other.step_moments = self.step_moments
        other._styles = self._styles
        return other

    def under(self, partial: PartialPlan) -> SearchCache:
        """Cache of the same facts, with what the settings of `partial` change of the stack."""
        costs = self.costs.under(partial)
        if costs is self.costs:
            return self
        name = costs.stack.name
        if name not in self._others:
            self._others[name] = SearchCache(costs)
            self._others[name]._styles = self._styles  # settings change no sequence parallelism
            self._others[name]._traffic = self._traffic
        return self._others[name]

    def is_too_long(self, partial: PartialPlan, styles: Styles | None) -> bool:
        """See `advisor.search.legal.is_too_long`; `styles` follow from the profile by default."""
        split = styles or self._styles_of(partial)
        return is_too_long(self.costs.facts, partial, split, costs=self.costs)

    def space(
        self,
        partial: PartialPlan,
        *,
        offload: Offload,
        styles: Styles | None,
        is_long: bool | None = None,
    ) -> Space:
        """See `advisor.search.legal.space_of`; `styles` follow from the profile by default."""
        facts = self.costs.facts
        if is_long is None:
            is_long = not partial.fixes("cp") and self.is_too_long(partial, styles)
        batch = facts.workload.global_batch_size
        key = (offload, batch, is_long, partial)
        if styles is None and key in self._spaces:
            return self._spaces[key]
        split = styles or self._styles_of(partial)
        space = space_of(facts, partial, styles=split, offload=offload, is_long=is_long)
        if styles is None:
            self._spaces[key] = space
        return space

    def _styles_of(self, partial: PartialPlan) -> Styles:
        key = partial.sequence_parallel
        if key not in self._styles:
            self._styles[key] = cache(styles_of(self.costs.facts, by_tokens=key))
        return self._styles[key]

    def microbatch(self, plan: Plan, places: Sequence[int]) -> Microbatch:
        """Microbatch of `plan`; of its degrees only tp, cp and ep matter.

        Args:
            places: indices of the units that may begin a stage, without the first.
        """
        costs = self.costs
        numerics = costs.numerics(plan)
        ledger = costs.ledger()
        key = (
            numerics,
            plan.data_parallel.is_sharded,
            plan.shards_experts and shard_degree(plan),
            plan.tp,
            plan.cp,
            plan.ep,
            plan.tensor_styles,
            plan.microbatch_size,
            plan.recompute,
            plan.recompute_blocks,
            tuple(places),
            *(ledger.algorithms(kind, plan.tp, 1) for kind in _SPLIT_LAYERS),
            *(ledger.algorithms(kind, plan.cp, plan.tp) for kind in _SPLIT_LAYERS if plan.cp > 1),
            plan.ep > 1 and ledger.algorithms(Collective.ALL_TO_ALL, plan.ep, plan.cp * plan.tp),
        )
        if key not in self._microbatches:
            borders = numerics, tuple(places), costs.shares(plan)
            if borders not in self._traffic:
                self._traffic[borders] = border_traffic(costs, plan, places)
            self._microbatches[key] = microbatch(costs, plan, self._traffic[borders])
        return self._microbatches[key]
