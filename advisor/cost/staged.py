"""The estimate of a plan with stages: every rank of the pp axis, and the step of all together."""

from __future__ import annotations

from collections.abc import Container, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import TYPE_CHECKING

from advisor.cost.breakdown import Estimate, StageEstimate, Traffic
from advisor.cost.communication import (
    apart_s,
    replica_group,
    rounds_of,
    stage_exchange,
    summed_s,
)
from advisor.cost.compute import Busy, Computing, busy_s, optimizer_s
from advisor.cost.ledger import Ledger
from advisor.cost.loads import Loads
from advisor.cost.memory import Peak, shard_degree
from advisor.cost.orders import SPLITS_BACKWARD, gathers_of_root, moments, stages_of
from advisor.cost.pipeline import Played, StageTimes, play, sends_late
from advisor.cost.replay import backward, forward
from advisor.cost.stage_memory import Chunk, chunk_of, stage_peak
from advisor.cost.stages import Tie
from engines.plan import DataParallel, Plan, Schedule
from profiles.cluster import Collective
from profiles.errors import PlanError

if TYPE_CHECKING:
    from advisor.cost.model import CostModel


@dataclass(frozen=True, slots=True)
class _Stage:
    """One stage: seconds of one microbatch, and bytes.

    Attributes:
        late_s: what its first forward of a step waits for parameters that stay whole after it.
        reduce_s: to reduce its gradients, `replicate_s` between replicas of the shards.
    """

    part: Loads
    chunk: Chunk
    computing: Computing
    forward_s: float
    backward_s: float
    late_s: float
    reduce_s: float
    replicate_s: float
    sent_s: float


@dataclass(frozen=True, slots=True)
class _Border:
    """What one microbatch sends over a border, there and back, and the slower of both."""

    there_bytes: float
    back_bytes: float
    seconds: float


def staged(model: CostModel, plan: Plan) -> Estimate:
    """Memory of the fullest rank; time of the whole pipeline, and traffic of its busiest rank."""
    if plan.schedule is None:
        raise PlanError("a pipeline needs a schedule to have a cost", where=f"plan: {plan}")
    schedule = plan.schedule
    cluster = model.facts.cluster
    ends = model.stages.ends(plan)
    places = list(pairwise(ends))
    _require_places(plan, len(places))
    own = [stages_of(schedule, r, ranks=plan.pp, stages=len(places)) for r in range(plan.pp)]
    in_round = 1 if schedule is Schedule.NAIVE else plan.microbatches
    rounds = rounds_of(plan)
    borders = _borders(model, plan, ends)
    stages = _stages(model, plan, ends, borders)
    whole = model.stages.whole_backwards(ends) if schedule in SPLITS_BACKWARD else frozenset[int]()
    halved = range(1, len(places)) if schedule in SPLITS_BACKWARD else range(0)
    splits = frozenset(halved) - whole
    times = _times(schedule, stages, borders, whole)
    waits = sends_late(schedule) or not model.overlaps
    played = play(schedule, times, ranks=plan.pp, microbatches=in_round, waits=waits)

    ties = model.stages.ties(plan, ends)
    in_flight = moments(
        schedule, ranks=plan.pp, stages=len(places), microbatches=in_round, whole=whole
    )
    batch_bytes = model.batch_bytes(plan) + model.loads(plan).buffer_bytes
    updates = [
        model.update_of(
            plan, [places[s] for s in own[r]], [tie.unit for tie in ties if r in tie.ranks[1:]]
        )
        for r in range(plan.pp)
    ]

    def peak_of(rank: int, chunks: Sequence[Chunk]) -> Peak:
        return stage_peak(
            plan,
            [stages[s].part for s in own[rank]],
            chunks,
            in_flight[rank],
            update=updates[rank],
            device=cluster.device,
            batch_bytes=batch_bytes,
            buffer_bytes=in_round
            * sum(_received_into(borders, s, splits=splits) for s in own[rank]),
            copied_bytes=sum(t.unit.parameter_bytes for t in ties if rank in t.ranks[1:]),
        )

    peaks = [peak_of(rank, [stages[s].chunk for s in own[rank]]) for rank in range(plan.pp)]
    tails = [_Tail.of(model, plan, [stages[s] for s in own[r]], r, ties) for r in range(plan.pp)]
    update_s = [
        optimizer_s(plan, update, device=cluster.device, ranks=cluster.devices_per_node)
        for update in updates
    ]
    busiest = max(range(plan.pp), key=lambda rank: played.busy_s[rank] + tails[rank].total_s)
    fullest = max(range(plan.pp), key=lambda rank: peaks[rank].high_bytes)
    # Its moments are named after its own units.
    named = [
        chunk_of(
            plan,
            stages[s].part,
            received_bytes=_sent(borders, s - 1),
            sent_bytes=_sent(borders, s),
        )
        for s in own[fullest]
    ]
    memory = peak_of(fullest, named)

    ledger, apart = _charged(model, plan, busiest, own[busiest], stages, borders, ties)
    late = sum(stage.late_s for stage in stages)
    between = max(end + tail.round_s for end, tail in zip(played.end_s, tails, strict=True))
    last = max(end + tail.last_s for end, tail in zip(played.end_s, tails, strict=True))
    wall = late + (rounds - 1) * between + last + apart
    busy = _busy([stages[s] for s in own[busiest]], plan.forwards)
    inside = rounds * played.busy_s[busiest] - busy.total
    tail_s = (rounds - 1) * tails[busiest].round_s + tails[busiest].last_s
    exposed = max(0.0, inside) + tail_s + apart + late
    sent = plan.forwards * sum(stages[s].sent_s for s in own[busiest]) + tail_s + apart + late
    found = model.assemble(
        plan,
        memory=memory,
        busy=busy,
        update_s=max(update_s),
        exposed_s=exposed,
        overlapped_s=max(0.0, sent - exposed) if model.overlaps else 0.0,
        sent_s=sent,
        idle_s=max(0.0, wall - busy.total - exposed),
        computing=_of_all(stages),
        ledger=ledger,
    )
    order = sorted(range(plan.pp), key=lambda rank: -peaks[rank].high_bytes)
    names = [unit.name for unit in model.facts.model.units]
    return found.model_copy(
        update={
            "stages": tuple(
                _estimate_of(
                    rank,
                    [(names[places[s][0]], names[places[s][1] - 1]) for s in own[rank]],
                    peaks[rank],
                    [stages[s] for s in own[rank]],
                    in_flight=max(sum(moment.held) for moment in in_flight[rank]),
                    played=played,
                    rounds=rounds,
                    wall_s=wall,
                )
                for rank in order
            )
        }
    )


def traffic_of_ranks(model: CostModel, plan: Plan) -> tuple[tuple[Traffic, ...], ...]:
    """What each rank of the pp axis is charged for, in their order; a legal plan with stages."""
    ends = model.stages.ends(plan)
    assert plan.schedule is not None
    borders, ties = _borders(model, plan, ends), model.stages.ties(plan, ends)
    count = len(ends) - 1
    stages = _stages(model, plan, ends, borders)
    found = []
    for rank in range(plan.pp):
        own = stages_of(plan.schedule, rank, ranks=plan.pp, stages=count)
        ledger, _ = _charged(model, plan, rank, own, stages, borders, ties)
        found.append(ledger.traffic())
    return tuple(found)


def _charged(
    model: CostModel,
    plan: Plan,
    rank: int,
    own: Sequence[int],
    stages: Sequence[_Stage],
    borders: Sequence[_Border],
    ties: Sequence[Tie],
) -> tuple[Ledger, float]:
    """All that a rank with the stages `own` sends in a step; seconds of the small collectives."""
    ledger = model.ledger()
    assert plan.schedule is not None
    in_round = 1 if plan.schedule is Schedule.NAIVE else plan.microbatches
    gathers = rounds_of(plan) * gathers_of_root(
        plan.schedule, rank, ranks=plan.pp, stages=len(stages), microbatches=in_round
    )
    for s in own:
        stage_exchange(plan, stages[s].part, ledger, has_host=model.overlaps, root_gathers=gathers)
    _charge_sends(plan, own, borders, ledger)
    _Tail.of(model, plan, [stages[s] for s in own], rank, ties, ledger)
    return ledger, apart_s(plan, model.facts.model, ledger)


def _require_places(plan: Plan, count: int) -> None:
    if (
        count < plan.pp
        or count % plan.pp
        or (plan.schedule is Schedule.ZBV and count != 2 * plan.pp)
    ):
        raise PlanError(
            f"{count} stages do not go round {plan.pp} ranks under {plan.schedule}",
            where=f"plan: {plan}",
        )


def _borders(model: CostModel, plan: Plan, ends: Sequence[int]) -> list[_Border]:
    assert plan.microbatch_size is not None
    kind = model.numerics(plan)
    ledger, stride = model.ledger(), plan.world_size // plan.pp
    found = []
    for place in ends[1:-1]:
        there, back = model.stages.crossing(
            place, numerics=kind, samples=plan.microbatch_size / plan.cp
        )
        seconds = ledger.charge(
            Collective.SEND_RECV, "", max(there, back), group_size=2, stride=stride
        )
        found.append(_Border(there, back, seconds))
    return found


def _sent(borders: Sequence[_Border], stage: int) -> float:
    """Bytes of a microbatch over the border after a stage; the last one has none, nor has -1."""
    return borders[stage].there_bytes if 0 <= stage < len(borders) else 0.0


def _stages(
    model: CostModel, plan: Plan, ends: Sequence[int], borders: Sequence[_Border]
) -> list[_Stage]:
    """Every stage; those of equal units are worked out once."""
    loads, known = model.loads(plan), dict[object, _Stage]()
    found = []
    for stage, (first, last) in enumerate(pairwise(ends)):
        part = loads.part(first, last)
        received, sent = _sent(borders, stage - 1), _sent(borders, stage)
        key = (part.runs, received, sent)
        if key not in known:
            known[key] = _stage(model, plan, part, received_bytes=received, sent_bytes=sent)
        found.append(replace(known[key], part=part))
    return found


def _stage(
    model: CostModel, plan: Plan, part: Loads, *, received_bytes: float, sent_bytes: float
) -> _Stage:
    computing = model.computing(plan, part)
    exchanged = stage_exchange(plan, part, model.ledger(), has_host=model.overlaps, root_gathers=1)
    kind = plan.data_parallel
    gathers = kind in (DataParallel.FULL_SHARD, DataParallel.HYBRID_SHARD)
    way = {"overlaps": model.overlaps}
    there = forward(computing.times, exchanged, gathers=gathers, **way)
    back = backward(
        computing.times, exchanged, gathers=gathers, reduces=False, replicates=False, **way
    )
    late_s = 0.0
    if kind.is_sharded and not gathers:
        late_s = forward(computing.times, exchanged, gathers=True, **way).wall_s - there.wall_s
    counts = [time.count for time in computing.times]

    def all_of(seconds: Sequence[float]) -> float:
        return sum(n * each for n, each in zip(counts, seconds, strict=True))

    return _Stage(
        part=part,
        chunk=chunk_of(plan, part, received_bytes=received_bytes, sent_bytes=sent_bytes),
        computing=computing,
        forward_s=there.wall_s,
        backward_s=back.wall_s,
        late_s=late_s,
        reduce_s=all_of(exchanged.reduce_s) + exchanged.root_reduce_s,
        replicate_s=all_of(exchanged.replicate_s) + exchanged.root_replicate_s,
        sent_s=there.sent_s + back.sent_s,
    )


def _times(
    schedule: Schedule,
    stages: Sequence[_Stage],
    borders: Sequence[_Border],
    whole: frozenset[int],
) -> StageTimes:
    """Halves of a backward are equal: a product has a gradient of each factor. What is computed
    again is so for the first of them; the first stage does all with the weights."""
    backward_s, weight_s = [], []
    for number, stage in enumerate(stages):
        again = sum(t.count * (t.recompute_s + t.recompute_launch_s) for t in stage.computing.times)
        split = 0.0
        if schedule in SPLITS_BACKWARD and number not in whole:
            split = stage.backward_s if number == 0 else (stage.backward_s - again) / 2
        backward_s.append(stage.backward_s - split)
        weight_s.append(split)
    return StageTimes(
        forward_s=tuple(stage.forward_s for stage in stages),
        backward_s=tuple(backward_s),
        weight_s=tuple(weight_s),
        send_s=tuple(border.seconds for border in borders),
    )


def _received_into(borders: Sequence[_Border], stage: int, *, splits: Container[int]) -> float:
    """Bytes a microbatch: torch's stages have a tensor for whatever arrives, of every microbatch of
    a round, as long as they live (`_RecvInfo` in torch/distributed/pipelining/stage.py). Where a
    backward is split, gradients of what was received stay there too until the round is over
    (`stage_backward_input`)."""
    received = _sent(borders, stage - 1)
    returned = borders[stage].back_bytes if stage < len(borders) else 0.0
    return received + returned + (borders[stage - 1].back_bytes if stage in splits else 0.0)


@dataclass(frozen=True, slots=True)
class _Tail:
    """What a rank exchanges when a round is over: after one of several, and after the last."""

    round_s: float
    last_s: float

    @property
    def total_s(self) -> float:
        return self.round_s + self.last_s

    @classmethod
    def of(
        cls,
        model: CostModel,
        plan: Plan,
        stages: Sequence[_Stage],
        rank: int,
        ties: Sequence[Tie],
        ledger: Ledger | None = None,
    ) -> _Tail:
        """Of the rank with these stages; what is sent is noted in `ledger`."""
        ledger = ledger or model.ledger()
        kind = plan.data_parallel
        reduce_s = sum(stage.reduce_s for stage in stages)
        replicate_s = sum(stage.replicate_s for stage in stages)
        settle_s = 0.0
        if not kind.is_sharded:
            group, stride = replica_group(plan)
            settle_s += summed_s(
                ledger,
                "gradients",
                gradient_bytes=sum(stage.part.gradient_bytes for stage in stages),
                tensors=sum(stage.part.tensors for stage in stages),
                group_size=group,
                stride=stride,
            )
        units = [unit for stage in stages for unit in stage.part.runs]
        settle_s += model.partial_s(plan, units, ledger)
        for tie in ties:
            if rank in tie.ranks:
                settle_s += summed_s(
                    ledger,
                    "gradients of tied parameters",
                    gradient_bytes=tie.unit.gradient_bytes / shard_degree(plan),
                    tensors=1,
                    group_size=len(tie.ranks),
                    stride=(tie.ranks[1] - tie.ranks[0]) * plan.world_size // plan.pp,
                )
        once = kind is DataParallel.ZERO1
        return cls(round_s=0.0 if once else reduce_s, last_s=reduce_s + replicate_s + settle_s)


def _charge_sends(
    plan: Plan, own: Sequence[int], borders: Sequence[_Border], ledger: Ledger
) -> None:
    """What the rank's stages send: forward to the next stage, and gradients to the one before.
    Under ZBV the last rank hands from one of its stages to the other without sending."""
    stride = plan.world_size // plan.pp
    for stage in own:
        sends = {
            "activations": (stage + 1, borders[stage].there_bytes if stage < len(borders) else 0.0),
            "gradients of activations": (
                stage - 1,
                borders[stage - 1].back_bytes if stage else 0.0,
            ),
        }
        for purpose, (to, payload) in sends.items():
            if to not in own:
                ledger.charge(
                    Collective.SEND_RECV,
                    purpose,
                    payload,
                    group_size=2,
                    stride=stride,
                    count=plan.forwards,
                )


def _busy(stages: Sequence[_Stage], forwards: int) -> Busy:
    parts = [busy_s(stage.computing, forwards) for stage in stages]
    return Busy(
        compute_s=sum(part.compute_s for part in parts),
        recompute_s=sum(part.recompute_s for part in parts),
        launch_s=sum(part.launch_s for part in parts),
    )


def _of_all(stages: Sequence[_Stage]) -> Computing:
    """How far the computing of all stages is to be trusted, by their seconds."""
    busy = [stage.forward_s + stage.backward_s for stage in stages]
    total = sum(busy) or 1.0
    found = [stage.computing for stage in stages]
    return Computing(
        times=(),
        error=sum(c.error * s for c, s in zip(found, busy, strict=True)) / total,
        measured_share=sum(c.measured_share * s for c, s in zip(found, busy, strict=True)) / total,
    )


def _estimate_of(
    rank: int,
    units: Sequence[tuple[str, str]],
    peak: Peak,
    stages: Sequence[_Stage],
    *,
    in_flight: int,
    played: Played,
    rounds: int,
    wall_s: float,
) -> StageEstimate:
    busy_s = rounds * played.busy_s[rank]
    return StageEstimate(
        rank=rank,
        units=tuple(units),
        peak_bytes=peak.memory.total,
        peak_low_bytes=peak.low_bytes,
        peak_high_bytes=peak.high_bytes,
        reserved_bytes=peak.reserved_bytes,
        states_bytes=peak.states_bytes,
        in_flight=in_flight,
        forward_s=sum(stage.forward_s for stage in stages),
        backward_s=sum(stage.backward_s for stage in stages),
        busy_s=busy_s,
        idle_s=max(0.0, wall_s - busy_s),
    )
