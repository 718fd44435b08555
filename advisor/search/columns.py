"""The columns of a space with what belongs to each row: sums over its microbatch's units, the
seconds of its collectives, and what a rank holds of the parameters.

Amounts are those of the whole model on one rank of the tp axis. Of a model in stages a rank has on
average its part of them, and the fullest or slowest rank has no less.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
from numpy.typing import NDArray

from advisor.cost.compute import optimizer_s
from advisor.cost.memory import ALLOCATOR_SLACK
from advisor.search.kept import Kept
from advisor.search.microbatch import Microbatch
from advisor.search.space import KINDS, RECOMPUTES, Integers, Space
from engines.plan import DataParallel, Plan
from profiles.cluster import Collective

Floats = NDArray[np.float64]

SHARDED = np.array([kind.is_sharded for kind in KINDS])
ZERO1, ZERO2 = KINDS.index(DataParallel.ZERO1), KINDS.index(DataParallel.ZERO2)
HYBRID = KINDS.index(DataParallel.HYBRID_SHARD)


class Microbatches:
    """The microbatches of a space, by (tp, cp, size, recompute, whether FSDP2 runs them)."""

    def __init__(self, space: Space, kept: Kept, usable_bytes: float) -> None:
        self.costs = kept.costs
        self._kept = kept
        self._space = space
        self._usable_bytes = usable_bytes
        place = {unit.name: n for n, unit in enumerate(kept.costs.facts.model.units)}
        self._places = [place[name] for name in space.pieces[1:]]
        self._found: dict[tuple[int, int, int, int, int], Microbatch] = {}
        self._too_large: dict[tuple[int, int, int, int], tuple[int, Microbatch]] = {}

    def least(self, tp: int, cp: int, size: int, recompute: int, is_sharded: int) -> Microbatch:
        """This microbatch; or a smaller one of which one unit alone, that some rank has to run,
        does not fit: then nobody asks what exactly the larger one takes."""
        alike = tp, cp, recompute, is_sharded
        smallest, found = self._too_large.get(alike, (size, None))
        if found is not None and smallest < size:
            return found
        key = tp, cp, size, recompute, is_sharded
        if key not in self._found:
            self._found[key] = self._microbatch(*key)
        found = self._found[key]
        if found.unit_bytes * (1 + ALLOCATOR_SLACK) > self._usable_bytes:
            self._too_large[alike] = size, found
        return found

    def _microbatch(
        self, tp: int, cp: int, size: int, recompute: int, is_sharded: int
    ) -> Microbatch:
        kind = DataParallel.FULL_SHARD if is_sharded else DataParallel.REPLICATE
        plan = Plan.model_construct(
            tp=tp,
            cp=cp,
            ep=self._space.ep,
            tensor_styles=self._space.styles[tp],
            microbatch_size=size,
            recompute=RECOMPUTES[recompute],
            precision=self._space.precision,
            data_parallel=kind,
        )
        return self._kept.microbatch(plan, self._places)


class Columns:
    """Looks amounts up for all rows; what rows share is worked out once.

    Attributes:
        shards: over how many ranks parameters and states are divided, those of cp among them.
        is_replicated: by row; whether DDP averages its gradients.
        is_sharded, gathers, reduces: by row; whether FSDP2 runs it, gathers parameters for every
            microbatch, and reduces gradients for every one (ZeRO-1 and ZeRO-2 gather once a step,
            ZeRO-1 reduces once).
    """

    def __init__(self, space: Space, microbatches: Microbatches) -> None:
        self.space = space
        self.costs = microbatches.costs
        self.is_sharded = SHARDED[space.kind]
        self.is_replicated = ~self.is_sharded & (space.dp_replicate * space.cp > 1)
        zero = (space.kind == ZERO1) | (space.kind == ZERO2)
        degree = np.where(zero, space.dp_replicate, space.dp_shard)
        self.shards = np.where(self.is_sharded, degree * space.cp, 1)
        self.gathers = np.where(zero, 0.0, 1.0)
        self.reduces = np.where(space.kind == ZERO1, 0.0, 1.0)
        keys = np.stack(
            [space.tp, space.cp, space.microbatch_size, space.recompute, self.is_sharded]
        )
        different, self.group = unique(keys)
        self.groups = [microbatches.least(*(int(n) for n in key)) for key in different.T]
        pairs = list(zip(different.T, self.groups, strict=True))
        # Parameters are the same in every microbatch of one tp degree.
        self._sharded = {int(key[0]): group for key, group in pairs if key[4]}
        self._whole = {int(key[0]): group for key, group in pairs if not key[4]}
        self._ledger = self.costs.ledger()
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
        cluster, units = self.costs.facts.cluster, len(self.costs.facts.model.units)

        def seconds(tp: int, shards: int) -> float:
            plan = self._holding(tp, shards)
            update = self.costs.update(plan, 0, units)
            ranks = cluster.devices_per_node
            return optimizer_s(plan, update, device=cluster.device, ranks=ranks)

        return self._of_part(seconds)

    def states_bytes(self) -> Floats:
        """What the optimizer keeps for a rank's parameters."""
        units = len(self.costs.facts.model.units)

        def held(tp: int, shards: int) -> float:
            return self.costs.update(self._holding(tp, shards), 0, units).state_bytes

        return self._of_part(held)

    def _of_part(self, amount: Callable[[int, int], float]) -> Floats:
        """Of a rank's part of the parameters, (tp, shards); what goes by elements is in proportion
        to them."""
        if self.costs.facts.workload.optimizer.is_elementwise:
            return self.each([self.space.tp], lambda tp: amount(tp, 1)) / self.shards
        return self.each([self.space.tp, self.shards], amount)

    def _holding(self, tp: int, shards: int) -> Plan:
        """A plan whose ranks hold this part of the parameters."""
        return Plan.model_construct(
            tp=tp,
            ep=self.space.ep,
            tensor_styles=self.space.styles[tp],
            dp_shard=shards,
            data_parallel=DataParallel.FULL_SHARD,
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

        # Stacks with states of their own send experts among fewer ranks: nothing is known then.
        is_open = self.space.ep > 1 and self.costs.stack.states is not None

        def seconds(tp: int, shards: int, *, of_root: bool) -> float:
            if shards < 2 or is_open:
                return 0.0
            of = self._sharded[tp]
            share, reduced = of.loads.compute_share, self.costs.reduced_share
            return sum(
                count
                * self._seconds(collective, p * share if is_gather else g * reduced, shards, tp)
                for (p, g), count in (of.root if of_root else of.separate).items()
            )

        keys = [self.space.tp, self.shards]
        separate = self.each(keys, lambda tp, n: seconds(tp, n, of_root=False))
        return separate, self.each(keys, lambda tp, n: seconds(tp, n, of_root=True))

    def replicate_s(self) -> tuple[Floats, Floats]:
        """(separate units, the rest): the all-reduces between replicas of a step, of gradients
        under DDP and of their shards under HSDP. One message takes no longer than many."""
        reduced, sent = Collective.ALL_REDUCE, self.costs.reduced_share

        def shards(tp: int, replicas: int, shard: int, *, of_root: bool) -> float:
            if replicas < 2:
                return 0.0
            of = self._sharded[tp]
            return sum(
                count * self._seconds(reduced, sent * g / shard, replicas, shard * tp)
                for (_, g), count in (of.root if of_root else of.separate).items()
            )

        def whole(tp: int, replicas: int) -> float:
            if replicas < 2 or self._is_sent_otherwise:
                return 0.0
            return self._seconds(reduced, sent * self._whole[tp].loads.gradient_bytes, replicas, tp)

        space = self.space
        replicas = np.where(space.kind == HYBRID, space.dp_replicate, 1)
        keys = [space.tp, replicas, space.dp_shard * space.cp]
        separate = self.each(keys, lambda t, r, s: shards(t, r, s, of_root=False))
        root = self.each(keys, lambda t, r, s: shards(t, r, s, of_root=True))
        keys = [space.tp, np.where(self.is_sharded, 1, space.dp_replicate * space.cp)]
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
