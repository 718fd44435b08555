"""Coordinates of a rank on the axes of a plan, and its process group along each of them.

Ranks are numbered as `plan.AXES` lists the axes: pp changes slowest, tp fastest. With pp=2,
dp_replicate=2 and tp=2 rank 5 is stage 1, replica 0, part 1:

    rank           0 1 2 3 4 5 6 7
    pp             0 0 0 0 1 1 1 1
    dp_replicate   0 0 1 1 0 0 1 1
    tp             0 1 0 1 0 1 0 1
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from datetime import timedelta

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from engines.plan import AXES, Aggregation, DataParallel, Plan
from engines.runtime.world import World

DATA_AXES = ("dp_replicate", "dp_shard")


@dataclass(frozen=True, slots=True)
class Axis:
    """The ranks with this one's coordinates on all other axes.

    Attributes:
        ranks: their global numbers, in the order of the axis.
        position: of this rank among them, its coordinate.
        group: None where this rank is alone, and there is nothing to exchange.
    """

    ranks: tuple[int, ...]
    position: int
    group: dist.ProcessGroup | None

    @property
    def size(self) -> int:
        return len(self.ranks)

    @property
    def is_first(self) -> bool:
        return self.position == 0


class Mesh:
    """Coordinates and groups of this rank; all ranks make it together, and in the same order.

    Attributes:
        pp, cp, tp: the axes of that name.
        data: ranks with the same part of the model and other rows of the batch.
        replicas: ranks with the same part of the model, whose gradients are averaged: `data`, and
            cp, whose ranks see other tokens of the same rows.
        ep: consecutive ranks of `data` over which experts are sharded.
        expert_copies: ranks of `replicas` that hold the same experts.
        shards: the data axes for FSDP2; None where the plan shards nothing.
        expert_shards: `expert_copies` for FSDP2; None where experts are not sharded.
        copy: this rank's position among those with the same shard: under HSDP its coordinate on
            `dp_replicate`, without shards its position in `replicas`.
    """

    def __init__(self, plan: Plan, world: World) -> None:
        self._plan = plan
        self._rank = world.rank
        self._timeout = timedelta(seconds=world.timeout_s)
        self._made: dict[tuple[int, ...], dist.ProcessGroup] = {}
        self._grid = torch.arange(plan.world_size).view([getattr(plan, axis) for axis in AXES])
        self.pp = self._axis("pp")
        self.data = self._axis(*DATA_AXES)
        self.cp = self._axis("cp")
        self.replicas = self._axis(*DATA_AXES, "cp")
        self.tp = self._axis("tp")
        self.ep, self.expert_copies = self._expert_axes()
        self.shards = self._shards(world) if plan.data_parallel.is_sharded else None
        self.expert_shards: DeviceMesh | None = None
        if plan.shards_experts and self.expert_copies.group is not None:
            self.expert_shards = DeviceMesh.from_group(
                self.expert_copies.group, world.device.type, mesh_dim_names=("expert_copies",)
            )
        self.copy = self._place_among_copies()

    @classmethod
    def of_one(cls, world: World) -> Mesh:
        """The mesh of a rank that makes its steps without the others."""
        return cls(Plan(), replace(world, rank=0, size=1))

    @property
    def uneven_groups(self) -> list[dist.ProcessGroup]:
        """Groups whose ranks rightly send different numbers of messages: stages, and replicas whose
        gradients are aggregated by hand."""
        is_by_hand = self._plan.aggregation is not Aggregation.BACKEND
        axes = [self.pp, *([self.replicas] if is_by_hand else [])]
        return [axis.group for axis in axes if axis.group is not None]

    def between_stages(self, positions: Sequence[int]) -> dist.ProcessGroup | None:
        """The group of the ranks at these `positions` on the pp axis, one for every place on the
        other axes; all ranks call it. None if this rank is at none of them."""
        own = None
        for ranks in self._rows("pp"):
            some = tuple(ranks[position] for position in positions)
            group = self._group(some)
            own = group if self._rank in some else own
        return own

    def _axis(self, *axes: str) -> Axis:
        return self._axis_of(self._rows(*axes))

    def _axis_of(self, rows: Iterable[tuple[int, ...]]) -> Axis:
        """The one of `rows` that this rank is in; all ranks make the groups of all of them."""
        own = None
        for ranks in rows:
            group = self._group(ranks) if len(ranks) > 1 else None
            if self._rank in ranks:
                own = Axis(ranks, ranks.index(self._rank), group)
        assert own is not None  # a rank is on every axis
        return own

    def _expert_axes(self) -> tuple[Axis, Axis]:
        ep, cp = self._plan.ep, self._plan.cp
        data = self._rows(*DATA_AXES)
        shared = [row[first : first + ep] for row in data for first in range(0, len(row), ep)]
        # Of the ranks of a row of replicas cp changes fastest, then the place on the ep axis.
        replicas = self._rows(*DATA_AXES, "cp")
        copies = [
            tuple(rank for place, rank in enumerate(row) if place // cp % ep == number)
            for row in replicas
            for number in range(ep)
        ]
        return self._axis_of(shared), self._axis_of(copies)

    def _rows(self, *axes: str) -> list[tuple[int, ...]]:
        """All ranks, grouped by their coordinates off `axes`."""
        inner = [AXES.index(axis) for axis in axes]
        outer = [dim for dim in range(len(AXES)) if dim not in inner]
        length = torch.Size(self._grid.shape[dim] for dim in inner).numel()
        return [
            tuple(row) for row in self._grid.permute(outer + inner).reshape(-1, length).tolist()
        ]

    def _group(self, ranks: tuple[int, ...]) -> dist.ProcessGroup:
        """The group of `ranks`, made once; for all ranks the job's own."""
        if len(ranks) == self._plan.world_size:
            assert dist.group.WORLD is not None
            return dist.group.WORLD
        if ranks not in self._made:
            self._made[ranks] = dist.new_group(list(ranks), timeout=self._timeout)
        return self._made[ranks]

    def _shards(self, world: World) -> DeviceMesh:
        """ZeRO-1 and ZeRO-2 shard over the replicas, so their one axis is `dp_replicate`. HSDP has
        two axes, the shard axis innermost: neighbours in rank order share the fastest links. The
        ranks of cp hold shards as those of the shard axis do."""
        if not dist.is_initialized():
            # One process without a launcher may still shard, to offload: a group of one.
            backend = "gloo" if world.device.type == "cpu" else "cpu:gloo,cuda:nccl"
            dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1)
        kind = self._plan.data_parallel
        names = {
            DataParallel.HYBRID_SHARD: DATA_AXES,
            DataParallel.FULL_SHARD: ("dp_shard",),
        }.get(kind, ("dp_replicate",))
        rows = [(name,) for name in names[:-1]] + [(names[-1], "cp")]
        groups = [self._own_group(self._rows(*axes)) for axes in rows]
        if len(groups) == 1:
            return DeviceMesh.from_group(groups[0], world.device.type, mesh_dim_names=names)
        ranks = torch.tensor(self.replicas.ranks).view(self._plan.dp_replicate, -1)
        return DeviceMesh.from_group(groups, world.device.type, mesh=ranks, mesh_dim_names=names)

    def _own_group(self, rows: Iterable[tuple[int, ...]]) -> dist.ProcessGroup:
        """The group of this rank: FSDP2 needs one, even of one rank."""
        groups = {ranks: self._group(ranks) for ranks in rows}
        return next(group for ranks, group in groups.items() if self._rank in ranks)

    def _place_among_copies(self) -> int:
        if self._plan.data_parallel is DataParallel.HYBRID_SHARD:
            return self.replicas.position // (self._plan.dp_shard * self._plan.cp)
        return 0 if self._plan.data_parallel.is_sharded else self.replicas.position
