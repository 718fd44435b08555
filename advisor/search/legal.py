"""Legal rows: all degrees, batch splits, recompute modes and schedules that the engines can run.

`engines.legality` checks one plan of every group of rows that it treats the same; illegal rows are
not created.
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
from advisor.inputs.stacks import is_of_engines, styles_under
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
from engines.legality.pipeline import pipeline, schedule_problems
from engines.plan import DataParallel, Offload, PartialPlan, Plan, Precision, Recompute, Schedule
from engines.tensor.rules import proposed_styles
from engines.tensor.token_rules import split_tokens, splits_tokens
from profiles.machine.cluster import ClusterProfile
from profiles.model.profile import ModelProfile

Styles = Callable[[int], tuple[tuple[str, str], ...]]
"""Tensor styles of layers by tp degree; empty if they cannot be split."""

# Settings that are not searched: given or default.
_UPDATES = ("updates", "sync_every", "servers", "backup_workers", "max_staleness")
_AGGREGATION = ("aggregation", "compression", "compression_rank")
_NOT_SEARCHED = (
    "ep",
    "sync_batch_norm",
    "compile",
    "offload_to",
    "bucket_mib",
    "sequence_parallel",
    "loss_chunks",
    "recompute_blocks",
    *_AGGREGATION,
    *_UPDATES,
)
# The first columns of a space, equal for many rows: degrees, kind and recompute.
_FIXED = 7


@dataclass(frozen=True, slots=True)
class DataDegrees:
    """Data-parallel kind with its degrees."""

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
    """Every legal plan with the settings of `partial`, simpler degrees and kinds first.

    Sequences are sharded (cp) only if one is too long for a device (`is_long`, computed by
    `is_too_long` unless given) or `partial` says so: otherwise replicas do the same work without
    sending keys and values.

    Precision is the workload's and not searched; states are offloaded only if `offload` or
    `partial` says so.
    """
    offload = partial.offload or offload
    costs = costs or CostModel(facts)
    if is_long is None:
        is_long = is_too_long(facts, partial, styles, costs=costs)
    return _Builder(facts, partial, styles, offload, is_long).space()


def styles_of(facts: Facts, *, by_tokens: bool | None = None) -> Styles:
    """Tensor styles that follow from the model's profile and the stack.

    Args:
        by_tokens: `sequence_parallel` of the plan; None: as the stack does. Our engines split
            blocks by tokens wherever they can on accelerators, as torchtitan and Megatron-LM do:
            it sends the same bytes and saves less (arXiv:2205.05198). gloo's reduce-scatter sends
            as much as a whole all-reduce, so that layers alone are split on processors.
    """
    if by_tokens is None and is_of_engines(facts.stack):
        by_tokens = facts.cluster.device.kind != "cpu"

    def styles(tp: int) -> tuple[tuple[str, str], ...]:
        layers = proposed_styles(facts.model, tp)
        if by_tokens is None:
            return styles_under(facts.stack, layers)
        return split_tokens(facts.model, layers, tp) if by_tokens else layers

    return styles


def segment_starts(model: ModelProfile, cluster: ClusterProfile) -> list[str]:
    """Units that may begin a stage, in call order, including the first one of the model."""
    order = list(model.flow.order)
    return order[:1] + [unit for unit in order[1:] if _is_border(unit, model, cluster)]


def _is_border(unit: str, model: ModelProfile, cluster: ClusterProfile) -> bool:
    alone = Plan(pp=2, schedule=Schedule.GPIPE, stages=(unit,))
    return not any(pipeline(alone, model, cluster))


def data_degrees(world: int) -> Iterator[DataDegrees]:
    """Yield all data-parallel kinds and degrees of `world` ranks."""
    if world == 1:
        yield DataDegrees(DataParallel.NONE, 1, 1)
    else:
        yield DataDegrees(DataParallel.REPLICATE, world, 1)
    yield DataDegrees(DataParallel.ZERO1, world, 1)
    yield DataDegrees(DataParallel.ZERO2, world, 1)
    yield DataDegrees(DataParallel.FULL_SHARD, 1, world)
    for shard in divisors(world)[1:-1]:
        yield DataDegrees(DataParallel.HYBRID_SHARD, world // shard, shard)


def precision_of(facts: Facts, partial: PartialPlan) -> Precision:
    """Precision of all plans with the settings of `partial`."""
    return partial.precision or facts.precision


def is_too_long(
    facts: Facts, partial: PartialPlan, styles: Styles, *, costs: CostModel | None = None
) -> bool:
    """Return True if one sample does not fit a device, whatever the split of the batch.

    Tried with full sharding and recompute: alone, with layers split over the devices of a node, and
    with experts split over as many ranks as possible.

    Args:
        costs: cost model of these facts, if there is one.
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
    """Upper end of the peak for one sample, fully sharded and recomputed; 0 if the model was not
    captured in this precision."""
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
    """Possible degrees of expert parallelism: `partial`'s, or all common divisors of the numbers of
    experts and devices."""
    counts = {count for unit in facts.model.blocks() for count in unit.experts}
    if partial.fixes("ep") or not counts:
        return [partial.ep or 1]
    return divisors(gcd(facts.cluster.world_size, *counts))


class _Builder:
    """Builder of a space's columns, block by block."""

    def __init__(
        self, facts: Facts, partial: PartialPlan, styles: Styles, offload: Offload, is_long: bool
    ) -> None:
        self._facts = facts
        self._shards_tokens = partial.fixes("cp") or is_long
        self._partial = partial
        self._common = partial.only(*_NOT_SEARCHED)
        self._offload = offload
        self._precision = precision_of(facts, partial)
        self._styles_of = styles
        self._styles: dict[int, tuple[tuple[str, str], ...]] = {1: ()}
        self._legal: dict[tuple[object, ...], bool] = {}
        self._cuts: dict[tuple[bool, int], Integers] = {}
        self._orders: dict[tuple[int, int], Integers] = {}

    def space(self) -> Space:
        blocks = list(self._blocks())
        settings = np.array([fixed for fixed, _ in blocks], dtype=np.int64).reshape(-1, _FIXED)
        fixed = np.repeat(settings.T, [cuts.shape[1] for _, cuts in blocks], axis=1)
        none = np.empty((len(COLUMNS) - _FIXED, 0), dtype=np.int64)
        cuts = np.concatenate([none, *(cuts for _, cuts in blocks)], axis=1)
        columns = dict(zip(COLUMNS, (*fixed, *cuts), strict=True))
        return Space(
            **columns,
            offload=self._offload,
            precision=self._precision,
            styles=self._styles,
            segments=tuple(self._segment_starts) if columns["pp"].max(initial=1) > 1 else (),
            common=self._common,
        )

    def _blocks(self) -> Iterator[tuple[tuple[int, ...], Integers]]:
        """Yield equal degrees, kind and recompute, with the other columns of all rows of them."""
        batch = self._facts.workload.global_batch_size
        for pp, tp, cp, rest in self._model_degrees():
            for data in self._data_degrees(rest, cp):
                local, left = divmod(batch, data.replicate * data.shard)
                if left:
                    continue
                for recompute in self._recomputes():
                    if not self._is_legal(pp, tp, cp, data, recompute):
                        continue
                    cuts = self._cuts_with_schedules(pp, local)
                    degrees = pp, tp, cp, data.replicate, data.shard
                    yield (*degrees, KINDS.index(data.kind), RECOMPUTES.index(recompute)), cuts

    def _model_degrees(self) -> Iterator[tuple[int, int, int, int]]:
        """Yield (pp, tp, cp, data-parallel ranks), smaller degrees first."""
        world = self._facts.cluster.world_size
        world -= self._partial.extra_ranks
        if world < 1:
            return
        for pp in self._pinned("pp", divisors(world)):
            if pp > 1 and pp > len(self._segment_starts):
                continue
            for tp in self._pinned("tp", divisors(world // pp)):
                if tp > 1 and not self._can_split(tp):
                    continue
                rest = world // pp // tp
                for cp in self._pinned("cp", self._sequence_degrees(rest)):
                    yield pp, tp, cp, rest // cp

    def _sequence_degrees(self, rest: int) -> list[int]:
        """Degrees of cp: all if sequences are sharded, else the smallest with which the batch is
        divisible by the replicas, if ep is given: with experts no other axis is left."""
        if self._shards_tokens:
            return divisors(rest)
        batch = self._facts.workload.global_batch_size
        if not self._partial.fixes("ep") or not self._facts.model.tokens_per_sample:
            return [1]
        return [next(n for n in divisors(rest) if batch % (rest // n) == 0)]

    def _pinned(self, axis: str, degrees: list[int]) -> list[int]:
        wanted: int | None = getattr(self._partial, axis)
        return [n for n in degrees if wanted is None or n == wanted]

    def _can_split(self, tp: int) -> bool:
        if tp not in self._styles:
            self._styles[tp] = self._partial.tensor_styles or self._styles_of(tp)
        if self._partial.sequence_parallel and not splits_tokens(self._styles[tp]):
            return False
        return bool(self._styles[tp])

    @cached_property
    def _segment_starts(self) -> list[str]:
        model = self._facts.model
        return segment_starts(model, self._facts.cluster) if model.has_loss else []

    def _data_degrees(self, rest: int, cp: int) -> Iterator[DataDegrees]:
        partial, wanted = self._partial, self._partial.kinds
        # Slower than DDP in every term, so not searched; estimated if it is named.
        threads = [DataDegrees(DataParallel.THREADS, rest, 1)] if rest > 1 and wanted else []
        for data in (*data_degrees(rest), *threads):
            if wanted is not None and data.kind not in wanted:
                continue
            if partial.dp_replicate not in (None, data.replicate):
                continue
            if partial.dp_shard not in (None, data.shard):
                continue
            # One device shards nothing: FSDP only with offload or if named. With cp its ranks shard
            # one replica, as ZeRO-3, which takes the least memory.
            only = DataParallel.NONE if cp == 1 else DataParallel.FULL_SHARD
            alone = rest == 1 and data.kind not in (DataParallel.NONE, only)
            if alone and wanted is None and not self._offload.states:
                continue
            yield data

    def _recomputes(self) -> tuple[Recompute, ...]:
        if self._partial.recompute is not None:
            return (self._partial.recompute,)
        return RECOMPUTES if any(self._facts.model.blocks()) else (Recompute.NONE,)

    def _is_legal(self, pp: int, tp: int, cp: int, data: DataDegrees, recompute: Recompute) -> bool:
        """Return True if a plan is legal, whatever its batch split and schedule.

        It depends on which degrees are 1, and on whether ep divides the data-parallel ranks, the
        chunks of cp a sequence, and nodes the ranks that a shard group of HSDP spans, or these a
        node.
        """
        tokens, node = self._facts.model.tokens_per_sample or 0, self._facts.cluster.domain_devices
        span = data.shard * cp * tp if data.kind is DataParallel.HYBRID_SHARD else 1
        divides = (
            data.replicate * data.shard % (self._partial.ep or 1) == 0,
            tokens % (2 * cp) == 0,
            node % span == 0 or span % node == 0,
        )
        key = (pp > 1, tp > 1, cp > 1, data.kind, recompute, *divides)
        if key not in self._legal:
            plan = self._representative(pp, tp, cp, data, recompute)
            whole = self._facts.workload.optimizer.indivisible
            model, cluster = self._facts.model, self._facts.cluster
            violations = problems(plan, model, cluster, indivisible=whole)
            self._legal[key] = not violations and captured(plan, model)
        return self._legal[key]

    def _representative(
        self, pp: int, tp: int, cp: int, data: DataDegrees, recompute: Recompute
    ) -> Plan:
        staged: dict[str, Any] = {}
        if pp > 1:
            staged = {"schedule": Schedule.GPIPE, "stages": tuple(self._segment_starts[1:pp])}
        elif self._partial.fixes("schedule", "stages"):
            staged = self._partial.only("schedule", "stages").fixed
        elif tp == 1 and self._partial.fixes("tensor_styles"):
            staged = {"tensor_styles": self._partial.tensor_styles}
        return Plan.build(
            {
                "tensor_styles": self._styles[tp],
                "sequence_parallel": splits_tokens(self._styles[tp]),
                **self._common.fixed,
                **staged,
                "pp": pp,
                "tp": tp,
                "cp": cp,
                "data_parallel": data.kind,
                "dp_replicate": data.replicate,
                "dp_shard": data.shard,
                "recompute": recompute,
                "precision": self._precision,
                "offload": self._offload,
            }
        )

    def _cuts_with_schedules(self, pp: int, local: int) -> Integers:
        """Last columns: cuts of a replica's `local` samples, with schedule and stages per rank."""
        cuts = self._cuts_of(pp, local)
        if pp == 1:
            alone = np.repeat([[0], [1]], cuts.shape[1], axis=1)
            return np.concatenate([cuts, alone])
        if (pp, local) not in self._orders:
            blocks = [np.empty((5, 0), dtype=np.int64)]
            for schedule in self._schedules():
                counts, which = np.unique(cuts[1], return_inverse=True)
                is_legal = [self._is_schedule_legal(schedule, pp, int(n)) for n in counts]
                legal = cuts[:, np.array(is_legal, dtype=bool)[which]]
                for per_rank in self._per_rank(schedule, pp):
                    order = np.array([[SCHEDULES.index(schedule)], [per_rank]])
                    blocks.append(np.concatenate([legal, np.repeat(order, legal.shape[1], axis=1)]))
            self._orders[pp, local] = np.concatenate(blocks, axis=1)
        return self._orders[pp, local]

    def _cuts_of(self, pp: int, local: int) -> Integers:
        key = (pp > 1, local)
        if key not in self._cuts:
            partial = self._partial
            rounds = partial.microbatches or (None if pp > 1 else 1)
            wanted = (partial.microbatch_size, rounds, partial.accumulation)
            cuts = [
                cut
                for cut in factors(local)
                if all(w is None or w == n for w, n in zip(wanted, cut, strict=True))
            ]
            self._cuts[key] = np.array(cuts, dtype=np.int64).reshape(-1, 3).T
        return self._cuts[key]

    def _schedules(self) -> tuple[Schedule, ...]:
        if self._partial.schedule is not None:
            return (self._partial.schedule,)
        return tuple(Schedule)

    def _per_rank(self, schedule: Schedule, pp: int) -> list[int]:
        if self._partial.stages is None:
            return list(stages_per_rank(schedule, pp, len(self._segment_starts)))
        stages = self._partial.stages
        plan = Plan(pp=pp, schedule=schedule, stages=stages, microbatches=pp)
        violations = list(pipeline(plan, self._facts.model, self._facts.cluster))
        return [] if violations else [(len(stages) + 1) // pp]

    def _is_schedule_legal(self, schedule: Schedule, pp: int, microbatches: int) -> bool:
        """Return True if a schedule can run so many microbatches.

        With one microbatch GPipe is the naive schedule: unless given, only the latter is searched
        there, and only there.
        """
        is_open = not self._partial.fixes("schedule")
        if is_open and (schedule is Schedule.NAIVE) != (microbatches == 1):
            return False
        key = (schedule, pp, microbatches)
        if key not in self._legal:
            plan = Plan(pp=pp, schedule=schedule, microbatches=microbatches)
            self._legal[key] = not any(schedule_problems(plan))
        return self._legal[key]
