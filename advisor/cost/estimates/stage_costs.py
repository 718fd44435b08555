"""Costs of the stages of a plan, one microbatch on each."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import cached_property
from typing import overload

from advisor.cost.communication.exchange import stage_exchange
from advisor.cost.communication.exposed import overlaps_gathers
from advisor.cost.communication.replay import backward, forward
from advisor.cost.context import CostContext
from advisor.cost.estimates.borders import Border, received_into, retained_over
from advisor.cost.estimates.stage_host import backward_s, forward_s, repeated_s, split_s
from advisor.cost.load.loads import Loads
from advisor.cost.stages.stage import StageCost
from advisor.cost.stages.stage_memory import StageMemory, chunk_of
from engines.plan import DataParallel, Plan


class StageCosts(Sequence[StageCost]):
    """Costs of the stages of a plan, each when it is asked for: a bound asks for the memory of
    those at both ends. Equal ones are computed once, for all plans."""

    def __init__(
        self,
        model: CostContext,
        plan: Plan,
        places: Sequence[tuple[int, int]],
        borders: Sequence[Border],
    ) -> None:
        self._model, self._plan = model, plan
        self._places, self._borders = places, borders
        self._loads = model.loads(plan)
        # Of one microbatch: independent of schedule and number of microbatches.
        self._alike, self._chunks = model.stages_of(plan), model.chunks_of(plan)
        self._known: dict[int, StageCost] = {}
        self._memories: dict[int, tuple[Loads, StageMemory, object]] = {}

    def __len__(self) -> int:
        return len(self._places)

    @overload
    def __getitem__(self, stage: int) -> StageCost: ...
    @overload
    def __getitem__(self, stage: slice) -> Sequence[StageCost]: ...
    def __getitem__(self, stage: int | slice) -> StageCost | Sequence[StageCost]:
        if isinstance(stage, slice):
            return [self[number] for number in range(len(self))[stage]]
        stage = range(len(self))[stage]
        if stage not in self._known:
            self._known[stage] = self._cost(stage)
        return self._known[stage]

    def memory(self, stage: int) -> tuple[Loads, StageMemory]:
        """Units and memory of a stage, without its time."""
        part, chunk, _ = self._memory(stage)
        return part, chunk

    def _memory(self, stage: int) -> tuple[Loads, StageMemory, object]:
        """Units and memory of a stage, and what equal ones have in common."""
        if stage in self._memories:
            return self._memories[stage]
        model, plan, places = self._model, self._plan, self._places[stage]
        part = self._loads.part(*places).repeating(plan.recompute_blocks)
        received, sent = retained_over(model, plan, self._borders, stage, places)
        messages = received_into(self._borders, stage)
        key = (part.pieces, received, sent, messages)
        if key not in self._chunks:
            self._chunks[key] = chunk_of(
                plan,
                part,
                received_bytes=received,
                sent_bytes=sent,
                messages=messages,
                stack=model.stack,
            )
        self._memories[stage] = part, self._chunks[key], key
        return self._memories[stage]

    def _cost(self, stage: int) -> StageCost:
        model, plan = self._model, self._plan
        part, chunk, key = self._memory(stage)
        if key not in self._alike:
            self._alike[key] = _stage(model, plan, part, chunk)
        alike = self._alike[key]
        added = alike.computing.added.total * (plan.forwards - 1) / plan.forwards
        device = model.facts.cluster.device
        there_s, back_s = forward_s(part, device), backward_s(device)
        if stage:
            there_s += self._repeated_s[self._places[stage][0]]
        return replace(
            alike,
            part=part,
            forward_s=alike.forward_s + there_s,
            backward_s=alike.backward_s + added + back_s,
            host_s=there_s + back_s,
            split_s=split_s(part, device),
        )

    @cached_property
    def _repeated_s(self) -> Sequence[float]:
        return repeated_s(self._model, self._plan)


def _stage(model: CostContext, plan: Plan, part: Loads, chunk: StageMemory) -> StageCost:
    computing = model.computing(plan, part, is_stage=True)
    exchanged = stage_exchange(
        plan,
        part,
        model.ledger(),
        has_host=model.overlaps,
        reduced_share=model.reduced_share,
        stack=model.stack,
    )
    kind = plan.data_parallel
    gathers = kind in (DataParallel.FULL_SHARD, DataParallel.HYBRID_SHARD)
    mode = {"overlaps": model.overlaps}
    there = forward(computing.times, exchanged, gathers=gathers, **mode)
    back = backward(
        computing.times, exchanged, gathers=gathers, reduces=False, replicates=False, **mode
    )
    late_s = 0.0
    if kind.is_sharded and not gathers:
        overlaps = model.overlaps and overlaps_gathers(model.stack)
        whole = forward(computing.times, exchanged, gathers=True, overlaps=overlaps)
        late_s = whole.wall_s - there.wall_s
    counts = [time.count for time in computing.times]

    def all_of(seconds: Sequence[float]) -> float:
        return sum(n * each for n, each in zip(counts, seconds, strict=True))

    return StageCost(
        part=part,
        chunk=chunk,
        computing=computing,
        forward_s=there.wall_s,
        backward_s=back.wall_s,
        late_s=late_s,
        reduce_s=all_of(exchanged.reduce_s) + exchanged.root_reduce_s,
        replicate_s=all_of(exchanged.replicate_s) + exchanged.root_replicate_s,
        sent_s=there.sent_s + back.sent_s,
    )
