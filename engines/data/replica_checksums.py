"""Checksums of replicas: ranks that hold the same parameters must hold the same bits.

A bit that flips in one rank's memory, or code that changes a parameter on one rank, stays unseen
otherwise: gradients are averaged, so that all replicas take the same steps and keep their distance.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from engines.data.replicas import local_part
from engines.runtime.mesh import Mesh
from engines.runtime.world import World, say_holders, sum_over_ranks, texts_of_ranks
from engines.state.layout import Layout
from profiles.errors import InputError, RankMismatchError
from profiles.record.bounds import is_whole

DEFAULT_EVERY = 100
_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


@dataclass(frozen=True, slots=True)
class _Copies:
    """Parameters of which every rank of a group has the same part."""

    group: dist.ProcessGroup
    names: Sequence[str]
    tensors: Sequence[Tensor]


class ReplicaChecksums:
    """Compares the parameters of ranks that hold the same ones.

    Shards that one rank alone holds have nothing to be compared with, and ranks that step at
    different times differ rightly: `mesh` is of one rank there.

    Args:
        experts: names of parameters that the ranks of the ep axis have others of.
        every: steps between two comparisons; 0: never, not before a save either.
    """

    def __init__(
        self,
        module: nn.Module,
        mesh: Mesh,
        layout: Layout,
        world: World,
        *,
        experts: Iterable[str] = (),
        every: int = DEFAULT_EVERY,
    ) -> None:
        self._module = module
        self._mesh = mesh
        self._layout = layout
        self._world = world
        self._experts = frozenset(experts)
        # A mesh axis of one name is on all ranks or on none, so all ranks compare, or none does.
        is_alone = mesh.replicas.size == 1 or world.is_fake
        self._every = 0 if is_alone else every
        self._compared = 0

    def require_equal_when_due(self, step: int) -> None:
        """Compare every so many steps; `step` is the number of those that are over."""
        if self._every and step % self._every == 0 and step != self._compared:
            self.require_equal(step)

    @torch.no_grad()
    def require_equal(self, step: int) -> None:
        """Compare now. All ranks call it, between two steps.

        Raises:
            RankMismatchError: on all ranks, with the first parameter that differs.
        """
        if not self._every:
            return
        self._compared = step
        different = [
            differing
            for copies in self._copies()
            if (differing := _differing(copies, self._world.device))
        ]
        if not sum_over_ranks([float(bool(different))], self._world)[0]:
            return
        texts = texts_of_ranks("checksums", json.dumps(different[:1]), self._world)
        first = {rank: json.loads(text)[0] for rank, text in enumerate(texts) if text != "[]"}
        (name, _, ranks), *_ = first.values()
        sums = {
            rank: f"checksum {text}"
            for rank, (own, text, _) in first.items()
            if rank in ranks and own == name
        }
        raise RankMismatchError(
            f"replicas have come apart: `{name}`: {say_holders(sums)}",
            where=f"after step {step}",
            hints=[
                "load the last checkpoint; a rank that is alone with its checksum had a bit flipped"
                " in its memory, or its code changed the parameter",
                "`check_replicas_every=0` where devices of several kinds round differently",
            ],
        )

    def _copies(self) -> Iterator[_Copies]:
        by_group: dict[dist.ProcessGroup, dict[str, Tensor]] = {}
        for name, parameter in self._module.named_parameters():
            group = self._group(name, parameter) if self._layout.holds(name) else None
            if group is not None:
                by_group.setdefault(group, {})[name] = local_part(parameter)
        for group, tensors in by_group.items():
            yield _Copies(group, list(tensors), list(tensors.values()))

    def _group(self, name: str, parameter: nn.Parameter) -> dist.ProcessGroup | None:
        """The ranks that hold the same part of a parameter; None where this rank alone does."""
        if isinstance(parameter, DTensor):
            mesh = parameter.device_mesh
            return mesh.get_group(0) if mesh.ndim > 1 else None  # HSDP's replicas come first
        return (self._mesh.expert_copies if name in self._experts else self._mesh.replicas).group


def checksums(tensors: Iterable[Tensor], device: torch.device) -> Tensor:
    """The sum of each tensor's bit patterns, modulo 2**64: one bit that flips changes it."""
    return torch.stack([_bit_sum(tensor.detach()).to(device) for tensor in tensors])


def require_every(every: int) -> int:
    """`every`, if it is a number of steps.

    Raises:
        InputError: it is negative, or no whole number.
    """
    if not is_whole(every, least=0):
        raise InputError(
            f"replicas are compared every {every} steps",
            where="check_replicas_every",
            hints=["give a number of steps, 0 for never"],
        )
    return every


def _bit_sum(tensor: Tensor) -> Tensor:
    real = torch.view_as_real(tensor) if tensor.is_complex() else tensor
    return real.view(_INTEGERS[real.element_size()]).sum(dtype=torch.int64)


def _differing(copies: _Copies, device: torch.device) -> tuple[str, str, list[int]] | None:
    """The first parameter that ranks of the group have otherwise, this rank's checksum of it, and
    the ranks; None where all are the same."""
    sums = checksums(copies.tensors, device)
    # Largest and smallest in one message: `~` reverses the order of integers, and cannot overflow.
    extremes = torch.cat([sums, ~sums])
    dist.all_reduce(extremes, op=dist.ReduceOp.MAX, group=copies.group)
    largest, reversed_smallest = extremes.chunk(2)
    differs = (largest != ~reversed_smallest).tolist()
    if True not in differs:
        return None
    place = differs.index(True)
    text = f"{int(sums[place]) % 2**64:016x}"
    return copies.names[place], text, dist.get_process_group_ranks(copies.group)
