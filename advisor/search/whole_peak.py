"""Peaks without pipeline stages, for many rows at once, from the moments of a step.

There are no formulas of memory here: the cost model computes what rows share, the moments of a step
for each microbatch and the resident bytes for each way to shard. Moments are linear in 1/degree of
sharding. For larger microbatches two small ones give a lower bound: saved bytes are linear in
samples, temporaries are maxima of such sums.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from advisor.cost.load.loads import Loads, activation_error
from advisor.cost.memory.allocator import upper_end
from advisor.cost.memory.buffers import KEEPS_PARAMETERS, shard_degree
from advisor.cost.memory.offload import activations_leave
from advisor.cost.memory.peak import (
    UNITS_WHEN_AHEAD,
    Moment,
    largest_copy,
    last_moment,
    moments_of,
    peak_at,
)
from advisor.cost.memory.states import ResidentStates, resident_states
from advisor.cost.memory.timeline import MicrobatchTimeline, timeline_of
from advisor.search.columns import SMALL, Columns
from advisor.search.space import KINDS, RECOMPUTES, Floats, plan_with
from advisor.search.step_moments import StepMoments
from engines.plan import DataParallel, Plan
from profiles.workload.optimizers import Upkeep
from profiles.workload.stack import TORCH

# Temporaries of split layers depend on the share that a rank saves, which varies with the size, by
# 0.14 % in models of 128 channels: bounds of larger microbatches are lowered by this fraction.
_SHARES_DIFFER = 5e-3
# Sums in another order differ in the last digits.
_ROUNDING = 1e-12
# Times the usable memory; the exact peak of such plans does not matter.
_FAR_TOO_MUCH = 2
# So many ranks that shards have no size.
_ENDLESS = 1 << 50
_THREADS, _ZERO2 = KINDS.index(DataParallel.THREADS), KINDS.index(DataParallel.ZERO2)


def whole_peak_bytes(columns: Columns, usable_bytes: float) -> Floats:
    """Upper end of each row's peak: exact for microbatches of one and two samples, else a lower
    bound. Rows whose states alone are far too large get no more than that bound."""
    peaks = _Peaks(columns)
    space, facts = columns.space, columns.costs.facts
    resident, last, last_doubtful = peaks.resident_and_update()
    total, doubtful, ahead = last.copy(), last_doubtful.copy(), np.zeros(len(space))
    # Under ZeRO-2 the first of two microbatches has no shards to add to, those after it have.
    several = (space.forwards > 1).astype(np.int64)
    several += (space.forwards > 2) & (peaks.kind == _ZERO2)
    is_open = np.flatnonzero(resident + last <= _FAR_TOO_MUCH * usable_bytes)
    keys = np.stack([columns.group, peaks.kind, several])[:, is_open]
    alike, which = np.unique(keys, axis=1, return_inverse=True)
    order = is_open[np.argsort(which.ravel(), kind="stable")]
    ends = np.cumsum(np.bincount(which.ravel(), minlength=alike.shape[1]))
    groups = np.split(order, ends[:-1]) if len(is_open) else []
    for (_, kind, again), rows in zip(alike.T, groups, strict=True):
        moments = peaks.moments(int(rows[0]), KINDS[kind], forwards=1 + int(again))
        shards = moments.sharded / columns.shards[rows, None]
        every = np.column_stack([moments.fixed + shards + peaks.own[rows, None], last[rows]])
        doubts = np.broadcast_to(moments.doubtful, (len(rows), len(moments.doubtful)))
        total[rows] = every.max(axis=1)
        # Of moments that may be the fullest, the one with the fewest doubtful bytes.
        may_be = every >= total[rows, None] * (1 - moments.error)
        doubts = np.column_stack([doubts, last_doubtful[rows]])
        doubtful[rows] = np.where(may_be, doubts, np.inf).min(axis=1)
        ahead[rows] = moments.ahead
    batch = facts.model.batch_bytes
    local = space.microbatch_size * space.forwards / space.cp
    allocated = resident + total + batch.fixed + batch.per_sample * local + facts.model.buffer_bytes
    error = activation_error(facts.model)
    peak = upper_end(allocated, facts.cluster.device, doubtful=doubtful, ahead=ahead, error=error)
    # Threads have torch's states in any stack.
    is_unknown = (space.kind == _THREADS) & (columns.costs.stack.states is not None)
    return np.where(is_unknown, 0.0, peak)


class _Peaks:
    """Moments and resident bytes of rows, from the cost model.

    Attributes:
        kind: data-parallel kind of each row; that of one rank if ranks update asynchronously or
            replicas are threads, whose further memory has no bound.
        own: gradients of each row, in a stack with states of its own.
    """

    def __init__(self, columns: Columns) -> None:
        self._columns, space, costs = columns, columns.space, columns.costs
        self._device = costs.facts.cluster.device
        none = KINDS.index(DataParallel.NONE)
        is_alone = (space.kind == _THREADS) | (not space.updates_in_step)
        self.kind = np.where(is_alone, none, space.kind)
        # Ranks that update asynchronously have torch's states in any stack.
        self._stack = costs.stack if space.updates_in_step else TORCH
        # A worker's optimizer states are on servers.
        self._states_share = 0.0 if space.common.servers else 1.0
        self._states: dict[tuple[int, ...], ResidentStates] = {}
        self._lines: dict[tuple[int, ...], MicrobatchTimeline] = {}
        self._updates: dict[tuple[int, ...], Moment] = {}
        self._keys = [space.tp, columns.shards, columns.sharded, self.kind]
        self.own = columns.each(self._keys, self._own_gradients)

    def resident_and_update(self) -> tuple[Floats, Floats, Floats]:
        """Bytes of (permanent tensors, the optimizer's moment, doubtful ones of the latter)."""
        columns = self._columns
        resident = columns.each(self._keys, self._resident)
        last = columns.each(self._keys, lambda *key: self._last(*key).total)
        doubtful = columns.each(self._keys, lambda *key: self._last(*key).transient)
        if self._stack.states is None:
            unsharded = 2 * columns.unsharded_bytes() + columns.whole_bytes()
            return resident + unsharded, last, doubtful
        return resident + (self._stack.bucket_bytes or 0.0), last, doubtful

    def moments(self, row: int, kind: DataParallel, *, forwards: int) -> StepMoments:
        """Moments of a row's microbatch."""
        size = int(self._columns.space.microbatch_size[row])

        def at(samples: int) -> StepMoments:
            return self._moments(row, kind, forwards, samples)

        if size <= SMALL:
            return at(size)
        error = _SHARES_DIFFER if self._columns.space.tp[row] > 1 else _ROUNDING
        return at(SMALL).beyond(at(SMALL - 1), size - SMALL, error=error)

    def _moments(self, row: int, kind: DataParallel, forwards: int, samples: int) -> StepMoments:
        columns, space = self._columns, self._columns.space
        if kind is DataParallel.HYBRID_SHARD and self._stack.states is None:
            kind = DataParallel.FULL_SHARD  # a replica's ranks hold the same
        tp, cp, recompute = int(space.tp[row]), int(space.cp[row]), int(space.recompute[row])
        sharded = int(columns.sharded[row])
        of_row = (tp, cp, samples, recompute, sharded)
        of_space = (space.ep, space.styles[tp], space.precision, space.offload, space.offload_to)
        key = (*of_row, *of_space, kind, forwards, self._stack.name)
        known = columns.microbatches.cache.step_moments
        if key not in known:
            known[key] = self._computed(tp, cp, samples, recompute, sharded, kind, forwards)
        return known[key]

    def _computed(
        self,
        tp: int,
        cp: int,
        samples: int,
        recompute: int,
        sharded: int,
        kind: DataParallel,
        forwards: int,
    ) -> StepMoments:
        loads = self._columns.microbatches.exact(tp, cp, samples, recompute, sharded).loads
        settings = {
            "cp": cp,
            "microbatch_size": samples,
            "recompute": RECOMPUTES[recompute],
            "accumulation": forwards,
        }
        # Without shards the degree does not matter.
        degrees = (1, _ENDLESS) if kind.is_sharded else (1,)
        plans = [self._plan(tp, degree, kind, **settings) for degree in degrees]
        few = plans[0]
        of_row = tp, cp, samples, recompute, sharded
        if of_row not in self._lines:
            away = activations_leave(few, self._device)
            self._lines[of_row] = timeline_of(loads, few.recompute, away=away)
        moments = [
            moments_of(
                plan, loads, device=self._device, stack=self._stack, line=self._lines[of_row]
            )
            for plan in plans
        ]
        one, endless = moments[0], moments[-1]
        fixed = np.array([moment.total for moment in endless])
        whole = np.array([moment.total for moment in one])
        return StepMoments(
            fixed=fixed,
            sharded=(whole - fixed) * shard_degree(few),
            doubtful=np.array([moment.activations + moment.transient for moment in endless]),
            ahead=UNITS_WHEN_AHEAD * largest_copy(few, loads, self._stack),
        )

    def _plan(self, tp: int, degree: int, kind: DataParallel, **settings: Any) -> Plan:
        """Plan of this kind whose states, if sharded, are sharded over `degree` x cp ranks."""
        space = self._columns.space
        replicas = degree if kind in KEEPS_PARAMETERS else 1
        if kind in (DataParallel.REPLICATE, DataParallel.HYBRID_SHARD):
            replicas = 2
        in_shards = kind.is_sharded and kind not in KEEPS_PARAMETERS
        return plan_with(
            tp=tp,
            ep=space.ep,
            tensor_styles=space.styles[tp],
            data_parallel=kind,
            dp_replicate=replicas,
            dp_shard=degree if in_shards else 1,
            precision=space.precision,
            offload=space.offload,
            offload_to=space.offload_to,
            **settings,
        )

    def _loads(self, tp: int, sharded: int) -> Loads:
        """Loads of any microbatch: all have the same parameters."""
        return self._columns.any_microbatch(tp, sharded).loads

    def _upkeep(self, tp: int, shards: int, sharded: int) -> Upkeep:
        upkeep = self._columns.upkeep(tp, shards, sharded)
        return upkeep if self._states_share == 1 else upkeep.part(self._states_share)

    def _own(self, tp: int, shards: int, sharded: int, kind: int) -> ResidentStates | None:
        """States of a stack that manages its own, else None."""
        states, key = self._stack.states, (tp, shards, sharded, kind)
        if states is None:
            return None
        if key not in self._states:
            self._states[key] = resident_states(
                states,
                self._plan(tp, shards, KINDS[kind]),
                [self._loads(tp, sharded)],
                update=self._upkeep(tp, shards, sharded),
                degree=shards,
                folds_experts=self._stack.folds_experts,
            )
        return self._states[key]

    def _own_gradients(self, *key: int) -> float:
        own = self._own(*key)
        return own.gradients if own is not None else 0.0

    def _resident(self, tp: int, shards: int, sharded: int, kind: int) -> float:
        loads = self._loads(tp, sharded)
        peak = peak_at(
            Moment("always"),
            self._plan(tp, shards, KINDS[kind]),
            parameter_bytes=loads.parameter_bytes,
            gradient_bytes=loads.gradient_bytes,
            update=self._upkeep(tp, shards, sharded),
            device=self._device,
            batch_bytes=0.0,
            ahead=0.0,
            stack=self._stack,
            own=self._own(tp, shards, sharded, kind),
        )
        return peak.memory.total - peak.memory.context

    def _last(self, *key: int) -> Moment:
        if key not in self._updates:
            self._updates[key] = self._update(*key)
        return self._updates[key]

    def _update(self, tp: int, shards: int, sharded: int, kind: int) -> Moment:
        moment = last_moment(
            self._plan(tp, shards, KINDS[kind]),
            self._loads(tp, sharded),
            self._upkeep(tp, shards, sharded),
            self._device,
            stack=self._stack,
            own=self._own(tp, shards, sharded, kind),
        )
        return moment or Moment("elsewhere")
