"""The mesh axes that a bench times: which ranks talk to each other, and all at once.

Ranks of a mesh count row by row, so the groups of one of its axes are `size` ranks, `stride` ranks
apart, and `size * stride` divides the number of ranks.
"""

from __future__ import annotations

from dataclasses import dataclass

# Making a group is a round of all ranks through the store: 5 ms with four ranks. 256 of them, a
# second or two, are enough for every axis of 64 ranks.
MOST_GROUPS = 256


@dataclass(frozen=True, slots=True, order=True)
class BenchAxis:
    """Groups of `size` ranks, `stride` ranks apart."""

    size: int
    stride: int

    def __str__(self) -> str:
        suffix = f", {self.stride} apart" if self.stride > 1 else ""
        return f"groups of {self.size} ranks{suffix}"

    def groups(self, world: int) -> list[list[int]]:
        """The ranks of each group; every rank is in exactly one.

        >>> BenchAxis(2, 2).groups(4)
        [[0, 2], [1, 3]]
        """
        block = self.size * self.stride
        return [
            list(range(start + offset, start + block, self.stride))
            for start in range(0, world, block)
            for offset in range(self.stride)
        ]


def tier_axes(*, num_nodes: int, devices_per_node: int) -> list[BenchAxis]:
    """The axes that stand for the tiers: all ranks of a node; one rank of every node."""
    axes = []
    if devices_per_node > 1:
        axes.append(BenchAxis(devices_per_node, 1))
    if num_nodes > 1:
        axes.append(BenchAxis(num_nodes, devices_per_node))
    return axes


def mesh_axes(*, num_nodes: int, devices_per_node: int) -> list[BenchAxis]:
    """The axes of every mesh of one or two axes, those that matter most first.

    First the tiers and the whole world, then the rest by size; as many as `MOST_GROUPS` allows,
    but always the tiers and the world. The middle axis of a mesh of three is not among them.

    >>> mesh_axes(num_nodes=2, devices_per_node=2)
    [BenchAxis(size=2, stride=1), BenchAxis(size=2, stride=2), BenchAxis(size=4, stride=1)]
    """
    world = num_nodes * devices_per_node
    if world == 1:
        return []
    needed = [
        *tier_axes(num_nodes=num_nodes, devices_per_node=devices_per_node),
        BenchAxis(world, 1),
    ]
    inner = [degree for degree in range(2, world) if world % degree == 0]
    others = [BenchAxis(degree, 1) for degree in inner] + [BenchAxis(world // d, d) for d in inner]
    axes = list(dict.fromkeys(needed))
    groups = sum(world // axis.size for axis in axes)
    for axis in sorted(set(others) - set(axes), reverse=True):
        groups += world // axis.size
        if groups > MOST_GROUPS:
            break
        axes.append(axis)
    return axes
