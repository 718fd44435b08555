"""The columns of a space with what belongs to each row: sums over its microbatch's units, the
seconds of its collectives, and what a rank holds of the parameters.

Amounts are those of the whole model on one rank of the tp axis. Of a model in stages a rank has on
average its part of them, and the fullest or slowest rank has no less.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from advisor.cost.communication import replicas_s
from advisor.cost.compression import Sent
from advisor.cost.compute import optimizer_s
from advisor.cost.sharded import Sharded
from advisor.cost.small_collectives import experts_s
from advisor.search.cache import SearchCache
from advisor.search.microbatch import Growing, Microbatch
from advisor.search.space import KINDS, RECOMPUTES, Floats, Integers, Space
from engines.plan import DataParallel, Plan
from profiles.machine.cluster import Collective
from profiles.workload.optimizers import Upkeep

SHARDED = np.array([kind.is_sharded for kind in KINDS])
ZERO1, ZERO2 = KINDS.index(DataParallel.ZERO1), KINDS.index(DataParallel.ZERO2)
HYBRID = KINDS.index(DataParallel.HYBRID_SHARD)
# How FSDP2 runs a plan: not at all, with experts whole on their ranks, or with shards of them too.
SHARDED_AS = (DataParallel.REPLICATE, DataParallel.HYBRID_SHARD, DataParallel.FULL_SHARD)
WITH_EXPERTS = 2
SMALL = 2  # samples of the largest microbatch that is always added up


class Microbatches:
    """The microbatches of a space, by (tp, cp, size, recompute, how FSDP2 runs them)."""

    def __init__(self, space: Space, kept: SearchCache) -> None:
        self.costs = kept.costs
        self.most_shards = kept.costs.facts.cluster.world_size
        self.kept = kept
        self._space = space
        place = {unit.name: n for n, unit in enumerate(kept.costs.facts.model.units)}
        self._places = [place[name] for name in space.pieces[1:]]
        self._found: dict[tuple[int, int, int, int, int], Microbatch] = {}
        self._growing: dict[tuple[int, int, int, int], Growing] = {}

    def exact(self, tp: int, cp: int, size: int, recompute: int, sharded: int) -> Microbatch:
        """This microbatch, with its times."""
        key = tp, cp, size, recompute, sharded
        if key not in self._found:
            self._found[key] = self._microbatch(*key)
        return self._found[key]

    def memory(self, tp: int, cp: int, size: int, recompute: int, sharded: int) -> Microbatch:
        """This microbatch for its memory alone, which those of 1 and 2 samples tell."""
        if size <= SMALL:
            return self.exact(tp, cp, size, recompute, sharded)
        alike = tp, cp, recompute, sharded
        if alike not in self._growing:
            one, two = (self.exact(tp, cp, n, recompute, sharded) for n in range(1, SMALL + 1))
            self._growing[alike] = Growing(one, two)
        return self._growing[alike].at(size)

    def _microbatch(self, tp: int, cp: int, size: int, recompute: int, sharded: int) -> Microbatch:
        plan = Plan.model_construct(
            tp=tp,
            cp=cp,
            ep=self._space.ep,
            dp_shard=self.most_shards if sharded == WITH_EXPERTS else 1,
            tensor_styles=self._space.styles[tp],
            microbatch_size=size,
            recompute=RECOMPUTES[recompute],
            precision=self._space.precision,
            data_parallel=SHARDED_AS[sharded],
        )
        return self.kept.microbatch(plan, self._places)


class Columns:
    """Looks amounts up for all rows; what rows share is worked out once.

    Attributes:
        shards: over how many ranks parameters and states are divided, those of cp among them.
        is_replicated: by row; whether DDP averages its gradients.
        is_sharded, gathers, reduces: by row; whether FSDP2 runs it, gathers parameters for every
            microbatch, and reduces gradients for every one (ZeRO-1 and ZeRO-2 gather once a step,
            ZeRO-1 reduces once).
        sharded: by row; index into `SHARDED_AS`.
        for_memory: no times are asked for.
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
        keys = np.stack([space.tp, space.cp, space.microbatch_size, space.recompute, self.sharded])
        different, self.group = unique(keys)
        take = microbatches.memory if for_memory else microbatches.exact
        self.groups = [take(*(int(n) for n in key)) for key in different.T]
        pairs = list(zip(different.T, self.groups, strict=True))
        # Parameters are the same in every microbatch of one tp degree that is sharded alike.
        self._sharded = {(int(key[0]), int(key[4])): group for key, group in pairs if key[4]}
        self._whole = {int(key[0]): group for key, group in pairs if not key[4]}
        self._most_shards = microbatches.most_shards
        self._ledger = self.costs.ledger()
        self._upkeeps: dict[tuple[int, int, int], Upkeep] = {}
        self._different: dict[tuple[int, ...], tuple[Integers, Integers, Sequence[Integers]]] = {}

    def of(self, amount: Callable[[Microbatch], float]) -> Floats:
        """An amount of its microbatch for each row."""
        return np.array([amount(group) for group in self.groups])[self.group]

    def each(self, keys: Sequence[Integers], amount: Callable[..., float]) -> Floats:
        """`amount` of every distinct combination of `keys`, for each row."""
        known = tuple(id(key) for key in keys)
        if known not in self._different:
            # The keys are kept with what was found, so that no other array gets their places.
            self._different[known] = (*unique(np.stack(keys)), keys)
        different, back, _ = self._different[known]
        return np.array([amount(*(int(n) for n in key)) for key in different.T])[back]

    def optimizer_s(self) -> Floats:
        """The update of a rank's parameters."""
        cluster = self.costs.facts.cluster

        def seconds(tp: int, shards: int, sharded: int) -> float:
            plan, update = self._holding(tp, shards, sharded), self.upkeep(tp, shards, sharded)
            ranks = cluster.devices_per_node
            return optimizer_s(plan, update, device=cluster.device, ranks=ranks)

        return self.each([self.space.tp, self.shards, self.sharded], seconds)

    def states_bytes(self) -> Floats:
        """What the optimizer keeps for a rank's parameters."""
        keys = [self.space.tp, self.shards, self.sharded]
        return self.each(keys, lambda *key: self.upkeep(*key).state_bytes)

    def upkeep(self, tp: int, shards: int, sharded: int) -> Upkeep:
        """What the optimizer keeps and does for a rank's part of the parameters; what goes by
        elements is in proportion to them, where all are divided."""
        key = tp, shards, sharded
        if key not in self._upkeeps:
            by_parts = self.space.ep == 1 and self.costs.facts.workload.optimizer.is_elementwise
            if by_parts and key != (tp, 1, 1):
                self._upkeeps[key] = self.upkeep(tp, 1, 1).part(1 / shards)
            else:
                units = len(self.costs.facts.model.units)
                self._upkeeps[key] = self.costs.update(self._holding(*key), 0, units)
        return self._upkeeps[key]

    def holding(self, tp: int, sharded: int) -> Microbatch:
        """Any microbatch of this tp degree that is sharded so: their parameters are the same."""
        return self._sharded[tp, sharded] if sharded else self._whole[tp]

    def unsharded_bytes(self) -> Floats:
        """Parameters of experts that are no shards of a rank's others; gradients are as large."""
        found = self.of(lambda g: g.loads.unsharded_bytes)
        most = self.space.cp * self._most_shards  # that `Microbatches` takes
        return np.where(self.sharded == WITH_EXPERTS, found * most / self.shards, found)

    def _holding(
        self, tp: int, shards: int, sharded: int, *, cp: int = 1, replicas: int = 1
    ) -> Plan:
        """A plan whose ranks hold this part of the parameters."""
        return Plan.model_construct(
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
        """(separate units, the root group): to gather all parameters once."""
        return self._sent(Collective.ALL_GATHER)

    def reduce_s(self) -> tuple[Floats, Floats]:
        """(separate units, the root group): to reduce all gradients once."""
        return self._sent(Collective.REDUCE_SCATTER)

    def _sent(self, collective: Collective) -> tuple[Floats, Floats]:
        is_gather = collective is Collective.ALL_GATHER

        def seconds(tp: int, shards: int, cp: int, sharded: int, *, of_root: bool) -> float:
            if shards < 2:
                return 0.0
            of, plan = self.holding(tp, sharded), self._holding(tp, shards, sharded, cp=cp)
            how = self._how(plan, of)
            units = of.root if of_root else of.separate
            if is_gather:
                return sum(n * how.gather_s(self._ledger, p, e) for (p, _, e), n in units.items())
            return sum(n * how.reduce_s(self._ledger, g, e) for (_, g, e), n in units.items())

        keys = [self.space.tp, self.shards, self.space.cp, self.sharded]
        separate = self.each(keys, lambda *key: seconds(*key, of_root=False))
        return separate, self.each(keys, lambda *key: seconds(*key, of_root=True))

    def _how(self, plan: Plan, of: Microbatch) -> Sharded:
        """Transfers to the host are no part of the bounds: they go on beside these."""
        return Sharded.of(
            plan,
            compute_share=of.loads.compute_share,
            reduced_share=self.costs.reduced_share,
            has_host=False,
            stack=self.costs.stack,
        )

    def experts_s(self) -> Floats:
        """To sum up the gradients of experts that are no shards, once a step."""
        space = self.space
        if space.ep == 1:
            return np.zeros(len(space))

        def seconds(tp: int, cp: int, data: int) -> float:
            of, plan = self._sharded[tp, 1], self._holding(tp, cp, 1, cp=cp, replicas=data)
            tensors = sum(unit.count for unit in of.units if unit.unsharded_bytes)
            gradient_bytes = of.loads.unsharded_bytes
            return experts_s(plan, self._ledger, gradient_bytes=gradient_bytes, tensors=tensors)

        found = np.zeros(len(space))
        rows = np.flatnonzero(self.sharded == 1)
        keys = [space.tp[rows], space.cp[rows], (space.dp_replicate * space.dp_shard)[rows]]
        found[rows] = self.each(keys, seconds)
        return found

    def replicate_s(self) -> tuple[Floats, Floats]:
        """(separate units, the rest): the all-reduces between replicas of a step, of gradients
        under DDP and of their shards under HSDP. Of stages it is not known how many messages each
        sends; one takes no longer than many."""

        def shards(tp: int, replicas: int, shard: int, *, of_root: bool) -> float:
            if replicas < 2:
                return 0.0
            of, plan = self._sharded[tp, 1], self._holding(tp, shard, 1, replicas=replicas)
            how, units = self._how(plan, of), of.root if of_root else of.separate
            return sum(n * how.replicate_s(self._ledger, g) for (_, g, _), n in units.items())

        def whole(tp: int, replicas: int, pp: int) -> float:
            if replicas < 2 or self._is_sent_otherwise:
                return 0.0
            nbytes, share = self._whole[tp].loads.gradient_bytes, self.costs.reduced_share
            if pp > 1:
                return self._seconds(Collective.ALL_REDUCE, share * nbytes, replicas, tp)
            plan = Plan.model_construct(
                tp=tp,
                dp_replicate=replicas,
                data_parallel=DataParallel.REPLICATE,
                **self.space.carried.only("bucket_mib").fixed,
            )
            return replicas_s(plan, nbytes, self._ledger, Sent((nbytes,)), reduced_share=share)

        space = self.space
        replicas = np.where(space.kind == HYBRID, space.dp_replicate, 1)
        keys = [space.tp, replicas, space.dp_shard * space.cp]
        separate = self.each(keys, lambda t, r, s: shards(t, r, s, of_root=False))
        root = self.each(keys, lambda t, r, s: shards(t, r, s, of_root=True))
        replicas = np.where(self.is_sharded, 1, space.dp_replicate * space.cp)
        keys = [space.tp, replicas, np.minimum(space.pp, 2)]
        return separate + self.each(keys, whole), root

    @property
    def _is_sent_otherwise(self) -> bool:
        """Whether gradients are not summed up whole by the backend; no bound is known then."""
        return bool({"aggregation", "compression"} & set(self.space.carried))

    def send_s(self, payload_bytes: Callable[[Microbatch], float]) -> Floats:
        """Of a payload from one stage to the next."""
        world = self.costs.facts.cluster.world_size

        def seconds(group: int, pp: int) -> float:
            payload = payload_bytes(self.groups[group])
            return self._seconds(Collective.SEND_RECV, payload, 2, world // pp) if pp > 1 else 0.0

        return self.each([self.group, self.space.pp], seconds)

    def _seconds(self, kind: Collective, payload: float, group: int, stride: int) -> float:
        return self._ledger.charge(kind, "", payload, group_size=group, stride=stride)


# Codes up to this are counted in a table, which takes a byte for each; larger ones are sorted.
_TABLE = 1 << 24


def unique(keys: Integers) -> tuple[Integers, Integers]:
    """The distinct columns of `keys`, and for every column which of them it is."""
    code = np.zeros(keys.shape[1], dtype=np.int64)
    for row in keys:
        code = code * (int(row.max(initial=0)) + 1) + row
    if code.max(initial=0) >= _TABLE:
        _, first, back = np.unique(code, return_index=True, return_inverse=True)
        return keys[:, first], back
    seen = np.zeros(int(code.max(initial=0)) + 1, dtype=bool)
    seen[code] = True
    found = np.flatnonzero(seen)
    place = np.empty(len(seen), dtype=np.int64)
    place[found] = np.arange(len(found))
    back = place[code]
    first = np.zeros(len(found), dtype=np.int64)
    first[back] = np.arange(len(code))
    return keys[:, first], back
