"""Lower bounds of time and memory for all rows at once.

Every formula leaves something out that an estimate has, and adds nothing to it: what a rank
computes, what it must wait for, what it holds when its backward begins. Rows that share a
microbatch (size, recompute, tp, numerics) share the sums over the model's units, which are the cost
model's own; what is done to them for each row is arithmetic on columns.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from advisor.cost import CostModel, Estimate
from advisor.cost.collective import collective_s
from advisor.cost.compute import optimizer_s
from advisor.cost.memory import ALLOCATOR_SLACK
from advisor.cost.replay import slowdown
from advisor.policy import Policy
from advisor.search.microbatch import Microbatch, microbatch
from advisor.search.space import KINDS, RECOMPUTES, Integers, Space
from engines.plan import DataParallel, Offload, Plan
from profiles.cluster import Collective

Floats = NDArray[np.float64]

_SHARDED = np.array([kind.is_sharded for kind in KINDS])
_ZERO1, _ZERO2 = KINDS.index(DataParallel.ZERO1), KINDS.index(DataParallel.ZERO2)
_HYBRID = KINDS.index(DataParallel.HYBRID_SHARD)
_REPLICATE = KINDS.index(DataParallel.REPLICATE)


@dataclass(frozen=True, slots=True)
class Bounds:
    """What no estimate of a row is below.

    Attributes:
        compute_s, recompute_s, optimizer_s, launch_s, exposed_s: of the parts of the step.
        step_s: of the whole step, at least the sum of the parts.
        peak_high_bytes: of the upper end of the peak.
    """

    compute_s: Floats
    recompute_s: Floats
    optimizer_s: Floats
    launch_s: Floats
    exposed_s: Floats
    step_s: Floats
    peak_high_bytes: Floats

    def may_tie(self, rows: Integers, fastest: Estimate, policy: Policy) -> NDArray[np.bool_]:
        """Rows of which it is not certain that they are slower by more than `rules.margin_s`.

        A part that takes x where the fastest takes y adds x - y to the difference and e |x - y| to
        the margin. With e < 1 the one grows faster than the other, so that a row is nearest to a
        tie where each part is at its bound.
        """
        time = fastest.time
        beyond = np.zeros(len(rows))
        for found, its, error in (
            (self.compute_s, time.compute_s, fastest.compute_error),
            (self.recompute_s, time.recompute_s, fastest.compute_error),
            (self.optimizer_s, time.optimizer_s, fastest.compute_error),
            (self.launch_s, time.launch_s, fastest.launch_error),
            (self.exposed_s, time.exposed_s, fastest.communication_error),
            (np.zeros(len(self.step_s)), time.host_s, fastest.communication_error),
        ):
            more = found[rows] - its
            beyond += more - min(1.0, error) * np.abs(more)
        slack = 1e-9 * fastest.step_s
        within = self.step_s[rows] <= fastest.step_s * (1 + policy.simplicity_margin) + slack
        return np.asarray(within | (beyond <= slack))


def bounds_of(space: Space, costs: CostModel) -> Bounds:
    """The bounds of every row of `space`."""
    return _Bounding(space, costs).bounds()


class _Bounding:
    """The columns of a space with the sums that belong to each row."""

    def __init__(self, space: Space, costs: CostModel) -> None:
        self._space = space
        self._costs = costs
        self._cluster = costs.facts.cluster
        keys = np.stack([space.tp, space.microbatch_size, space.recompute, _SHARDED[space.kind]])
        unique, self._group = _unique(keys)
        self._groups = [
            microbatch(
                costs,
                Plan.model_construct(
                    tp=int(tp),
                    tensor_styles=space.styles[int(tp)],
                    microbatch_size=int(size),
                    recompute=RECOMPUTES[recompute],
                    precision=space.precision,
                    data_parallel=DataParallel.FULL_SHARD if sharded else DataParallel.REPLICATE,
                    offload=space.offload,
                ),
            )
            for tp, size, recompute, sharded in unique.T
        ]
        self._sharded = self._by_tp(unique, is_sharded=True)
        self._whole = self._by_tp(unique, is_sharded=False)
        self._seconds: dict[tuple[Collective, float, int, int], float] = {}
        zero = (space.kind == _ZERO1) | (space.kind == _ZERO2)
        self._shards = np.where(zero, space.dp_replicate, space.dp_shard)

    def _by_tp(self, unique: Integers, *, is_sharded: bool) -> dict[int, Microbatch]:
        """One microbatch of each tp degree: parameters are the same in all of them."""
        pairs = zip(unique.T, self._groups, strict=True)
        return {int(key[0]): group for key, group in pairs if bool(key[3]) is is_sharded}

    def bounds(self) -> Bounds:
        space = self._space
        if not len(space):
            none = np.zeros(0)
            return Bounds(none, none, none, none, none, none, none)
        forwards, pp = space.forwards, space.pp
        compute = forwards * self._of(lambda g: g.compute_s) / pp
        recompute = forwards * self._of(lambda g: g.recompute_s) / pp
        launch = forwards * self._of(lambda g: g.launch_s) / pp
        optimizer = self._optimizer_s() / pp
        busy = compute + recompute + launch
        exposed, sent = self._exposed_s(busy)
        # A second of overlap adds this much, whichever of the two takes longer.
        overlap = self._cluster.overlap
        first = slowdown(overlap, computing_s=1.0, sent_s=0.0).middle
        second = slowdown(overlap, computing_s=0.0, sent_s=1.0).middle
        added = min(first, second, 1.0) if self._overlaps else 0.0
        exposed = exposed + added * np.maximum(0.0, sent - exposed)
        return Bounds(
            compute_s=compute,
            recompute_s=recompute,
            optimizer_s=optimizer,
            launch_s=launch,
            exposed_s=exposed if space.offload is Offload.NONE else np.zeros(len(space)),
            step_s=busy + optimizer + exposed,
            peak_high_bytes=self._peak_high_bytes(),
        )

    @property
    def _overlaps(self) -> bool:
        return self._cluster.device.kind != "cpu"

    def _of(self, amount: Callable[[Microbatch], float]) -> Floats:
        """A sum of its microbatch for each row."""
        return np.array([amount(group) for group in self._groups])[self._group]

    def _each(self, keys: Sequence[Integers], seconds: Callable[..., float]) -> Floats:
        """`seconds` of every distinct combination of `keys`, for each row."""
        unique, back = _unique(np.stack(keys))
        found = [seconds(*(int(n) for n in numbers)) for numbers in unique.T]
        return np.array(found)[back]

    def _optimizer_s(self) -> Floats:
        """Of a model in one piece; stages have on average their part of it."""

        def seconds(tp: int, shards: int) -> float:
            plan = Plan.model_construct(offload=self._space.offload)
            update = self._costs._update(shards)
            ranks = self._cluster.devices_per_node
            return optimizer_s(plan, update, device=self._cluster.device, ranks=ranks) / tp

        return self._each([self._space.tp, self._shards], seconds)

    def _exposed_s(self, busy: Floats) -> tuple[Floats, Floats]:
        """(what nothing hides, all that is sent beside computing)."""
        space = self._space
        forwards, kind = space.forwards, space.kind
        forward = self._of(lambda g: g.forward_s) / space.pp
        backward = busy / forwards - forward
        gather, root_gather = self._sent(Collective.ALL_GATHER)
        reduce, root_reduce = self._sent(Collective.REDUCE_SCATTER)
        between, root_between = self._between_replicas()
        # ZeRO-1 and ZeRO-2 gather once a step, ZeRO-1 reduces once.
        gathers = np.where((kind == _ZERO1) | (kind == _ZERO2), 0.0, 1.0)
        reduces = np.where(kind == _ZERO1, 0.0, 1.0)

        def pass_s(computing: Floats, *, around: Floats, sent: Floats) -> Floats:
            """One way through the units: what comes before or after all computing, or the queue."""
            if not self._overlaps:
                return np.asarray(computing + around + sent)
            return np.asarray(np.maximum(computing + around, around + sent))

        first = pass_s(forward, around=root_gather, sent=gather)
        again = pass_s(forward, around=gathers * root_gather, sent=gathers * gather)
        middle = pass_s(
            backward, around=reduces * root_reduce, sent=gathers * gather + reduces * reduce
        )
        last = pass_s(backward, around=root_reduce, sent=gathers * gather + reduce)
        if self._overlaps:  # in a queue of their own; the root's comes after everything
            last = np.maximum(last, between) + root_between
        else:
            last = last + between + root_between
        wall = first + last + (forwards - 1) * (again + middle)
        sent = gather + root_gather + gathers * (2 * forwards - 1) * gather
        sent += gathers * (forwards - 1) * root_gather
        sent += (1 + reduces * (forwards - 1)) * (reduce + root_reduce) + between + root_between
        tensor = forwards * self._of(lambda g: g.exchanged_s) / space.pp
        return np.maximum(0.0, wall - busy) + tensor, sent

    def _sent(self, collective: Collective) -> tuple[Floats, Floats]:
        """(separate units, the root group): seconds to gather or reduce all of them once, on
        average over the stages. Many small messages take no less than a large one."""
        is_gather = collective is Collective.ALL_GATHER

        def seconds(tp: int, shards: int, *, of_root: bool) -> float:
            if shards < 2:
                return 0.0
            of = self._sharded[tp]
            share = of.loads.compute_share if is_gather else 1.0
            return sum(
                count * self._collective_s(collective, (p if is_gather else g) * share, shards, tp)
                for (p, g), count in (of.root if of_root else of.separate).items()
            )

        space = self._space
        keys = [space.tp, np.where(_SHARDED[space.kind], self._shards, 1)]
        separate = self._each(keys, lambda tp, n: seconds(tp, n, of_root=False))
        root = self._each(keys, lambda tp, n: seconds(tp, n, of_root=True))
        return separate / space.pp, root / space.pp

    def _between_replicas(self) -> tuple[Floats, Floats]:
        """(separate units, the rest): seconds of the all-reduces between replicas, of gradients
        under DDP and of their shards under HSDP."""

        reduced = Collective.ALL_REDUCE

        def shards(tp: int, replicas: int, shard: int, *, of_root: bool) -> float:
            if replicas < 2:
                return 0.0
            of = self._sharded[tp]
            return sum(
                count * self._collective_s(reduced, g / shard, replicas, shard * tp)
                for (_, g), count in (of.root if of_root else of.separate).items()
            )

        def whole(tp: int, replicas: int) -> float:
            if replicas < 2:
                return 0.0
            return self._collective_s(reduced, self._whole[tp].loads.gradient_bytes, replicas, tp)

        space, kind = self._space, self._space.kind
        keys = [space.tp, np.where(kind == _HYBRID, space.dp_replicate, 1), space.dp_shard]
        separate = self._each(keys, lambda t, r, s: shards(t, r, s, of_root=False))
        root = self._each(keys, lambda t, r, s: shards(t, r, s, of_root=True))
        keys = [space.tp, np.where(kind == _REPLICATE, space.dp_replicate, 1)]
        return (separate + self._each(keys, whole)) / space.pp, root / space.pp

    def _collective_s(
        self, kind: Collective, payload_bytes: float, group_size: int, stride: int
    ) -> float:
        if not payload_bytes:
            return 0.0
        key = (kind, payload_bytes, group_size, stride)
        if key not in self._seconds:
            self._seconds[key] = collective_s(
                self._cluster, kind, payload_bytes, group_size=group_size, stride=stride
            )
        return self._seconds[key]

    def _peak_high_bytes(self) -> Floats:
        """Two moments: the backward begins and holds all activations, the optimizer steps."""
        space, device = self._space, self._cluster.device
        shards = self._shards
        several, is_sharded = space.forwards > 1, _SHARDED[space.kind]
        parameters = self._of(lambda g: g.loads.parameter_bytes) / shards / space.pp
        gradients = self._of(lambda g: g.loads.gradient_bytes) / space.pp
        update = self._each([shards], lambda n: self._costs._update(n).state_bytes)
        update = update / space.tp / space.pp
        held = parameters + update
        on_device = np.ones(len(space))
        if space.offload is Offload.STATES and device.kind != "cpu":
            held, on_device = np.zeros(len(space)), np.zeros(len(space))
        whole = np.where(space.kind == _REPLICATE, 1.0 + several, several)
        reduced = np.where(space.kind == _ZERO1, several, several / shards * on_device)
        waiting = gradients * np.where(is_sharded, reduced, whole)
        root = self._of(lambda g: g.loads.root_parameter_bytes * g.loads.compute_share)
        gathered = np.where(is_sharded, root, 0.0) / space.pp
        activations = self._of(lambda g: g.fullest_bytes) * np.where(space.pp > 1, 0.0, 1.0)
        stepping = held + on_device * gradients / shards
        allocated = np.maximum(held + waiting + gathered + activations, stepping)
        batch = self._costs.facts.model.batch_bytes
        samples = space.microbatch_size * space.forwards
        batches = np.where(space.pp > 1, 0.0, batch.fixed + batch.per_sample * samples)
        return np.asarray((allocated + batches) * (1 + ALLOCATOR_SLACK) + device.context_bytes.high)


def _unique(keys: Integers) -> tuple[Integers, Integers]:
    """The distinct columns of `keys`, and for every column which of them it is."""
    code = np.zeros(keys.shape[1], dtype=np.int64)
    for row in keys:
        code = code * (int(row.max(initial=0)) + 1) + row
    _, first, back = np.unique(code, return_index=True, return_inverse=True)
    return keys[:, first], back
