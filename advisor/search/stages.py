"""Which units the stages of a row begin with: the best borders there are for it.

Of schedules with one stage a rank, every stage has its own number of microbatches in flight, and
borders are exact in time and memory. Where a rank has several stages, their memory adds up in ways
that borders alone do not tell: those are exact in time, and of equally fast ones the evenest.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

import numpy as np

from advisor.cost.buffers import shard_degree
from advisor.cost.memory import room_bytes, workspace_bytes
from advisor.cost.orders import ONE_STAGE, SPLITS_BACKWARD, moments, stages_of
from advisor.cost.stage_memory import between_bytes, message_bytes
from advisor.cost.staged import laid_out, peak_of_rank
from advisor.inputs.policy import Policy
from advisor.search.borders import Matrix, cut, spans
from advisor.search.cache import SearchCache
from advisor.search.pieces import Pieces, pieces_of
from advisor.search.space import KINDS, SCHEDULES, Space
from engines.plan import PartialPlan, Plan, Schedule
from profiles.machine.cluster import Collective

# Ranks from each end of a pipeline that are asked for their peaks before all of them are.
_FROM_EACH_END = 2


@dataclass(frozen=True, slots=True)
class _Found:
    """The best borders.

    Attributes:
        starts, names: the first pieces of stages 1, 2, ..., and the units that begin them.
        forward_s, backward_s: of every stage.
    """

    starts: tuple[int, ...]
    names: tuple[str, ...]
    forward_s: tuple[float, ...]
    backward_s: tuple[float, ...]


class StageSearch:
    """Finds borders, once for rows that share all that they depend on."""

    def __init__(self, kept: SearchCache, partial: PartialPlan, policy: Policy) -> None:
        costs = kept.costs
        self._kept = kept
        self._costs = costs
        self._pinned = partial.stages or ()
        self._usable_bytes = policy.usable_bytes(costs.facts.cluster.device)
        self._place = {unit.name: n for n, unit in enumerate(costs.facts.model.units)}
        self._found: dict[tuple[object, ...], _Found] = {}
        self._pieces: dict[tuple[object, ...], Pieces] = {}
        self._states: dict[tuple[int, int], float] = {}

    def plan(self, space: Space, index: int) -> Plan:
        """The plan of a row."""
        if space.pp[index] == 1:
            return space.plan(index)
        return space.plan(index, stages=self._pinned or self._cut(space, index).names)

    def least_peak_bytes(self, space: Space, index: int) -> float:
        """Below which the upper end of the peak does not stay with the row's borders; 0 where
        nothing is known."""
        if space.pp[index] == 1 or self._pinned:
            return 0.0
        plan = self.plan(space, index)
        layout = laid_out(self._costs, plan)
        # Both ends of the pipeline, where embeddings, logits and most microbatches are.
        ends = {*range(plan.pp)[:_FROM_EACH_END], *range(plan.pp)[-_FROM_EACH_END:]}
        return max(peak_of_rank(self._costs, plan, layout, rank).high_bytes for rank in ends)

    def least_step_s(self, space: Space, index: int) -> float:
        """No step with these borders is faster; 0 where nothing is known.

        A rank begins when the first microbatch has passed the stages before its own, and then works
        on all of a round. Unless weights come later, it ends with a backward of its first stage,
        whose gradient passes the stages before it again.
        """
        if space.pp[index] == 1 or self._pinned:
            return 0.0
        found, schedule = self._cut(space, index), SCHEDULES[space.schedule[index]]
        assert schedule is not None
        stages, ranks = len(found.forward_s), int(space.pp[index])
        in_round, rounds = int(space.microbatches[index]), int(space.accumulation[index])
        if schedule is Schedule.NAIVE:
            in_round, rounds = 1, in_round * rounds
        before = list(accumulate(found.forward_s, initial=0.0))
        if schedule not in SPLITS_BACKWARD:
            after = accumulate(found.backward_s, initial=0.0)
            before = [there + back for there, back in zip(before, after, strict=True)]
        slowest = 0.0
        for rank in range(ranks):
            own = stages_of(schedule, rank, ranks=ranks, stages=stages)
            busy = sum(found.forward_s[stage] + found.backward_s[stage] for stage in own)
            slowest = max(slowest, before[own[0]] + in_round * busy)
        return slowest * rounds

    def _cut(self, space: Space, index: int) -> _Found:
        stages = int(space.pp[index] * space.per_rank[index])
        columns = [space.tp, space.microbatch_size, space.recompute]
        if stages == space.pp[index]:
            columns += [space.dp_replicate, space.dp_shard, space.kind, space.schedule]
            columns += [space.microbatches, space.accumulation]
        # Where a rank has several stages, borders depend on seconds and parameters alone.
        is_sharded = KINDS[space.kind[index]].is_sharded
        key = (stages, is_sharded, *(int(column[index]) for column in columns))
        if key not in self._found:
            plan = space.plan(index)
            self._found[key] = self._best(plan, space.pieces, stages)
        return self._found[key]

    def _best(self, plan: Plan, names: Sequence[str], stages: int) -> _Found:
        pieces = self._pieces_of(plan, names)
        if stages == plan.pp:
            seconds = spans(pieces.seconds)
            if plan.schedule in ONE_STAGE:
                seconds = seconds + self._waiting_s(plan, pieces)
            held, kept = self._held_bytes(plan, pieces)
            in_flight = _in_flight(plan, stages)
            room = self._room_bytes(plan)
            found = cut(seconds, held, kept, in_flight=in_flight, usable_bytes=room)
        else:
            held = spans(pieces.parameters)
            found = cut(
                spans(pieces.seconds), held, held, in_flight=[0] * stages, usable_bytes=np.inf
            )
        return _Found(
            starts=found.starts,
            names=tuple(names[start] for start in found.starts),
            forward_s=tuple(np.add.reduceat(pieces.forward_s, [0, *found.starts]).tolist()),
            backward_s=tuple(np.add.reduceat(pieces.backward_s, [0, *found.starts]).tolist()),
        )

    def _pieces_of(self, plan: Plan, names: Sequence[str]) -> Pieces:
        is_sharded = plan.data_parallel.is_sharded
        key = (plan.tp, plan.microbatch_size, plan.recompute, is_sharded)
        if key not in self._pieces:
            places = [0, *(self._place[name] for name in names[1:])]
            self._pieces[key] = pieces_of(
                self._kept.microbatch(plan, places[1:]), places, self._costs.stack
            )
        return self._pieces[key]

    def _waiting_s(self, plan: Plan, pieces: Pieces) -> Matrix:
        """What a stage waits for a microbatch to arrive, and for its gradient to come back."""
        world = self._costs.facts.cluster.world_size
        ledger, sent = self._costs.ledger(), np.maximum(pieces.there, pieces.back)
        known = {
            payload: ledger.charge(
                Collective.SEND_RECV, "", payload, group_size=2, stride=world // plan.pp
            )
            for payload in set(sent.tolist())
        }
        seconds = np.array([known[payload] for payload in sent.tolist()])
        return np.asarray(seconds[:, None] + seconds[None, :])

    def _held_bytes(self, plan: Plan, pieces: Pieces) -> tuple[Matrix, Matrix]:
        """Of every possible stage when a backward begins: what it holds, and what it keeps besides
        for each microbatch in flight."""
        device = self._costs.facts.cluster.device
        always = pieces.always_bytes(plan, device, state_bytes=self._state_bytes(plan))
        held = spans(always) + np.pad(pieces.work_bytes(plan), (1, 0))[None, :]
        received, sent = pieces.there[:, None], pieces.there[None, :]
        if pieces.stack.states is None:
            held += _in_round(plan) * (received + pieces.back[None, :])
        kept = between_bytes(spans(pieces.kept), received, sent, plan, pieces.stack)
        kept += spans(pieces.cast) * (not plan.data_parallel.is_sharded)
        return held, kept

    def _state_bytes(self, plan: Plan) -> float:
        """What the optimizer keeps for one rank's part of the whole model."""
        degree = shard_degree(plan)
        # What goes by elements is divided evenly.
        is_even = self._costs.facts.workload.optimizer.is_elementwise
        key = plan.tp, 1 if is_even else degree
        if key not in self._states:
            state_bytes = self._costs.update(plan, 0, len(self._place)).state_bytes
            self._states[key] = state_bytes * (degree if is_even else 1)
        return self._states[key] / (degree if is_even else 1)

    def _room_bytes(self, plan: Plan) -> float:
        """What is left for a stage beside what all ranks hold alike."""
        facts = self._costs.facts
        room = room_bytes(self._usable_bytes, facts.cluster.device)
        room -= message_bytes(self._costs.stack)
        room -= workspace_bytes(facts.cluster.device, self._costs.stack)
        return room - self._costs.batch_bytes(plan) - facts.model.buffer_bytes


def _in_round(plan: Plan) -> int:
    """Microbatches between filling and draining."""
    return 1 if plan.schedule is Schedule.NAIVE else plan.microbatches


def _in_flight(plan: Plan, stages: int) -> list[int]:
    """The most microbatches that each of `stages` holds, one a rank."""
    # Zero bubble has as many in flight as 1F1B when its first backward begins.
    schedule = Schedule.ONE_F_ONE_B
    if plan.schedule in (Schedule.NAIVE, Schedule.GPIPE):
        schedule = plan.schedule
    found = moments(schedule, ranks=stages, stages=stages, microbatches=_in_round(plan))
    return [max(moment.saved[0] for moment in rank) for rank in found]
