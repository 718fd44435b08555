"""Lower bounds of the peaks of ranks with several stages each, by arithmetic on their borders.

Borders of such ranks follow from seconds and parameters, not from memory: rows that differ in data
parallelism, schedule or number of microbatches have the same stages. Their bytes are summed once;
a row then takes a few products, where the cost model lays out every stage and prices its time.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import compress, pairwise

import numpy as np

from advisor.cost.estimates.borders import sent_samples
from advisor.cost.memory.allocator import upper_end, workspace_bytes
from advisor.cost.memory.buffers import KEEPS_PARAMETERS, shard_degree
from advisor.cost.memory.offload import states_leave
from advisor.cost.memory.round_shares import RoundShares, round_shares
from advisor.cost.stages.orders import FULL_AFTER, SPLITS_BACKWARD, PassKind, moments_of, stages_of
from advisor.cost.stages.stage_memory import between_bytes
from advisor.search.cache import SearchCache
from advisor.search.space import KINDS, SCHEDULES, Floats, Space, plan_with
from advisor.search.stage_segments import segments_of
from engines.plan import DataParallel, Schedule


@dataclass(frozen=True, slots=True)
class StageBytes:
    """Bytes of each stage between some borders.

    Attributes:
        parameters, gradients, root: as `StageSegments`'.
        unsharded: experts that are not sharded with the rest; of all ranks, if these shard them.
        saved: of one microbatch from its forward to its backward, with copies of the weights.
        waiting: of one that lacks only the gradients of weights.
        ending: while the last unit runs its backward; `gathering` with the copy of its parameters.
        returned: of the gradient that one microbatch receives.
        whole: stages whose backward is not split.
        compute_share: share of a parameter's bytes in its copy for compute.
    """

    parameters: Floats
    gradients: Floats
    root: Floats
    unsharded: Floats
    saved: list[float]
    waiting: list[float]
    ending: list[float]
    gathering: list[float]
    returned: list[float]
    whole: frozenset[int]
    compute_share: float


class RankPeaks:
    """Bounds of the first and the last rank, which have most microbatches in flight and logits."""

    def __init__(self, cache: SearchCache) -> None:
        self._cache = cache
        self._costs = cache.costs
        self._place = {unit.name: n for n, unit in enumerate(cache.costs.facts.model.units)}
        self._stages: dict[tuple[int, ...], StageBytes] = {}
        self._in_flight: dict[tuple[int, ...], tuple[float, float]] = {}
        self._states: dict[tuple[int, ...], float] = {}
        self._shares: dict[tuple[int, ...], RoundShares] = {}

    def least_bytes(self, space: Space, index: int, starts: Sequence[str]) -> float:
        """Lower bound of the upper end of a row's peak, if stages 1, 2, ... begin with the units
        `starts`."""
        kind, schedule = KINDS[space.kind[index]], SCHEDULES[space.schedule[index]]
        assert schedule is not None
        pp, cp, accumulation = (
            int(column[index]) for column in (space.pp, space.cp, space.accumulation)
        )
        ranks = int(space.dp_replicate[index] * space.dp_shard[index]) * cp
        shards_experts = (
            ranks > space.ep > 1 and kind.is_sharded and kind is not DataParallel.HYBRID_SHARD
        )
        like = (space.tp, space.cp, space.microbatch_size, space.recompute)
        key = (
            len(starts),
            kind.is_sharded,
            shards_experts,
            *(int(column[index]) for column in like),
        )
        if key not in self._stages:
            self._stages[key] = self._stage_bytes(space, index, starts)
        stages = self._stages[key]
        shares = self._round_shares(space, index, stages)
        microbatches = int(space.microbatches[index])
        gathers = kind.is_sharded and kind not in KEEPS_PARAMETERS
        resident = shares.of_parameters * stages.parameters + shares.root * stages.root
        # A rank's experts are unsharded, or have shards of their own.
        degree = self._degree(space, index)
        unsharded = stages.unsharded / degree if shards_experts else stages.unsharded
        states = self._states_share(space, index) * (stages.gradients / degree + unsharded)
        resident += states + 2 * unsharded
        # Gradients of an earlier round, or of earlier microbatches of this one.
        gradients, has_earlier = shares.gradients * stages.gradients, space.accumulation[index] > 1
        most = 0.0
        for rank in (0, pp - 1):
            own = stages_of(schedule, rank, ranks=pp, stages=len(stages.saved))
            # In-flight counts stay the same once the pipeline is full.
            shown = min(microbatches, FULL_AFTER * pp)
            of_moment = (*key, space.schedule[index], pp, shown, rank, gathers)
            if of_moment not in self._in_flight:
                self._in_flight[of_moment] = _in_flight_bytes(
                    stages, schedule, rank, own, ranks=pp, microbatches=shown, gathers=gathers
                )
            first, later = self._in_flight[of_moment]
            with_gradients = float(gradients[list(own)].sum()) + (first if has_earlier else later)
            most = max(most, float(resident[list(own)].sum()) + max(first, with_gradients))
        model, device = self._costs.facts.model, self._costs.facts.cluster.device
        samples = int(space.microbatch_size[index]) * microbatches * accumulation
        local = model.batch_bytes.at(samples / cp) + model.buffer_bytes
        return upper_end(most + local + workspace_bytes(device, self._costs.stack), device)

    def _states_share(self, space: Space, index: int) -> float:
        """Bytes of optimizer states per byte of a rank's own gradients; 0 where stages differ."""
        costs = self._costs
        is_even = costs.facts.workload.optimizer.is_elementwise and not costs.has_whole
        if not is_even:
            return 0.0
        columns = (space.tp, space.cp, space.kind, space.dp_replicate, space.dp_shard)
        key = tuple(int(column[index]) for column in columns)
        if key not in self._states:
            plan = space.plan(index)
            update, loads = costs.update(plan, 0, len(self._place)), costs.loads(plan)
            total = loads.gradient_bytes / shard_degree(plan) + loads.unsharded_bytes
            is_here = not states_leave(plan, costs.facts.cluster.device)
            self._states[key] = is_here * update.state_bytes / total
        return self._states[key]

    def _degree(self, space: Space, index: int) -> int:
        """`shard_degree` of a row."""
        kind, cp = KINDS[space.kind[index]], int(space.cp[index])
        if kind in KEEPS_PARAMETERS:
            return int(space.dp_replicate[index]) * cp
        return int(space.dp_shard[index]) * cp if kind.is_sharded else 1

    def _round_shares(self, space: Space, index: int, stages: StageBytes) -> RoundShares:
        kind = KINDS[space.kind[index]]
        several = int(space.accumulation[index] > 1)
        degrees = (int(space.dp_replicate[index]), int(space.dp_shard[index]))
        key = (int(space.kind[index]), *degrees, int(space.cp[index]), several)
        if key not in self._shares:
            plan = plan_with(
                pp=2,
                cp=int(space.cp[index]),
                data_parallel=kind,
                dp_replicate=degrees[0],
                dp_shard=degrees[1],
                accumulation=1 + several,
                offload=space.offload,
                offload_to=space.offload_to,
            )
            device, stack = self._costs.facts.cluster.device, self._costs.stack
            share = stages.compute_share
            self._shares[key] = round_shares(plan, device, compute_share=share, stack=stack)
        return self._shares[key]

    def _stage_bytes(self, space: Space, index: int, starts: Sequence[str]) -> StageBytes:
        costs, plan = self._costs, space.plan(index, stages=tuple(starts))
        begins = [0, *(self._place[name] for name in starts)]
        ends = (*begins, len(self._place))
        places = [self._place[name] for name in space.segments[1:]]
        microbatch = self._cache.microbatch(plan, places)
        borders = [places.index(place) for place in begins[1:]]
        sent, back = (amounts[borders] for amounts in microbatch.border_bytes)
        own = segments_of(microbatch, begins, costs.stack)  # each stage as one segment
        retained = [
            costs.stages.retained(
                *ends_of_stage,
                numerics=costs.numerics(plan),
                samples=sent_samples(plan, costs.stack),
                shares=costs.shares(plan),
            )
            for ends_of_stage in pairwise(ends)
        ]
        taken, made = np.array(retained, dtype=float).T
        arrived = np.pad(sent, (1, 0))
        saved = between_bytes(own.saved, taken, made, plan, costs.stack, message=arrived)
        saved = saved + own.cast * (not plan.data_parallel.is_sharded)

        def summed(amounts: Sequence[float]) -> Floats:
            each = np.repeat(np.array(amounts, dtype=float), microbatch.counts.astype(int))
            return np.asarray(np.add.reduceat(each, begins))

        units = microbatch.units
        unsharded = summed([unit.unsharded_bytes for unit in units])
        whole = costs.stages.whole_backwards(plan, ends)
        return StageBytes(
            parameters=own.parameters,
            gradients=own.gradients,
            root=own.root,
            unsharded=unsharded * shard_degree(plan) if plan.shards_experts else unsharded,
            saved=saved.tolist(),
            waiting=[0.0, *summed([unit.layer_bytes for unit in units]).tolist()[1:]],
            ending=own.work.tolist(),
            gathering=(own.work + own.copy).tolist(),
            returned=np.pad(back, (0, 1)).tolist(),
            whole=whole,
            compute_share=own.compute_share,
        )


def _in_flight_bytes(
    stages: StageBytes,
    schedule: Schedule,
    rank: int,
    own: Sequence[int],
    *,
    ranks: int,
    microbatches: int,
    gathers: bool,
) -> tuple[float, float]:
    """Bytes of microbatches in flight on a rank at the fullest beginning of a backward, and of one
    when all gradients are there."""
    moments = moments_of(
        schedule,
        rank,
        ranks=ranks,
        stages=len(stages.saved),
        microbatches=microbatches,
        whole=stages.whole if schedule in SPLITS_BACKWARD else frozenset(),
    )
    ending = stages.gathering if gathers else stages.ending
    saved = [stages.saved[n] for n in own]
    waiting = [stages.waiting[n] + stages.returned[n] for n in own]
    backwards = [moment for moment in moments if moment.kind is not PassKind.FORWARD]
    in_flight = [
        ending[own[moment.chunk]]
        + stages.returned[own[moment.chunk]]
        + sum(n * each for n, each in zip(moment.saved, saved, strict=True))
        + sum(n * each for n, each in zip(moment.waiting, waiting, strict=True))
        for moment in backwards
    ]
    later = compress(in_flight, (all(moment.has_gradients) for moment in backwards))
    return max(in_flight, default=0.0), max(later, default=0.0)
