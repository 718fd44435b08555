"""Costs of each row of a space: sums over its microbatch's units, seconds of its collectives, and
a rank's share of the parameters.

Amounts are those of the whole model on one rank of the tp axis. With pipeline stages a rank has
1/pp of them on average, and the fullest or slowest rank has no less.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from advisor.cost.communication.compression import Sent
from advisor.cost.communication.exchange import replicas_s
from advisor.cost.communication.sharded import Sharded
from advisor.cost.compute.unit_times import optimizer_s
from advisor.cost.estimates.borders import charged_group
from advisor.search.cache import SearchCache
from advisor.search.microbatch import ExtrapolatedMicrobatch, Microbatch
from advisor.search.space import KINDS, RECOMPUTES, Floats, Integers, Space, plan_with
from engines.plan import DataParallel, Plan
from profiles.machine.cluster import Collective
from profiles.workload.optimizers import Upkeep

SHARDED = np.array([kind.is_sharded for kind in KINDS])
ZERO1, ZERO2 = KINDS.index(DataParallel.ZERO1), KINDS.index(DataParallel.ZERO2)
HYBRID = KINDS.index(DataParallel.HYBRID_SHARD)
# Data-parallel kinds to estimate with: unsharded, sharded without experts, sharded with experts.
SHARDED_AS = (DataParallel.REPLICATE, DataParallel.HYBRID_SHARD, DataParallel.FULL_SHARD)
WITH_EXPERTS = 2
# Bounds add the same numbers in another order: the last digits may differ from the estimate's.
ROUNDING = 1e-9
SMALL = 2  # samples of the largest microbatch that is not extrapolated


class Microbatches:
    """Microbatches of a space, by (tp, cp, size, recompute, index into `SHARDED_AS`)."""

    def __init__(self, space: Space, cache: SearchCache) -> None:
        self.costs = cache.costs
        self.most_shards = cache.costs.facts.cluster.world_size
        self.cache = cache
        self._space = space
        place = {unit.name: n for n, unit in enumerate(cache.costs.facts.model.units)}
        self._places = [place[name] for name in space.segments[1:]]
        # The last unit of each segment: one of them ends each stage.
        self.last_units = np.array([*self._places, len(place)]) - 1
        # Units of the first segment, and of the last.
        self.ends = [slice(place) for place in self._places[:1]]
        self.ends += [slice(place, None) for place in self._places[-1:]]
        self._exact: dict[tuple[int, int, int, int, int], Microbatch] = {}
        self._extrapolated: dict[tuple[int, int, int, int], ExtrapolatedMicrobatch] = {}

    def exact(self, tp: int, cp: int, size: int, recompute: int, sharded: int) -> Microbatch:
        """Microbatch with exact times and memory."""
        key = tp, cp, size, recompute, sharded
        if key not in self._exact:
            self._exact[key] = self._microbatch(*key)
        return self._exact[key]

    def memory(self, tp: int, cp: int, size: int, recompute: int, sharded: int) -> Microbatch:
        """Microbatch for its memory alone, extrapolated from those of 1 and 2 samples."""
        if size <= SMALL:
            return self.exact(tp, cp, size, recompute, sharded)
        key = tp, cp, recompute, sharded
        if key not in self._extrapolated:
            one, two = (self.exact(tp, cp, n, recompute, sharded) for n in range(1, SMALL + 1))
            self._extrapolated[key] = ExtrapolatedMicrobatch(one, two)
        return self._extrapolated[key].at(size)

    def _microbatch(self, tp: int, cp: int, size: int, recompute: int, sharded: int) -> Microbatch:
        plan = plan_with(
            tp=tp,
            cp=cp,
            ep=self._space.ep,
            dp_shard=self.most_shards if sharded == WITH_EXPERTS else 1,
            tensor_styles=self._space.styles[tp],
            microbatch_size=size,
            recompute=RECOMPUTES[recompute],
            recompute_blocks=self._space.common.recompute_blocks,
            precision=self._space.precision,
            data_parallel=SHARDED_AS[sharded],
        )
        return self.cache.microbatch(plan, self._places)


class Columns:
    """Amounts of all rows; those that rows share are computed once.

    Attributes:
        shards: ranks that shard parameters and states, including those of cp.
        is_replicated: whether DDP averages a row's gradients.
        is_sharded: whether FSDP2 runs a row.
        gathers, reduces: 1 if it gathers parameters, or reduces gradients, for every microbatch
            (ZeRO-1 and ZeRO-2 gather once a step, ZeRO-1 reduces once).
        sharded: index into `SHARDED_AS`.
        groups: distinct microbatches; `group` is each row's index among them.

    Args:
        for_memory: times are not needed.
    """

    def __init__(
        self, space: Space, microbatches: Microbatches, *, for_memory: bool = False
    ) -> None:
        self.space = space
        self.costs = microbatches.costs
        self.microbatches = microbatches
        self.is_sharded = SHARDED[space.kind]
        self.is_replicated = ~self.is_sharded & (space.dp_replicate * space.cp > 1)
        zero = (space.kind == ZERO1) | (space.kind == ZERO2)
        degree = np.where(zero, space.dp_replicate, space.dp_shard)
        self.shards = np.where(self.is_sharded, degree * space.cp, 1)
        self.gathers = np.where(zero, 0.0, 1.0)
        self.reduces = np.where(space.kind == ZERO1, 0.0, 1.0)
        ranks = space.dp_replicate * space.dp_shard * space.cp
        shards_experts = (
            self.is_sharded & (space.kind != HYBRID) & (ranks > space.ep) & (space.ep > 1)
        )
        self.sharded = np.where(shards_experts, WITH_EXPERTS, self.is_sharded)
        keys = space.tp, space.cp, space.microbatch_size, space.recompute, self.sharded
        different, self.group = unique(keys)
        take = microbatches.memory if for_memory else microbatches.exact
        self.groups = [take(*(int(n) for n in key)) for key in different.T]
        pairs = list(zip(different.T, self.groups, strict=True))
        # Parameters are the same in every microbatch of one tp degree and kind of sharding.
        self._sharded = {(int(key[0]), int(key[4])): group for key, group in pairs if key[4]}
        self._whole = {int(key[0]): group for key, group in pairs if not key[4]}
        self._most_shards = microbatches.most_shards
        self._ledger = self.costs.ledger()
        self._upkeeps: dict[tuple[int, int, int], Upkeep] = {}
        self._different: dict[tuple[int, ...], tuple[Integers, Integers, Sequence[Integers]]] = {}

    def of(self, amount: Callable[[Microbatch], float]) -> Floats:
        """Amount of each row's microbatch."""
        return np.array([amount(group) for group in self.groups])[self.group]

    def of_each(self, amounts: Callable[[Microbatch], Floats]) -> Floats:
        """Several amounts of each row's microbatch; the last dimension is that of rows."""
        groups = np.array([amounts(group) for group in self.groups])
        return np.moveaxis(groups, 0, -1)[..., self.group]

    def each(self, keys: Sequence[Integers], amount: Callable[..., float]) -> Floats:
        """`amount` for each row, computed once per distinct combination of `keys`."""
        ids = tuple(id(key) for key in keys)
        if ids not in self._different:
            # The entry refers to the keys, so that no other array can get their ids.
            self._different[ids] = (*unique(keys), keys)
        different, inverse, _ = self._different[ids]
        return np.array([amount(*(int(n) for n in key)) for key in different.T])[inverse]

    def optimizer_s(self) -> Floats:
        """Seconds of the optimizer step for a rank's parameters."""
        cluster = self.costs.facts.cluster

        def seconds(tp: int, shards: int, sharded: int) -> float:
            plan, update = self._plan(tp, shards, sharded), self.upkeep(tp, shards, sharded)
            plan = plan.model_copy(update={"data_parallel": SHARDED_AS[sharded]})
            ranks = cluster.devices_per_node
            return optimizer_s(plan, update, device=cluster.device, ranks=ranks)

        return self.each([self.space.tp, self.shards, self.sharded], seconds)

    def states_bytes(self) -> Floats:
        """Bytes of optimizer states for a rank's parameters."""
        keys = [self.space.tp, self.shards, self.sharded]
        return self.each(keys, lambda *key: self.upkeep(*key).state_bytes)

    def upkeep(self, tp: int, shards: int, sharded: int) -> Upkeep:
        """States and work of the optimizer for a rank's part of the parameters; an elementwise
        optimizer's are proportional to them, if all parameters are sharded."""
        key = tp, shards, sharded
        if key not in self._upkeeps:
            is_elementwise = self.costs.facts.workload.optimizer.is_elementwise
            proportional = is_elementwise and self.space.ep == 1 and not self.costs.has_whole
            if proportional and key != (tp, 1, 1):
                self._upkeeps[key] = self.upkeep(tp, 1, 1).part(1 / shards)
            else:
                units = len(self.costs.facts.model.units)
                self._upkeeps[key] = self.costs.update(self._plan(*key), 0, units)
        return self._upkeeps[key]

    def any_microbatch(self, tp: int, sharded: int) -> Microbatch:
        """Any microbatch of this tp degree and kind of sharding: all have the same parameters."""
        return self._sharded[tp, sharded] if sharded else self._whole[tp]

    def unsharded_bytes(self) -> Floats:
        """Bytes of unsharded experts' parameters; their gradients are as large."""
        return self.of(lambda g: g.loads.unsharded_bytes) * self.unsharded_share

    @property
    def unsharded_share(self) -> Floats:
        """Bytes of a row's unsharded experts per byte of those in its microbatch."""
        most = self.space.cp * self._most_shards  # the degree in `Microbatches`
        return np.where(self.sharded == WITH_EXPERTS, most / self.shards, 1.0)

    def whole_bytes(self) -> Floats:
        """Bytes of parameters that cannot be sharded where others are, and of their gradients."""
        return self.of(lambda g: g.loads.whole_bytes + g.loads.whole_gradient_bytes)

    def _plan(self, tp: int, shards: int, sharded: int, *, cp: int = 1, replicas: int = 1) -> Plan:
        """Plan whose ranks have this part of the parameters."""
        return plan_with(
            tp=tp,
            cp=cp,
            ep=self.space.ep,
            tensor_styles=self.space.styles[tp],
            dp_replicate=replicas,
            dp_shard=shards // cp,
            data_parallel=SHARDED_AS[max(1, sharded)],
            precision=self.space.precision,
            offload=self.space.offload,
        )

    def gather_s(self) -> tuple[Floats, Floats]:
        """Seconds to gather all parameters once: (units with their own group, the root group)."""
        return self._sent(Collective.ALL_GATHER)

    def reduce_s(self) -> tuple[Floats, Floats]:
        """Seconds to reduce all gradients once: (units with their own group, the root group)."""
        return self._sent(Collective.REDUCE_SCATTER)

    def _sent(self, collective: Collective) -> tuple[Floats, Floats]:
        is_gather = collective is Collective.ALL_GATHER

        def seconds(tp: int, shards: int, cp: int, sharded: int, *, of_root: bool) -> float:
            if shards < 2:
                return 0.0
            microbatch = self.any_microbatch(tp, sharded)
            fsdp = self._fsdp(self._plan(tp, shards, sharded, cp=cp), microbatch)
            units = microbatch.root if of_root else microbatch.separate
            if is_gather:
                return sum(n * fsdp.gather_s(self._ledger, p, e) for (p, _, e), n in units.items())
            return sum(n * fsdp.reduce_s(self._ledger, g, e) for (_, g, e), n in units.items())

        keys = [self.space.tp, self.shards, self.space.cp, self.sharded]
        separate = self.each(keys, lambda *key: seconds(*key, of_root=False))
        return separate, self.each(keys, lambda *key: seconds(*key, of_root=True))

    def _fsdp(self, plan: Plan, microbatch: Microbatch) -> Sharded:
        """Collectives of `plan`, without transfers to the host, which overlap with them."""
        return Sharded.of(
            plan,
            compute_share=microbatch.loads.compute_share,
            reduced_share=self.costs.reduced_share,
            has_host=False,
            stack=self.costs.stack,
        )

    def experts_s(self) -> Floats:
        """Seconds per step to all-reduce the gradients of unsharded experts, of sharded plans."""
        space = self.space
        if space.ep == 1:
            return np.zeros(len(space))

        def seconds(tp: int, cp: int, data: int) -> float:
            plan = self._plan(tp, cp, 1, cp=cp, replicas=data)
            return self.costs.experts_s(plan, self._sharded[tp, 1].units, self._ledger)

        by_row = np.zeros(len(space))
        rows = np.flatnonzero(self.sharded == 1)
        keys = [space.tp[rows], space.cp[rows], (space.dp_replicate * space.dp_shard)[rows]]
        by_row[rows] = self.each(keys, seconds)
        return by_row

    def replicate_s(self) -> tuple[Floats, Floats]:
        """Seconds per step of all-reduces between replicas (units with their own group, the rest):
        of gradients under DDP, of their shards under HSDP.

        With pipeline stages the number of buckets is unknown: one takes no longer than several.
        """

        def shards(tp: int, replicas: int, shard: int, *, of_root: bool) -> float:
            if replicas < 2:
                return 0.0
            microbatch, plan = self._sharded[tp, 1], self._plan(tp, shard, 1, replicas=replicas)
            fsdp = self._fsdp(plan, microbatch)
            units = microbatch.root if of_root else microbatch.separate
            return sum(n * fsdp.replicate_s(self._ledger, g) for (_, g, _), n in units.items())

        def whole(tp: int, replicas: int, pp: int) -> float:
            if replicas < 2 or self._has_other_aggregation:
                return 0.0
            nbytes, share = self._whole[tp].loads.common_gradient_bytes, self.costs.reduced_share
            if pp > 1:
                return self._seconds(Collective.ALL_REDUCE, share * nbytes, replicas, tp)
            plan = plan_with(
                tp=tp,
                dp_replicate=replicas,
                data_parallel=DataParallel.REPLICATE,
                **self.space.common.only("bucket_mib").fixed,
            )
            sent = Sent((nbytes,))
            seconds, _ = replicas_s(plan, nbytes, self._ledger, sent, reduced_share=share)
            return seconds

        space = self.space
        replicas = np.where(space.kind == HYBRID, space.dp_replicate, 1)
        keys = [space.tp, replicas, space.dp_shard * space.cp]
        separate = self.each(keys, lambda t, r, s: shards(t, r, s, of_root=False))
        root = self.each(keys, lambda t, r, s: shards(t, r, s, of_root=True))
        replicas = np.where(self.is_sharded, 1, space.dp_replicate * space.cp)
        keys = [space.tp, replicas, np.minimum(space.pp, 2)]
        return separate + self.each(keys, whole), root

    @property
    def _has_other_aggregation(self) -> bool:
        """Return True if gradients are compressed, or not reduced by the backend: no bound is known
        then."""
        return self.space.common.fixes("aggregation", "compression")

    def send_s(
        self, payload_bytes: Callable[[Microbatch], float], *, leaves_node: bool = False
    ) -> Floats:
        """Seconds to send a payload from one stage to the next, one of the same node if there is
        one; or to one of another node."""
        cluster = self.costs.facts.cluster

        def seconds(group: int, pp: int) -> float:
            if pp == 1:
                return 0.0
            stride, payload = cluster.world_size // pp, payload_bytes(self.groups[group])
            last = charged_group(cluster, pp, 0, pp - 1) if leaves_node else 2
            return self._seconds(Collective.SEND_RECV, payload, last, stride)

        return self.each([self.group, self.space.pp], seconds)

    def _seconds(self, kind: Collective, payload: float, group: int, stride: int) -> float:
        return self._ledger.charge(kind, "", payload, group_size=group, stride=stride)


# Codes up to this are looked up in a table of a byte each; larger ones are sorted.
_TABLE = 1 << 24


def unique(keys: Sequence[NDArray[Any]]) -> tuple[Integers, Integers]:
    """Distinct combinations of `keys`, one a column, and the index of each row's among them.

    Rows of a space come in runs of equal degrees, and in these in runs of equal microbatches: only
    the first row of a run is looked at.
    """
    begins = np.ones(len(keys[0]), dtype=bool)
    begins[1:] = False
    for key in keys:
        begins[1:] |= key[1:] != key[:-1]
    starts = np.flatnonzero(begins)
    lengths = np.diff(starts, append=len(begins))
    firsts = np.stack([key[starts] for key in keys]).astype(np.int64)
    code = np.zeros(len(starts), dtype=np.int64)
    for row in firsts:
        code = code * (int(row.max(initial=0)) + 1) + row
    if code.max(initial=0) >= _TABLE:
        _, first, inverse = np.unique(code, return_index=True, return_inverse=True)
        return firsts[:, first], np.repeat(inverse, lengths)
    seen = np.zeros(int(code.max(initial=0)) + 1, dtype=bool)
    seen[code] = True
    distinct = np.flatnonzero(seen)
    index = np.empty(len(seen), dtype=np.int64)
    index[distinct] = np.arange(len(distinct))
    inverse = index[code]
    representative = np.zeros(len(distinct), dtype=np.int64)
    representative[inverse] = np.arange(len(code))
    return firsts[:, representative], np.repeat(inverse, lengths)


def some_of_each(group: Integers) -> Integers:
    """Some row of every group; groups are numbered from 0."""
    some = np.zeros(int(group.max(initial=-1)) + 1, dtype=np.int64)
    some[group] = np.arange(len(group))
    return some
