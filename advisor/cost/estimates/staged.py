"""Estimate of a pipelined plan: every rank of the pp axis, and the whole pipeline's step."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

from advisor.cost.breakdown import Estimate, StageEstimate, Traffic
from advisor.cost.communication.exchange import rounds_of, stage_exchange
from advisor.cost.communication.exposed import gathers_s
from advisor.cost.communication.groups import replica_group, tie_stride
from advisor.cost.communication.small_collectives import small_collectives_s, summed_s
from advisor.cost.compute.unit_times import Busy, Computing, busy_s, optimizer_s
from advisor.cost.context import CostContext
from advisor.cost.estimates.assemble import assemble
from advisor.cost.estimates.borders import (
    Border,
    borders_of,
    charge_sends,
    received_into,
    retained_over,
)
from advisor.cost.estimates.stage_costs import StageCosts
from advisor.cost.ledger import Ledger
from advisor.cost.load.loads import combined
from advisor.cost.memory.offload import filed_s
from advisor.cost.memory.peak import Peak, shard_degree
from advisor.cost.stages.orders import SPLITS_BACKWARD, InFlight, moments_of, stages_of
from advisor.cost.stages.pipeline import Played, StageTimes, sends_late
from advisor.cost.stages.shared_cores import play_on_cores, slowest_s
from advisor.cost.stages.stage import StageCost
from advisor.cost.stages.stage_borders import TiedParameter, require_places
from advisor.cost.stages.stage_memory import StageMemory, chunk_of, stage_peak
from engines.plan import DataParallel, Plan, Schedule
from profiles.errors import PlanError
from profiles.workload.optimizers import Upkeep


@dataclass(frozen=True, slots=True)
class StageLayout:
    """Stages of a plan on the ranks of its pp axis.

    Attributes:
        own: the stages of each rank.
        in_round: microbatches of a round, between filling and draining; a step has `rounds`.
        whole: stages whose backward is not split, if the schedule splits backwards.
    """

    schedule: Schedule
    places: tuple[tuple[int, int], ...]
    own: tuple[tuple[int, ...], ...]
    borders: tuple[Border, ...]
    stages: StageCosts
    ties: tuple[TiedParameter, ...]
    in_round: int
    rounds: int
    whole: frozenset[int]

    def of(self, rank: int) -> list[StageCost]:
        """Stages of a rank."""
        return [self.stages[stage] for stage in self.own[rank]]

    def in_flight(self, rank: int) -> tuple[InFlight, ...]:
        """Microbatches in flight on a rank at the fullest moments of a round."""
        return moments_of(
            self.schedule,
            rank,
            ranks=len(self.own),
            stages=len(self.stages),
            microbatches=self.in_round,
            whole=self.whole,
        )

    @property
    def splits(self) -> frozenset[int]:
        """Stages that compute input gradients first in a backward; the first stage has none."""
        if self.schedule not in SPLITS_BACKWARD:
            return frozenset()
        return frozenset(range(1, len(self.stages))) - self.whole


def staged(model: CostContext, plan: Plan) -> Estimate:
    """Estimate memory of the fullest rank, time of the pipeline, traffic of the busiest rank."""
    layout = laid_out(model, plan)
    updates = [_update(model, plan, layout, rank) for rank in range(plan.pp)]
    peaks = [peak_of_rank(model, plan, layout, rank) for rank in range(plan.pp)]
    order = sorted(range(plan.pp), key=lambda rank: -peaks[rank].high_bytes)
    fullest = order[0]
    # Name moments by this rank's units, not by those of an equal earlier stage.
    named = [_chunk(model, plan, layout, stage) for stage in layout.own[fullest]]
    memory = peak_of_rank(model, plan, layout, fullest, named)

    waits = sends_late(layout.schedule) or not model.overlaps
    times, cluster = _times(layout), model.facts.cluster
    played = play_on_cores(
        layout.schedule, times, plan, cluster, microbatches=layout.in_round, waits=waits
    )
    tails = [_Tail.of(model, plan, layout, rank) for rank in range(plan.pp)]
    busiest = max(range(plan.pp), key=lambda rank: played.busy_s[rank] + tails[rank].total_s)
    ledger, unhidden_s = _charged(model, plan, layout, busiest)
    unhidden_s += filed_s(
        plan,
        [stage.part for stage in layout.of(busiest)],
        updates[busiest],
        ledger,
        degree=shard_degree(plan),
        rounds=layout.rounds,
        cluster=cluster,
    )
    again = layout.rounds - 1
    timed = [[(s.forward_s, s.late_s) for s in layout.of(rank)] for rank in range(plan.pp)]
    late = gathers_s(model.stack, timed)
    between = max(end + tail.round_s for end, tail in zip(played.end_s, tails, strict=True))
    last = max(end + tail.last_s for end, tail in zip(played.end_s, tails, strict=True))
    wall = late + again * between + last + unhidden_s
    together_s = layout.in_round * sum(times.busy_s[stage] for stage in layout.own[busiest])
    share = played.busy_s[busiest] / together_s if together_s else 1.0
    busy = _busy(layout, busiest, plan.forwards).times(share)
    inside = layout.rounds * played.busy_s[busiest] - busy.total
    waited = again * tails[busiest].round_s + tails[busiest].last_s + unhidden_s + late
    exposed = max(0.0, inside) + waited
    sent = plan.forwards * sum(stage.sent_s for stage in layout.of(busiest)) + waited
    device, ranks = cluster.device, cluster.devices_per_node
    estimate = assemble(
        model,
        plan,
        memory=memory,
        busy=busy,
        update_s=slowest_s(
            [
                optimizer_s(plan, each, device=device, ranks=ranks, waiting=busy.waiting)
                for each in updates
            ],
            plan,
            cluster,
        ),
        exposed_s=exposed,
        overlapped_s=max(0.0, sent - exposed) if model.overlaps else 0.0,
        sent_s=sent,
        idle_s=max(0.0, wall - busy.total - exposed),
        computing=_of_all(layout.stages),
        ledger=ledger,
    )
    names = [unit.name for unit in model.facts.model.units]
    stages = [
        _estimate_of(layout, rank, peaks[rank], names=names, played=played, wall_s=wall)
        for rank in order
    ]
    return estimate.model_copy(update={"stages": tuple(stages)})


def laid_out(model: CostContext, plan: Plan) -> StageLayout:
    """Assign the stages of `plan` to its ranks.

    Raises:
        PlanError: no schedule, or a number of stages that the schedule cannot run.
    """
    if plan.schedule is None:
        raise PlanError("a pipeline needs a schedule to have a cost", where=f"plan: {plan}")
    schedule, ends = plan.schedule, model.stages.ends(plan)
    count = len(ends) - 1
    require_places(plan, count)
    borders = borders_of(model, plan, ends)
    splits = schedule in SPLITS_BACKWARD
    return StageLayout(
        schedule=schedule,
        places=tuple(pairwise(ends)),
        own=tuple(stages_of(schedule, r, ranks=plan.pp, stages=count) for r in range(plan.pp)),
        borders=tuple(borders),
        stages=StageCosts(model, plan, tuple(pairwise(ends)), borders),
        ties=model.stages.ties(plan, ends),
        in_round=1 if schedule is Schedule.NAIVE else plan.microbatches,
        rounds=rounds_of(plan),
        whole=model.stages.whole_backwards(plan, ends) if splits else frozenset(),
    )


def _update(model: CostContext, plan: Plan, layout: StageLayout, rank: int) -> Upkeep:
    """Optimizer of a rank's parameters, including copies of tied ones."""
    return model.update_of(
        plan,
        [layout.places[stage] for stage in layout.own[rank]],
        [tie.unit for tie in layout.ties if rank in tie.ranks[1:]],
    )


def peak_of_rank(
    model: CostContext,
    plan: Plan,
    layout: StageLayout,
    rank: int,
    chunks: Sequence[StageMemory] | None = None,
) -> Peak:
    """Peak of a rank, with `chunks` for its stages; by default those of the first equal stages."""
    received = received_bytes(layout, rank)
    copies = [tie.unit.parameter_bytes for tie in layout.ties if rank in tie.ranks[1:]]
    parts, of_equal = zip(*(layout.stages.memory(n) for n in layout.own[rank]), strict=True)
    return stage_peak(
        plan,
        parts,
        chunks or of_equal,
        layout.in_flight(rank),
        update=_update(model, plan, layout, rank),
        device=model.facts.cluster.device,
        batch_bytes=model.batch_bytes(plan) + model.loads(plan).buffer_bytes,
        buffer_bytes=received,
        copied_bytes=sum(copies),
        stack=model.stack,
        calibration=model.calibration,
    )


def received_bytes(layout: StageLayout, rank: int) -> float:
    """Bytes of all that a rank's stages receive of one microbatch."""
    return sum(sum(received_into(layout.borders, stage)) for stage in layout.own[rank])


def _chunk(model: CostContext, plan: Plan, layout: StageLayout, stage: int) -> StageMemory:
    received, sent = retained_over(model, plan, layout.borders, stage, layout.places[stage])
    return chunk_of(
        plan,
        layout.stages[stage].part,
        received_bytes=received,
        sent_bytes=sent,
        messages=received_into(layout.borders, stage),
        stack=model.stack,
    )


def traffic_of_ranks(model: CostContext, plan: Plan) -> tuple[tuple[Traffic, ...], ...]:
    """Traffic of each rank of the pp axis, for a legal plan with stages."""
    layout = laid_out(model, plan)
    charged = (_charged(model, plan, layout, rank) for rank in range(plan.pp))
    return tuple(ledger.traffic() for ledger, _ in charged)


def _charged(
    model: CostContext, plan: Plan, layout: StageLayout, rank: int
) -> tuple[Ledger, float]:
    """Charge all of a rank's communication in a step; return the seconds of small collectives
    too."""
    ledger = model.ledger()
    # FSDP2's root group belongs to the rank, whichever of its stages has the parameters.
    parts = combined([stage.part for stage in layout.of(rank)])
    stage_exchange(
        plan,
        parts,
        ledger,
        has_host=model.overlaps,
        reduced_share=model.reduced_share,
        stack=model.stack,
    )
    charge_sends(plan, layout.own[rank], layout.borders, ledger)
    _Tail.of(model, plan, layout, rank, ledger)
    return ledger, small_collectives_s(plan, model.facts.model, ledger)


def _times(layout: StageLayout) -> StageTimes:
    """Times of all stages. The halves of a split backward are equal, since a product has a gradient
    for each factor. Recompute belongs to the first half; the first stage has only the second."""
    schedule, stages = layout.schedule, layout.stages
    backward_s, weight_s = [], []
    for number, stage in enumerate(stages):
        host_s = stage.split_s if number in layout.splits else 0.0
        again = sum(t.count * (t.recompute_s + t.recompute_launch_s) for t in stage.computing.times)
        split = 0.0
        if schedule in SPLITS_BACKWARD and number not in layout.whole:
            split = stage.backward_s if number == 0 else (stage.backward_s - again) / 2
        backward_s.append(stage.backward_s - split)
        weight_s.append(split + host_s)
    return StageTimes(
        forward_s=tuple(stage.forward_s for stage in stages),
        backward_s=tuple(backward_s),
        weight_s=tuple(weight_s),
        send_s=tuple(border.seconds for border in layout.borders),
    )


@dataclass(frozen=True, slots=True)
class _Tail:
    """Seconds of a rank's communication at the end of a round, and at the end of the last one."""

    round_s: float
    last_s: float

    @property
    def total_s(self) -> float:
        return self.round_s + self.last_s

    @classmethod
    def of(
        cls,
        model: CostContext,
        plan: Plan,
        layout: StageLayout,
        rank: int,
        ledger: Ledger | None = None,
    ) -> _Tail:
        """Create for a rank; communication is recorded in `ledger`."""
        ledger = ledger or model.ledger()
        kind, stages = plan.data_parallel, layout.of(rank)
        copies = [tie for tie in layout.ties if rank in tie.ranks[1:]]
        reduce_s = sum(stage.reduce_s for stage in stages)
        replicate_s = sum(stage.replicate_s for stage in stages)
        settle_s = 0.0
        if not kind.is_sharded:
            group, stride = replica_group(plan)
            settle_s += summed_s(
                ledger,
                "gradients",
                gradient_bytes=model.reduced_share
                * (
                    sum(stage.part.common_gradient_bytes for stage in stages)
                    + sum(tie.unit.gradient_bytes for tie in copies)
                ),
                tensors=sum(stage.part.common_tensors for stage in stages) + len(copies),
                group_size=group,
                stride=stride,
            )
        units = [unit for stage in stages for unit in stage.part.runs]
        settle_s += model.partial_s(plan, units, ledger)
        settle_s += model.whole_s(plan, units, ledger)
        settle_s += model.experts_s(plan, units, ledger)
        settle_s += tied_s(plan, layout.ties, rank, ledger)
        if model.stack.states is not None and model.stack.overlap_gradients:
            # Buckets overlap with the last microbatch's backward.
            hidden = sum(stage.backward_s for stage in stages)
            left = max(0.0, hidden - reduce_s)
            reduce_s, settle_s = max(0.0, reduce_s - hidden), max(0.0, settle_s - left)
        once = kind is DataParallel.ZERO1
        return cls(round_s=0.0 if once else reduce_s, last_s=reduce_s + replicate_s + settle_s)


def tied_s(plan: Plan, ties: Sequence[TiedParameter], rank: int, ledger: Ledger) -> float:
    """Seconds per step in which a rank sums the gradients of parameters that other stages share."""
    return sum(
        summed_s(
            ledger,
            "gradients of tied parameters",
            gradient_bytes=tie.unit.gradient_bytes / shard_degree(plan),
            tensors=1,
            group_size=len(tie.ranks),
            stride=tie_stride(tie.ranks, plan),
        )
        for tie in ties
        if rank in tie.ranks
    )


def _busy(layout: StageLayout, rank: int, forwards: int) -> Busy:
    stages = layout.of(rank)
    parts = [busy_s(stage.computing, forwards) for stage in stages]
    host_s = sum(stage.host_s for stage in stages)
    host_s += sum(layout.stages[n].split_s for n in layout.own[rank] if n in layout.splits)
    return Busy(
        compute_s=sum(part.compute_s for part in parts),
        recompute_s=sum(part.recompute_s for part in parts),
        launch_s=sum(part.launch_s for part in parts) + forwards * host_s,
    )


def _of_all(stages: Sequence[StageCost]) -> Computing:
    """Error and measured share of all stages' compute, weighted by seconds."""
    busy = [stage.forward_s + stage.backward_s for stage in stages]
    total = sum(busy) or 1.0
    computing = [stage.computing for stage in stages]
    return Computing(
        times=(),
        error=sum(c.error * s for c, s in zip(computing, busy, strict=True)) / total,
        measured_share=sum(c.measured_share * s for c, s in zip(computing, busy, strict=True))
        / total,
    )


def _estimate_of(
    layout: StageLayout,
    rank: int,
    peak: Peak,
    *,
    names: Sequence[str],
    played: Played,
    wall_s: float,
) -> StageEstimate:
    busy_s = layout.rounds * played.busy_s[rank]
    ends = [layout.places[stage] for stage in layout.own[rank]]
    return StageEstimate(
        rank=rank,
        units=tuple((names[first], names[last - 1]) for first, last in ends),
        peak_bytes=peak.memory.total,
        peak_low_bytes=peak.low_bytes,
        peak_high_bytes=peak.high_bytes,
        reserved_bytes=peak.reserved_bytes,
        states_bytes=peak.states_bytes,
        in_flight=max(sum(moment.saved) for moment in layout.in_flight(rank)),
        forward_s=sum(stage.forward_s for stage in layout.of(rank)),
        backward_s=sum(stage.backward_s for stage in layout.of(rank)),
        busy_s=busy_s,
        idle_s=max(0.0, wall_s - busy_s),
    )
