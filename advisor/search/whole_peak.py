"""Peaks of models in one piece, for many rows at once: the moments of `advisor.cost.memory`.

No formula stands here. What rows share is asked of the cost model: for every microbatch the moments
of its step, for every way to hold the parameters what always lives. Over how many ranks states are
sharded, moments say themselves (they are linear in 1/degree), and larger microbatches take no less
than two small ones say (what is kept grows by the sample, temporaries are maxima of such sums).
"""

from __future__ import annotations

import numpy as np

from advisor.cost.buffers import KEEPS_PARAMETERS, shard_degree
from advisor.cost.loads import Loads
from advisor.cost.memory import (
    UNITS_WHEN_AHEAD,
    Moment,
    largest_copy,
    last_moment,
    moments_of,
    peak_at,
    upper_end,
)
from advisor.cost.states import ResidentStates, resident_states
from advisor.search.columns import SMALL, Columns
from advisor.search.space import KINDS, RECOMPUTES, Floats
from advisor.search.step_moments import StepMoments
from engines.plan import DataParallel, Plan
from profiles.workload.optimizers import Upkeep
from profiles.workload.stack import TORCH

# Temporaries of split layers go by the share that a rank keeps, which differs from size to size, by
# 0.14 % in models of 128 channels: larger microbatches are taken to hold so much less than two
# small ones say.
_SHARES_DIFFER = 5e-3
# Sums in another order differ in their last digits.
_ROUNDING = 1e-12
# Times the usable memory: nobody asks how much exactly such plans miss.
_FAR_TOO_MUCH = 2
# So many ranks that nothing is left of a shard.
_ENDLESS = 1 << 50
_THREADS = KINDS.index(DataParallel.THREADS)


def whole_peak_bytes(columns: Columns, usable_bytes: float) -> Floats:
    """The upper end of the peak: for microbatches of one and two samples that of the estimate, for
    others no more. Rows whose states alone are far too much are not looked at more closely."""
    peaks = _Peaks(columns)
    space, facts = columns.space, columns.costs.facts
    always, last, last_doubtful = peaks.beside_moments()
    total, doubtful, ahead = last.copy(), last_doubtful.copy(), np.zeros(len(space))
    several = (space.forwards > 1).astype(np.int64)
    is_open = np.flatnonzero(always + last <= _FAR_TOO_MUCH * usable_bytes)
    keys = np.stack([columns.group, peaks.kind, several])[:, is_open]
    alike, which = np.unique(keys, axis=1, return_inverse=True)
    order = is_open[np.argsort(which.ravel(), kind="stable")]
    ends = np.cumsum(np.bincount(which.ravel(), minlength=alike.shape[1]))
    groups = np.split(order, ends[:-1]) if len(is_open) else []
    for (_, kind, again), rows in zip(alike.T, groups, strict=True):
        found = peaks.moments(int(rows[0]), KINDS[kind], forwards=1 + int(again))
        shared = found.sharded / columns.shards[rows, None]
        every = np.column_stack([found.fixed + shared + peaks.own[rows, None], last[rows]])
        doubts = np.broadcast_to(found.doubtful, (len(rows), len(found.doubtful)))
        total[rows] = every.max(axis=1)
        # Of moments that may be the fullest, the one with the least doubt.
        may_be = every >= total[rows, None] * (1 - found.error)
        doubts = np.column_stack([doubts, last_doubtful[rows]])
        doubtful[rows] = np.where(may_be, doubts, np.inf).min(axis=1)
        ahead[rows] = found.ahead
    batch = facts.model.batch_bytes
    local = space.microbatch_size * space.forwards / space.cp
    allocated = always + total + batch.fixed + batch.per_sample * local + facts.model.buffer_bytes
    peak = upper_end(allocated, facts.cluster.device, doubtful=doubtful, ahead=ahead)
    # Threads keep the states of torch whatever else the stack does.
    is_unknown = (space.kind == _THREADS) & (columns.costs.stack.states is not None)
    return np.where(is_unknown, 0.0, peak)


class _Peaks:
    """Asks the cost model about rows.

    Attributes:
        kind: by row, as a plan of one rank where ranks update by themselves or replicas are
            threads: what those hold besides is not bounded.
        own: gradients by row, in a stack with states of its own.
    """

    def __init__(self, columns: Columns) -> None:
        self._columns, space, costs = columns, columns.space, columns.costs
        self._device = costs.facts.cluster.device
        none = KINDS.index(DataParallel.NONE)
        is_alone = (space.kind == _THREADS) | (not space.updates_in_step)
        self.kind = np.where(is_alone, none, space.kind)
        # Ranks that update by themselves keep the states of torch, whatever the stack does.
        self._stack = costs.stack if space.updates_in_step else TORCH
        # A worker's optimizer states are on servers.
        self._kept_share = 0.0 if space.carried.servers else 1.0
        self._states: dict[tuple[int, ...], ResidentStates] = {}
        self._keys = [space.tp, columns.shards, columns.sharded, self.kind]
        self.own = columns.each(self._keys, self._own_gradients)

    def beside_moments(self) -> tuple[Floats, Floats, Floats]:
        """What always lives; the optimizer's moment, and of that what is doubtful."""
        columns = self._columns
        always = columns.each(self._keys, self._always)
        last = columns.each(self._keys, lambda *key: self._last(*key).total)
        doubtful = columns.each(self._keys, lambda *key: self._last(*key).transient)
        if self._stack.states is None:
            return always + 2 * columns.unsharded_bytes(), last, doubtful
        return always + (self._stack.bucket_bytes or 0.0), last, doubtful

    def moments(self, row: int, kind: DataParallel, *, forwards: int) -> StepMoments:
        """Of the microbatch of a row."""
        size = int(self._columns.space.microbatch_size[row])

        def at(samples: int) -> StepMoments:
            return self._moments(row, kind, forwards, samples)

        if size <= SMALL:
            return at(size)
        error = _SHARES_DIFFER if self._columns.space.tp[row] > 1 else _ROUNDING
        return at(SMALL).beyond(at(SMALL - 1), size - SMALL, error=error)

    def _moments(self, row: int, kind: DataParallel, forwards: int, samples: int) -> StepMoments:
        columns, space = self._columns, self._columns.space
        tp, cp, recompute = int(space.tp[row]), int(space.cp[row]), int(space.recompute[row])
        sharded = int(columns.sharded[row])
        of = (tp, cp, samples, recompute, sharded)
        same = (space.ep, space.styles[tp], space.precision, space.offload, space.offload_to)
        key = (*of, *same, kind, forwards, self._stack.name)
        known = columns.microbatches.kept.step_moments
        if key not in known:
            known[key] = self._counted(tp, cp, samples, recompute, sharded, kind, forwards)
        return known[key]

    def _counted(
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
            "microbatch_size": samples,
            "recompute": RECOMPUTES[recompute],
            "accumulation": forwards,
        }
        few, many = (
            self._plan(tp, degree, kind, cp=cp).model_copy(update=settings)
            for degree in (1, _ENDLESS)
        )
        one, endless = (
            moments_of(plan, loads, device=self._device, stack=self._stack) for plan in (few, many)
        )
        fixed = np.array([moment.total for moment in endless])
        whole = np.array([moment.total for moment in one])
        return StepMoments(
            fixed=fixed,
            sharded=(whole - fixed) * shard_degree(few),
            doubtful=np.array([moment.activations + moment.transient for moment in endless]),
            ahead=UNITS_WHEN_AHEAD * largest_copy(few, loads, self._stack),
        )

    def _plan(self, tp: int, degree: int, kind: DataParallel, *, cp: int = 1) -> Plan:
        """A plan of this kind whose states `degree` x cp ranks share, if they are shared."""
        space = self._columns.space
        replicas = degree if kind in KEEPS_PARAMETERS else 1
        if kind in (DataParallel.REPLICATE, DataParallel.HYBRID_SHARD):
            replicas = 2
        in_shards = kind.is_sharded and kind not in KEEPS_PARAMETERS
        return Plan.model_construct(
            tp=tp,
            cp=cp,
            ep=space.ep,
            tensor_styles=space.styles[tp],
            data_parallel=kind,
            dp_replicate=replicas,
            dp_shard=degree if in_shards else 1,
            precision=space.precision,
            offload=space.offload,
            offload_to=space.offload_to,
        )

    def _loads(self, tp: int, sharded: int) -> Loads:
        """Of any microbatch: parameters are the same in all."""
        return self._columns.holding(tp, sharded).loads

    def _upkeep(self, tp: int, shards: int, sharded: int) -> Upkeep:
        found = self._columns.upkeep(tp, shards, sharded)
        return found if self._kept_share == 1 else found.part(self._kept_share)

    def _own(self, tp: int, shards: int, sharded: int, kind: int) -> ResidentStates | None:
        """The states of a stack that keeps its own."""
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

    def _always(self, tp: int, shards: int, sharded: int, kind: int) -> float:
        loads = self._loads(tp, sharded)
        found = peak_at(
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
        return found.memory.total - found.memory.context

    def _last(self, tp: int, shards: int, sharded: int, kind: int) -> Moment:
        found = last_moment(
            self._plan(tp, shards, KINDS[kind]),
            self._loads(tp, sharded),
            self._upkeep(tp, shards, sharded),
            self._device,
            stack=self._stack,
            own=self._own(tp, shards, sharded, kind),
        )
        return found or Moment("elsewhere")
