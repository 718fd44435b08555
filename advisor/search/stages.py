"""Best stage borders of each row.

With one stage per rank, every stage has its own number of microbatches in flight, and borders are
optimal in time and memory. With several stages per rank, memory does not add up stage by stage:
borders are optimal in time, and of equally fast ones those with the most even parameters.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

import numpy as np

from advisor.cost.communication.small_collectives import small_collectives_s
from advisor.cost.estimates.borders import charged_groups
from advisor.cost.estimates.staged import laid_out, peak_of_rank, tied_s
from advisor.cost.memory.allocator import room_bytes, workspace_bytes
from advisor.cost.memory.buffers import shard_degree
from advisor.cost.stages.orders import ONE_STAGE, SPLITS_BACKWARD, moments, stages_of
from advisor.cost.stages.pipeline import StageTimes, play, sends_late
from advisor.cost.stages.shared_cores import speedup_alone
from advisor.cost.stages.stage_memory import between_bytes, message_bytes
from advisor.inputs.policy import Policy
from advisor.search.borders import (
    MOST_AT_ONCE,
    Entries,
    Matrix,
    Places,
    StageCut,
    between,
    cut,
    refined,
    sums_before,
)
from advisor.search.cache import SearchCache
from advisor.search.rank_peaks import RankPeaks
from advisor.search.space import KINDS, SCHEDULES, Floats, Space
from advisor.search.stage_segments import StageSegments, segments_of
from engines.plan import PartialPlan, Plan, Schedule
from profiles.machine.cluster import Collective

# Ranks at each end of a pipeline whose peaks bound the plan's.
_FROM_EACH_END = 2


@dataclass(frozen=True, slots=True)
class _BestBorders:
    """Best borders of a row.

    Attributes:
        starts, names: the first segments of stages 1, 2, ..., and the units that begin them.
        forward_s, backward_s: of every stage.
        sent_bytes: over each border: the larger of activations and gradients.
    """

    starts: tuple[int, ...]
    names: tuple[str, ...]
    forward_s: tuple[float, ...]
    backward_s: tuple[float, ...]
    sent_bytes: tuple[float, ...]


class StageSearch:
    """Search for borders, once for rows that share all that they depend on."""

    def __init__(self, cache: SearchCache, partial: PartialPlan, policy: Policy) -> None:
        costs = cache.costs
        self._cache = cache
        self._costs = costs
        self._pinned = partial.stages or ()
        self._usable_bytes = policy.usable_bytes(costs.facts.cluster.device)
        self._place = {unit.name: n for n, unit in enumerate(costs.facts.model.units)}
        self._borders: dict[tuple[object, ...], _BestBorders] = {}
        self._segments: dict[tuple[object, ...], StageSegments] = {}
        self._states: dict[tuple[int, int], float] = {}
        self._sends: dict[tuple[float, int, int], float] = {}
        self._rank_peaks = RankPeaks(cache)

    def plan(self, space: Space, index: int) -> Plan:
        """Plan of a row, with its best borders."""
        if space.pp[index] == 1:
            return space.plan(index)
        return space.plan(index, stages=self._pinned or self._best_borders(space, index).names)

    def least_peak_bytes(self, space: Space, index: int, *, enough_bytes: float = np.inf) -> float:
        """Lower bound of the peak's upper end with the row's borders; 0 if nothing is known.

        Ranks are looked at until one takes more than `enough_bytes`.
        """
        if space.pp[index] == 1 or self._pinned:
            return 0.0
        least = self.several_peak_bytes(space, index)
        if least > enough_bytes:
            return least
        plan = self.plan(space, index)
        layout = laid_out(self._costs, plan)
        # Both ends of the pipeline, which have embeddings, logits and most microbatches.
        ends = {*range(plan.pp)[:_FROM_EACH_END], *range(plan.pp)[-_FROM_EACH_END:]}
        most = 0.0
        for rank in sorted(ends):
            most = max(most, peak_of_rank(self._costs, plan, layout, rank).high_bytes)
            if most > enough_bytes:
                break
        return most

    def several_peak_bytes(self, space: Space, index: int) -> float:
        """Lower bound of the peak's upper end where ranks have several stages, by arithmetic; 0 if
        they have one."""
        has_several = space.pp[index] > 1 and space.per_rank[index] > 1
        if not has_several or self._pinned or self._costs.stack.states is not None:
            return 0.0
        return self._rank_peaks.least_bytes(space, index, self._best_borders(space, index).names)

    def least_rounds_s(self, space: Space, index: int) -> float:
        """Lower bound of a row's rounds with its borders; 0 if nothing is known.

        A rank begins when the first microbatch has passed the stages before its own, and then works
        on all of a round. Unless weight gradients come later, it ends with a backward of its first
        stage, whose gradient then passes the stages before it.
        """
        if space.pp[index] == 1 or self._pinned:
            return 0.0
        borders, schedule = self._best_borders(space, index), SCHEDULES[space.schedule[index]]
        assert schedule is not None
        stages, ranks = len(borders.forward_s), int(space.pp[index])
        in_round, rounds = int(space.microbatches[index]), int(space.accumulation[index])
        if schedule is Schedule.NAIVE:
            in_round, rounds = 1, in_round * rounds
        before = list(accumulate(borders.forward_s, initial=0.0))
        if schedule not in SPLITS_BACKWARD:
            backward = accumulate(borders.backward_s, initial=0.0)
            before = [forward + back for forward, back in zip(before, backward, strict=True)]
        slowest = 0.0
        for rank in range(ranks):
            own = stages_of(schedule, rank, ranks=ranks, stages=stages)
            busy = sum(borders.forward_s[stage] + borders.backward_s[stage] for stage in own)
            slowest = max(slowest, before[own[0]] + in_round * busy)
        # Ranks that share cores are faster while others wait, but the cores do all of the work.
        work = in_round * (sum(borders.forward_s) + sum(borders.backward_s))
        alone = speedup_alone(self._costs.facts.cluster)
        return rounds * max(slowest / alone, work / ranks)

    def played_rounds_s(self, space: Space, index: int) -> tuple[float, float]:
        """Lower bounds of a row's rounds, played in the schedule's order, and of sums of tied
        gradients and small collectives after them: seconds until all is over, and until the average
        rank is done; zeros if nothing is known."""
        if space.pp[index] == 1 or self._pinned:
            return 0.0, 0.0
        plan, borders = self.plan(space, index), self._best_borders(space, index)
        assert plan.schedule is not None
        in_round, rounds = plan.microbatches, plan.accumulation
        if plan.schedule is Schedule.NAIVE:
            in_round, rounds = 1, in_round * rounds
        played = play(
            plan.schedule,
            self._stage_times(borders, plan),
            ranks=plan.pp,
            microbatches=in_round,
            waits=sends_late(plan.schedule) or not self._costs.overlaps,
        )
        alone = speedup_alone(self._costs.facts.cluster)  # as in `least_rounds_s`
        wall_s = max(played.wall_s / alone, sum(played.busy_s) / plan.pp)
        ends = [end / alone for end in played.end_s]
        ends_s = [end + tied for end, tied in zip(ends, self._tied_s(plan), strict=True)]
        earlier, model = rounds - 1, self._costs.facts.model
        small_s = small_collectives_s(plan, model, self._costs.ledger())
        return (
            earlier * wall_s + max(wall_s, *ends_s) + small_s,
            (earlier * sum(ends) + sum(ends_s)) / plan.pp + small_s,
        )

    def _tied_s(self, plan: Plan) -> list[float]:
        """Seconds of each rank of the pp axis for gradients of parameters on several stages."""
        costs = self._costs
        if costs.stack.overlap_gradients:  # some of them may be hidden
            return [0.0] * plan.pp
        ties = costs.stages.ties(plan, costs.stages.ends(plan))
        return [tied_s(plan, ties, rank, costs.ledger()) for rank in range(plan.pp)]

    def _stage_times(self, borders: _BestBorders, plan: Plan) -> StageTimes:
        """Seconds of the stages of `plan` as `staged` has them, without gathers."""
        stages, backward_s = self._costs.stages, list(borders.backward_s)
        weight_s = [0.0] * len(backward_s)
        if plan.schedule in SPLITS_BACKWARD:
            whole = stages.whole_backwards(plan, stages.ends(plan))
            for stage in set(range(len(backward_s))) - whole:
                # Units of a split stage are not recomputed.
                weight_s[stage] = backward_s[stage] / (2 if stage else 1)
                backward_s[stage] -= weight_s[stage]
        cluster, count = self._costs.facts.cluster, len(backward_s)
        groups = charged_groups(cluster, plan.schedule, ranks=plan.pp, stages=count)
        sends = zip(borders.sent_bytes, groups, strict=True)
        stride = cluster.world_size // plan.pp
        send_s = (self._send_s(payload, stride, group_size) for payload, group_size in sends)
        return StageTimes(borders.forward_s, tuple(backward_s), tuple(weight_s), tuple(send_s))

    def _send_s(self, payload: float, stride: int, group_size: int = 2) -> float:
        """Seconds to send so many bytes to the next stage, as in `charged_group`."""
        key = payload, stride, group_size
        if key not in self._sends:
            self._sends[key] = self._costs.ledger().charge(
                Collective.SEND_RECV, "", payload, group_size=group_size, stride=stride
            )
        return self._sends[key]

    def _best_borders(self, space: Space, index: int) -> _BestBorders:
        stages = int(space.pp[index] * space.per_rank[index])
        columns = [space.tp, space.microbatch_size, space.recompute]
        if stages == space.pp[index]:
            columns += [space.dp_replicate, space.dp_shard, space.kind, space.schedule]
            columns += [space.microbatches, space.accumulation]
        # With several stages per rank, borders depend only on seconds and parameters.
        is_sharded = KINDS[space.kind[index]].is_sharded
        key = (stages, is_sharded, *(int(column[index]) for column in columns))
        if key not in self._borders:
            plan = space.plan(index)
            self._borders[key] = self._search(plan, space.segments, stages)
        return self._borders[key]

    def _search(self, plan: Plan, names: Sequence[str], stages: int) -> _BestBorders:
        segments = self._segments_of(plan, names)
        best = self._cut(plan, segments, len(names), stages)
        return _BestBorders(
            starts=best.starts,
            names=tuple(names[start] for start in best.starts),
            forward_s=tuple(np.add.reduceat(segments.forward_s, [0, *best.starts]).tolist()),
            backward_s=tuple(np.add.reduceat(segments.backward_s, [0, *best.starts]).tolist()),
            sent_bytes=tuple(segments.sent_bytes[list(best.starts)].tolist()),
        )

    def _cut(self, plan: Plan, segments: StageSegments, count: int, stages: int) -> StageCut:
        """Best borders of `count` segments."""
        in_flight, room_bytes = [0] * stages, np.inf
        if stages == plan.pp:
            in_flight, room_bytes = _in_flight(plan, stages), self._room_bytes(plan)
        entries = self._entries(plan, segments, is_one_each=stages == plan.pp)
        if count > MOST_AT_ONCE:
            return refined(count, entries, in_flight=in_flight, usable_bytes=room_bytes)
        every = np.arange(count + 1)
        return cut(*entries(every, every), in_flight=in_flight, usable_bytes=room_bytes)

    def _entries(self, plan: Plan, segments: StageSegments, *, is_one_each: bool) -> Entries:
        """Seconds, resident bytes and saved bytes of stages from some places to others.

        With several stages per rank, parameters stand for bytes.
        """
        waiting_s = np.zeros(len(segments.border_activations))
        if plan.schedule in ONE_STAGE:
            waiting_s = self._waiting_s(plan, segments)
        states: Floats = segments.parameters
        if is_one_each:
            device = self._costs.facts.cluster.device
            states = segments.resident_bytes(plan, device, state_bytes=self._state_bytes(plan))
        seconds_before, states_before = sums_before(segments.seconds), sums_before(states)
        saved_before, cast_before = sums_before(segments.saved), sums_before(segments.cast)
        is_whole = not plan.data_parallel.is_sharded
        work_before = np.pad(segments.work_bytes(plan), (1, 0))

        def entries(rows: Places, columns: Places) -> tuple[Matrix, Matrix, Matrix]:
            seconds = between(seconds_before, rows, columns)
            resident = between(states_before, rows, columns)
            if not is_one_each:
                return seconds, resident, resident
            if plan.schedule in ONE_STAGE:
                seconds = seconds + (waiting_s[rows][:, None] + waiting_s[columns][None, :])
            resident = resident + work_before[columns][None, :]
            received = segments.border_activations[rows][:, None]
            sent = segments.border_activations[columns][None, :]
            if segments.stack.states is None:
                resident += segments.border_gradients[columns][None, :]
            saved = between(saved_before, rows, columns)
            saved = between_bytes(saved, received, sent, plan, segments.stack, message=received)
            return seconds, resident, saved + between(cast_before, rows, columns) * is_whole

        return entries

    def _segments_of(self, plan: Plan, names: Sequence[str]) -> StageSegments:
        is_sharded = plan.data_parallel.is_sharded
        key = (plan.tp, plan.microbatch_size, plan.recompute, is_sharded)
        if key not in self._segments:
            places = [0, *(self._place[name] for name in names[1:])]
            self._segments[key] = segments_of(
                self._cache.microbatch(plan, places[1:]), places, self._costs.stack
            )
        return self._segments[key]

    def _waiting_s(self, plan: Plan, segments: StageSegments) -> Floats:
        """Seconds to receive a microbatch, or its gradient, over each border."""
        world = self._costs.facts.cluster.world_size
        sent = segments.sent_bytes.tolist()
        return np.array([self._send_s(payload, world // plan.pp) for payload in sent])

    def _state_bytes(self, plan: Plan) -> float:
        """Bytes of optimizer states for one rank's part of the whole model."""
        degree = shard_degree(plan)
        # Elementwise states are sharded evenly.
        is_even = self._costs.facts.workload.optimizer.is_elementwise
        key = plan.tp, 1 if is_even else degree
        if key not in self._states:
            state_bytes = self._costs.update(plan, 0, len(self._place)).state_bytes
            self._states[key] = state_bytes * (degree if is_even else 1)
        return self._states[key] / (degree if is_even else 1)

    def _room_bytes(self, plan: Plan) -> float:
        """Bytes left for a stage, after what all ranks hold."""
        facts = self._costs.facts
        room = room_bytes(self._usable_bytes, facts.cluster.device)
        room -= message_bytes(self._costs.stack)
        room -= workspace_bytes(facts.cluster.device, self._costs.stack)
        return room - self._costs.batch_bytes(plan) - facts.model.buffer_bytes


def _in_round(plan: Plan) -> int:
    """Microbatches of a round, between filling and draining the pipeline."""
    return 1 if plan.schedule is Schedule.NAIVE else plan.microbatches


def _in_flight(plan: Plan, stages: int) -> list[int]:
    """Maximum number of microbatches in flight of each stage, with one stage per rank."""
    # Zero bubble has as many as 1F1B when its first backward begins.
    schedule = Schedule.ONE_F_ONE_B
    if plan.schedule in (Schedule.NAIVE, Schedule.GPIPE):
        schedule = plan.schedule
    by_rank = moments(schedule, ranks=stages, stages=stages, microbatches=_in_round(plan))
    return [max(moment.saved[0] for moment in rank) for rank in by_rank]
