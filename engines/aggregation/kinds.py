"""How gradients are summed up, and what is sent of them: settings of plans."""

from __future__ import annotations

from enum import StrEnum


class Aggregation(StrEnum):
    """How DDP sums up gradients over replicas; `engines.aggregation.rounds` has the messages."""

    BACKEND = "backend"  # one all-reduce of NCCL or gloo
    GATHER = "gather"  # all to one parameter device, and back
    GATHER_PARTS = "gather_parts"  # the same with every rank the parameter device of a part
    REDUCE_BROADCAST = "reduce_broadcast"  # halving the ranks that still have something to give
    ALL_TO_ALL = "all_to_all"  # everyone sends everything to everyone
    RING = "ring"  # reduce-scatter, then all-gather, between neighbours
    TREE = "tree"  # two binary trees, half of the gradients up and down each, in pieces
    HIERARCHICAL = "hierarchical"  # rings inside nodes, then between, then inside again


class Compression(StrEnum):
    """What DDP sends of a gradient."""

    NONE = "none"
    BF16 = "bf16"  # rounded to 8 significant bits, and summed up so: 2^-8 of a value each time
    POWERSGD = "powersgd"  # factors of low rank; what they miss is added to the next gradient
