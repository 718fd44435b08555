"""Messages of an all-reduce, round by round, until every rank has the sum. No torch here.

A tensor is cut into equal parts. The messages of a round go at once; the next round begins when
they have arrived. A ring of three ranks, whose reduce-scatter is rounds 1 and 2:

>>> for messages in rounds(Aggregation.RING, 3):
...     print("; ".join(map(str, messages)))
0 -> 1: part 0, added; 1 -> 2: part 1, added; 2 -> 0: part 2, added
0 -> 1: part 2, added; 1 -> 2: part 0, added; 2 -> 0: part 1, added
0 -> 1: part 1; 1 -> 2: part 2; 2 -> 0: part 0
0 -> 1: part 0; 1 -> 2: part 1; 2 -> 0: part 2

A part is summed up in one place and then sent on, so that all ranks hold the same bits; only under
ALL_TO_ALL every rank sums for itself, and all of them in the order of the ranks.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import chain
from math import ceil, log2

from engines.plan import Aggregation
from profiles.errors import InputError

# Pieces that are on their way in a tree at once. More of them fill its levels better and cost a
# round each: with 4 two thirds of the rounds of 16 ranks are full. Chosen, not tuned.
TREE_PIECES = 4


@dataclass(frozen=True, slots=True)
class Message:
    """`source` sends these parts to `target`, who adds them to its own, or takes them for its own.

    Ranks are places in the group, from 0.
    """

    source: int
    target: int
    parts: range
    adds: bool

    def __str__(self) -> str:
        first, last = self.parts[0], self.parts[-1]
        parts = f"part {first}" if first == last else f"parts {first}-{last}"
        return f"{self.source} -> {self.target}: {parts}{', added' if self.adds else ''}"


Round = tuple[Message, ...]


def parts(kind: Aggregation, ranks: int, *, devices: int = 1) -> int:
    """Into how many equal parts a tensor is cut; see `rounds`."""
    match kind:
        case Aggregation.GATHER:
            return devices
        case Aggregation.TREE:
            return 2 * TREE_PIECES
        case Aggregation.GATHER_PARTS | Aggregation.RING | Aggregation.HIERARCHICAL:
            return ranks
    return 1


def rounds(
    kind: Aggregation, ranks: int, *, per_node: int = 1, devices: int = 1
) -> Iterator[Round]:
    """The messages of an aggregation over `ranks` ranks.

    Args:
        per_node: for HIERARCHICAL: so many ranks after one another share a node.
        devices: for GATHER: parameter devices, evenly spread over the ranks, an equal part on each.

    Raises:
        InputError: nodes that do not divide the ranks; more parameter devices than ranks; BACKEND,
            whose messages are the backend's own.
    """
    if ranks % per_node:
        raise InputError(
            f"{ranks} ranks are no whole number of nodes of {per_node}: {ranks} % {per_node} ="
            f" {ranks % per_node}"
        )
    if not 1 <= devices <= ranks:
        raise InputError(f"{devices} parameter devices among {ranks} ranks: give 1 to {ranks}")
    match kind:
        case Aggregation.BACKEND:
            raise InputError(
                "how the backend sums up is its own affair: there are no rounds to see",
                hints=["take `ring`, which NCCL and gloo are built on"],
            )
        case Aggregation.GATHER:
            return _gather(ranks, devices)
        case Aggregation.GATHER_PARTS:
            return _gather(ranks, ranks)
        case Aggregation.REDUCE_BROADCAST:
            return _reduce_broadcast(ranks)
        case Aggregation.ALL_TO_ALL:
            return _all_to_all(ranks)
        case Aggregation.RING:
            return _ring(ranks)
        case Aggregation.TREE:
            return _tree(ranks)
        case Aggregation.HIERARCHICAL:
            return _hierarchical(ranks, per_node)


def _gather(ranks: int, devices: int) -> Iterator[Round]:
    """To the parameter devices, and back from them."""
    homes = [part * ranks // devices for part in range(devices)]
    ways = [(home, other, part) for part, home in enumerate(homes) for other in range(ranks)]
    ways = [(home, other, part) for home, other, part in ways if home != other]
    if ways:
        yield tuple(Message(other, home, _only(part), True) for home, other, part in ways)
        yield tuple(Message(home, other, _only(part), False) for home, other, part in ways)


def _reduce_broadcast(ranks: int) -> Iterator[Round]:
    """Pairs, pairs of pairs, ...: a binomial tree up to rank 0, and down again."""
    distances = [2**level for level in range(ceil(log2(ranks)))]
    pairs = [[(low, low + d) for low in range(0, ranks - d, 2 * d)] for d in distances]
    for level in pairs:
        yield tuple(Message(high, low, range(1), True) for low, high in level)
    for level in reversed(pairs):
        yield tuple(Message(low, high, range(1), False) for low, high in level)


def _all_to_all(ranks: int) -> Iterator[Round]:
    everyone = range(ranks)
    if ranks > 1:
        yield tuple(Message(i, j, range(1), True) for i in everyone for j in everyone if i != j)


def _ring(ranks: int) -> Iterator[Round]:
    own = [_only(part) for part in range(ranks)]
    return chain(_reduce_scatter(range(ranks), own), _all_gather(range(ranks), own))


def _reduce_scatter(ring: Sequence[int], owned: Sequence[range]) -> Iterator[Round]:
    """Neighbours of a ring: after it, place i has the sum of the parts `owned[i + 1]`."""
    size = len(ring)
    for step in range(size - 1):
        yield tuple(
            Message(ring[i], ring[(i + 1) % size], owned[(i - step) % size], True)
            for i in range(size)
        )


def _all_gather(ring: Sequence[int], owned: Sequence[range]) -> Iterator[Round]:
    """The sums that `_reduce_scatter` left go around."""
    size = len(ring)
    for step in range(size - 1):
        yield tuple(
            Message(ring[i], ring[(i + 1) % size], owned[(i + 1 - step) % size], False)
            for i in range(size)
        )


def _tree(ranks: int) -> Iterator[Round]:
    """Two binary trees, the second with the ranks in reverse, so that who has children in the one
    is a leaf of the other and sends about as much as everyone (Sanders, Speck and Träff 2009; NCCL
    since 2.4). A piece goes up level by level and down again while the next ones follow."""
    if ranks < 2:
        return
    depths = [(rank + 1).bit_length() - 1 for rank in range(ranks)]
    deepest = depths[-1]
    children = range(1, ranks)
    for moment in range(2 * deepest + TREE_PIECES - 1):
        messages = []
        for half in range(2):
            names = range(ranks) if half == 0 else range(ranks - 1, -1, -1)
            for child in children:
                low, high = names[(child - 1) // 2], names[child]
                up = moment - (deepest - depths[child])
                down = moment - deepest - depths[child] + 1
                if 0 <= up < TREE_PIECES:
                    messages.append(Message(high, low, _only(half * TREE_PIECES + up), True))
                if 0 <= down < TREE_PIECES:
                    messages.append(Message(low, high, _only(half * TREE_PIECES + down), False))
        yield tuple(messages)


def _hierarchical(ranks: int, per_node: int) -> Iterator[Round]:
    """Each rank of a node gets the node's sum of a part, sums it up with those who have it in the
    other nodes, and hands it to its neighbours: between nodes every part travels once, not as often
    as a node has ranks."""
    nodes = ranks // per_node
    wide = [range(i * nodes, (i + 1) * nodes) for i in range(per_node)]
    inside = [range(node * per_node, (node + 1) * per_node) for node in range(nodes)]
    yield from _at_once(_reduce_scatter(ring, wide) for ring in inside)

    def between(place: int) -> Iterator[Round]:
        narrow = [_only(part) for part in wide[(place + 1) % per_node]]
        ring = range(place, ranks, per_node)
        return chain(_reduce_scatter(ring, narrow), _all_gather(ring, narrow))

    yield from _at_once(between(place) for place in range(per_node))
    yield from _at_once(_all_gather(ring, wide) for ring in inside)


def _at_once(several: Iterator[Iterator[Round]]) -> Iterator[Round]:
    """Equally many rounds of different ranks, at the same time."""
    for rounds in zip(*several, strict=True):
        yield tuple(chain.from_iterable(rounds))


def _only(part: int) -> range:
    return range(part, part + 1)
