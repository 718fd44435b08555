"""Which rows there are: all degrees, cuts of the batch and tricks that the engines can carry out.

`engines.legality` is asked for one plan of every group of rows that it cannot tell apart, and what
is refused is never written down.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cached_property
from math import gcd
from typing import Any

import numpy as np

from advisor.cost import CostModel
from advisor.inputs.facts import Facts, captured
from advisor.inputs.policy import Policy
from advisor.inputs.stacks import styles_under
from advisor.search.space import (
    COLUMNS,
    KINDS,
    RECOMPUTES,
    SCHEDULES,
    Integers,
    Space,
    divisors,
    factors,
    stages_per_rank,
)
from engines.legality import problems
from engines.legality.experts import experts
from engines.legality.pipeline import pipeline, schedule_problems
from engines.plan import DataParallel, Offload, PartialPlan, Plan, Precision, Recompute, Schedule
from engines.tensor.rules import proposed_styles
from profiles.machine.cluster import ClusterProfile
from profiles.model.flow import GLUE, LOSS
from profiles.model.profile import ModelProfile

Styles = Callable[[int], tuple[tuple[str, str], ...]]
"""How layers are split over a tp axis of this size; empty where they cannot be."""

# Settings that are not searched: pinned or default.
_APART = ("updates", "sync_every", "servers", "backup_workers", "max_staleness")
_SENT = ("aggregation", "compression", "compression_rank")
_CARRIED = ("ep", "sync_batch_norm", "compile", "offload_to", "bucket_mib", *_SENT, *_APART)


@dataclass(frozen=True, slots=True)
class Shape:
    """A data-parallel kind with its degrees."""

    kind: DataParallel
    replicate: int
    shard: int


def space_of(
    facts: Facts,
    partial: PartialPlan,
    *,
    styles: Styles,
    offload: Offload = Offload.NONE,
    costs: CostModel | None = None,
    is_long: bool | None = None,
) -> Space:
    """Every legal plan that keeps `partial`, simpler degrees and kinds first.

    Sequences are sharded (cp) where one is too long for a device, or a pin says so: elsewhere
    replicas do the same work and send no keys and values. `is_long`: the answer of `is_too_long`,
    where it is known.

    Precision is the workload's and never searched; states go to the host only where `offload` or a
    pin says so.
    """
    offload = partial.offload or offload
    costs = costs or CostModel(facts)
    if is_long is None:
        is_long = is_too_long(facts, partial, styles, costs=costs)
    return _Builder(facts, partial, styles, offload, is_long).space()


def styles_of(facts: Facts) -> Styles:
    """How layers of the model are split, as far as its profile and the stack tell."""
    return lambda tp: styles_under(facts.stack, proposed_styles(facts.model, tp))


def pieces(model: ModelProfile, cluster: ClusterProfile) -> list[str]:
    """Units that may begin a stage, in the order of their calls; the first one begins the model."""
    order = list(dict.fromkeys(c.unit for c in model.flow.calls if c.unit not in (GLUE, LOSS)))
    return order[:1] + [unit for unit in order[1:] if _is_border(unit, model, cluster)]


def _is_border(unit: str, model: ModelProfile, cluster: ClusterProfile) -> bool:
    alone = Plan(pp=2, schedule=Schedule.GPIPE, stages=(unit,))
    return not any(pipeline(alone, model, cluster))


def shapes(world: int) -> Iterator[Shape]:
    """All ways to replicate and shard over `world` ranks."""
    if world == 1:
        yield Shape(DataParallel.NONE, 1, 1)
    else:
        yield Shape(DataParallel.REPLICATE, world, 1)
    yield Shape(DataParallel.ZERO1, world, 1)
    yield Shape(DataParallel.ZERO2, world, 1)
    yield Shape(DataParallel.FULL_SHARD, 1, world)
    for shard in divisors(world)[1:-1]:
        yield Shape(DataParallel.HYBRID_SHARD, world // shard, shard)


def precision_of(facts: Facts, partial: PartialPlan) -> Precision:
    """Of all plans that keep `partial`."""
    return partial.precision or facts.precision


def is_too_long(
    facts: Facts, partial: PartialPlan, styles: Styles, *, costs: CostModel | None = None
) -> bool:
    """Whether a device cannot train on one sample with the model sharded over all and recomputed,
    nor where the devices of a node split its layers, nor where as many ranks as can share the
    experts: no cut of the batch helps then.

    `costs`: of these facts, where sums were made already.
    """
    if not facts.model.tokens_per_sample:
        return False
    usable, precision = Policy().usable_bytes(facts.cluster.device), precision_of(facts, partial)
    node, most = facts.cluster.devices_per_node, max(expert_degrees(facts, partial))
    degrees: set[tuple[int, int, tuple[tuple[str, str], ...]]] = {(1, 1, ()), (1, most, ())}
    wanted = partial.tp or node
    if node > 1 and wanted == node and (split := partial.tensor_styles or styles(node)):
        degrees.add((node, 1, tuple(split)))
    costs = costs or CostModel(facts)
    return all(
        one_sample_bytes(facts, precision, tp=tp, ep=ep, styles=split, costs=costs) > usable
        for tp, ep, split in sorted(degrees)
    )


def one_sample_bytes(
    facts: Facts,
    precision: Precision,
    *,
    tp: int = 1,
    ep: int = 1,
    styles: tuple[tuple[str, str], ...] = (),
    costs: CostModel | None = None,
) -> float:
    """The upper end of that peak; 0 where the model was not looked at in this precision."""
    plan = Plan(
        dp_shard=facts.cluster.world_size // tp,
        data_parallel=DataParallel.FULL_SHARD,
        tp=tp,
        ep=ep,
        tensor_styles=styles,
        microbatch_size=1,
        recompute=Recompute.FULL if any(facts.model.blocks()) else Recompute.NONE,
        precision=precision,
    )
    if not captured(plan, facts.model):
        return 0.0
    return (costs or CostModel(facts)).estimate(plan).peak_high_bytes


def expert_degrees(facts: Facts, partial: PartialPlan) -> list[int]:
    """Over how many ranks experts may be shared, if a pin does not say so: every number that
    divides both them and the devices."""
    counts = {count for unit in facts.model.blocks() for count in unit.experts}
    if partial.fixes("ep") or not counts:
        return [partial.ep or 1]
    return divisors(gcd(facts.cluster.world_size, *counts))


class _Builder:
    """Writes the columns, block by block."""

    def __init__(
        self, facts: Facts, partial: PartialPlan, styles: Styles, offload: Offload, is_long: bool
    ) -> None:
        self._facts = facts
        self._shards_tokens = partial.fixes("cp") or is_long
        self._partial = partial
        self._carried = partial.only(*_CARRIED)
        self._offload = offload
        self._precision = precision_of(facts, partial)
        self._styles_of = styles
        self._styles: dict[int, tuple[tuple[str, str], ...]] = {1: ()}
        self._legal: dict[tuple[object, ...], bool] = {}
        self._cuts: dict[tuple[bool, int], Integers] = {}
        self._orders: dict[tuple[int, int], Integers] = {}

    def space(self) -> Space:
        blocks = [np.empty((len(COLUMNS), 0), dtype=np.int64), *self._blocks()]
        columns = dict(zip(COLUMNS, np.concatenate(blocks, axis=1), strict=True))
        return Space(
            **columns,
            offload=self._offload,
            precision=self._precision,
            styles=self._styles,
            pieces=tuple(self._pieces) if columns["pp"].max(initial=1) > 1 else (),
            carried=self._carried,
        )

    def _blocks(self) -> Iterator[Integers]:
        """Rows of one shape and way to recompute, as columns."""
        batch = self._facts.workload.global_batch_size
        for pp, tp, cp, rest in self._model_degrees():
            for shape in self._shapes(rest, cp):
                local, left = divmod(batch, shape.replicate * shape.shard)
                if left:
                    continue
                for recompute in self._recomputes():
                    if not self._is_legal(pp, tp, cp, shape, recompute):
                        continue
                    ways = self._ways(pp, local)
                    numbers = (pp, tp, cp, shape.replicate, shape.shard, KINDS.index(shape.kind))
                    fixed = np.array([[*numbers, RECOMPUTES.index(recompute)]]).T
                    yield np.concatenate([np.repeat(fixed, ways.shape[1], axis=1), ways])

    def _model_degrees(self) -> Iterator[tuple[int, int, int, int]]:
        """(pp, tp, cp, ranks left for data), the model in one piece first."""
        world = self._facts.cluster.world_size
        world -= self._partial.extra_ranks
        if world < 1:
            return
        for pp in self._pinned("pp", divisors(world)):
            if pp > 1 and pp > len(self._pieces):
                continue
            for tp in self._pinned("tp", divisors(world // pp)):
                if (tp > 1 and not self._splits(tp)) or not self._goes_with_experts(pp, tp):
                    continue
                rest = world // pp // tp
                for cp in self._pinned("cp", self._sequence_degrees(rest)):
                    yield pp, tp, cp, rest // cp

    def _sequence_degrees(self, rest: int) -> list[int]:
        """Degrees of cp: all of them where sequences are sharded, else the least with which the
        batch divides over the replicas. Experts leave the devices no other axis."""
        if self._shards_tokens:
            return divisors(rest)
        batch = self._facts.workload.global_batch_size
        if not self._partial.fixes("ep") or not self._facts.model.tokens_per_sample:
            return [1]
        return [next(n for n in divisors(rest) if batch % (rest // n) == 0)]

    def _goes_with_experts(self, pp: int, tp: int) -> bool:
        """Whether a model that is cut so may share its experts, whatever the other degrees are."""
        plan = Plan.model_construct(pp=pp, tp=tp, ep=self._partial.ep or 1)
        found = experts(plan, self._facts.model, self._facts.cluster)
        return not any(problem.rule == "experts-with-model-axes" for problem in found)

    def _pinned(self, axis: str, degrees: list[int]) -> list[int]:
        wanted: int | None = getattr(self._partial, axis)
        return [n for n in degrees if wanted is None or n == wanted]

    def _splits(self, tp: int) -> bool:
        if tp not in self._styles:
            pinned = self._partial.tensor_styles
            self._styles[tp] = tuple(pinned) if pinned else self._styles_of(tp)
        return bool(self._styles[tp])

    @cached_property
    def _pieces(self) -> list[str]:
        return pieces(self._facts.model, self._facts.cluster) if self._facts.model.has_loss else []

    def _shapes(self, rest: int, cp: int) -> Iterator[Shape]:
        partial, wanted = self._partial, self._partial.kinds
        # Slower than DDP in every part, so nobody looks for it unasked; priced where it is named.
        threads = [Shape(DataParallel.THREADS, rest, 1)] if rest > 1 and wanted else []
        for shape in (*shapes(rest), *threads):
            if wanted is not None and shape.kind not in wanted:
                continue
            if partial.dp_replicate not in (None, shape.replicate):
                continue
            if partial.dp_shard not in (None, shape.shard):
                continue
            # One device shards nothing; only offload or the user's word makes it FSDP. Ranks of cp
            # share in what is sharded: of one replica as ZeRO-3 does it, the least memory.
            only = DataParallel.NONE if cp == 1 else DataParallel.FULL_SHARD
            alone = rest == 1 and shape.kind not in (DataParallel.NONE, only)
            if alone and wanted is None and not self._offload.states:
                continue
            yield shape

    def _recomputes(self) -> tuple[Recompute, ...]:
        if self._partial.recompute is not None:
            return (self._partial.recompute,)
        return RECOMPUTES if any(self._facts.model.blocks()) else (Recompute.NONE,)

    def _is_legal(self, pp: int, tp: int, cp: int, shape: Shape, recompute: Recompute) -> bool:
        """Cuts of the batch and orders of the pipeline are looked at apart; of degrees it matters
        whether they are 1, whether cp cuts a sequence evenly, and over how many ranks the shards of
        HSDP reach."""
        reach = shape.shard * cp * tp if shape.kind is DataParallel.HYBRID_SHARD else 0
        data = shape.replicate * shape.shard if self._partial.fixes("ep") else 0
        key = (pp > 1, tp > 1, cp, shape.kind, reach, data, recompute)
        if key not in self._legal:
            plan = self._representative(pp, tp, cp, shape, recompute)
            whole = self._facts.workload.optimizer.whole_because
            model, cluster = self._facts.model, self._facts.cluster
            found = problems(plan, model, cluster, whole_because=whole)
            self._legal[key] = not found and captured(plan, model)
        return self._legal[key]

    def _representative(
        self, pp: int, tp: int, cp: int, shape: Shape, recompute: Recompute
    ) -> Plan:
        staged: dict[str, Any] = {}
        if pp > 1:
            staged = {"schedule": Schedule.GPIPE, "stages": tuple(self._pieces[1:pp])}
        elif self._partial.fixes("schedule", "stages"):
            staged = self._partial.only("schedule", "stages").fixed
        elif tp == 1 and self._partial.fixes("tensor_styles"):
            staged = {"tensor_styles": self._partial.tensor_styles}
        return Plan.build(
            {
                "tensor_styles": self._styles[tp],
                **self._carried.fixed,
                **staged,
                "pp": pp,
                "tp": tp,
                "cp": cp,
                "data_parallel": shape.kind,
                "dp_replicate": shape.replicate,
                "dp_shard": shape.shard,
                "recompute": recompute,
                "precision": self._precision,
                "offload": self._offload,
            }
        )

    def _ways(self, pp: int, local: int) -> Integers:
        """The last columns: cuts of the `local` samples of a replica, with orders of stages."""
        cuts = self._cuts_of(pp, local)
        if pp == 1:
            alone = np.repeat([[0], [1]], cuts.shape[1], axis=1)
            return np.concatenate([cuts, alone])
        if (pp, local) not in self._orders:
            blocks = [np.empty((5, 0), dtype=np.int64)]
            for schedule in self._schedules():
                runs = [self._runs(schedule, pp, int(count)) for count in cuts[1]]
                kept = cuts[:, np.array(runs, dtype=bool)]
                for per_rank in self._per_rank(schedule, pp):
                    order = np.array([[SCHEDULES.index(schedule)], [per_rank]])
                    blocks.append(np.concatenate([kept, np.repeat(order, kept.shape[1], axis=1)]))
            self._orders[pp, local] = np.concatenate(blocks, axis=1)
        return self._orders[pp, local]

    def _cuts_of(self, pp: int, local: int) -> Integers:
        key = (pp > 1, local)
        if key not in self._cuts:
            partial = self._partial
            rounds = partial.microbatches or (None if pp > 1 else 1)
            wanted = (partial.microbatch_size, rounds, partial.accumulation)
            found = [
                way
                for way in factors(local)
                if all(w is None or w == n for w, n in zip(wanted, way, strict=True))
            ]
            self._cuts[key] = np.array(found, dtype=np.int64).reshape(-1, 3).T
        return self._cuts[key]

    def _schedules(self) -> tuple[Schedule, ...]:
        if self._partial.schedule is not None:
            return (self._partial.schedule,)
        return tuple(Schedule)

    def _per_rank(self, schedule: Schedule, pp: int) -> list[int]:
        if self._partial.stages is None:
            return list(stages_per_rank(schedule, pp, len(self._pieces)))
        stages = self._partial.stages
        plan = Plan(pp=pp, schedule=schedule, stages=stages, microbatches=pp)
        found = list(pipeline(plan, self._facts.model, self._facts.cluster))
        return [] if found else [(len(stages) + 1) // pp]

    def _runs(self, schedule: Schedule, pp: int, microbatches: int) -> bool:
        """Whether a schedule goes with so many microbatches.

        The naive one is GPipe of one microbatch: unless it is asked for, that is where it counts.
        """
        is_open = not self._partial.fixes("schedule")
        if is_open and (schedule is Schedule.NAIVE) != (microbatches == 1):
            return False
        key = (schedule, pp, microbatches)
        if key not in self._legal:
            plan = Plan(pp=pp, schedule=schedule, microbatches=microbatches)
            self._legal[key] = not any(schedule_problems(plan))
        return self._legal[key]
