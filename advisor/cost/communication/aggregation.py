"""Time to sum a tensor over ranks, by `engines.optional.aggregation.rounds`.

Of S bytes over n ranks, k of them on each of N nodes, whose link has latency a and b seconds a
byte, in one direction (all links send and receive at once):

    gather, one parameter device    2 (a + (n-1) S b)                      its link carries all
    gather_parts                    2 (a + (n-1)/n S b)
    reduce_broadcast                2 ceil(log2 n) (a + S b)               Thakur et al. 2005
    all_to_all                      a + (n-1) S b
    ring                            2 (n-1) (a + S/n b)                    Patarasuk and Yuan 2009
    tree                            every piece up and down, one after another (Sanders et al. 2009)
    hierarchical                    2 (k-1) (a + S/k b) inside, 2 (N-1) (a + S/(k N) b) between

A ring sends 2 (n-1)/n of the tensor, the minimum on equal links, at the price of latencies. On
several nodes a round takes as long as the slower of two: the busiest device's exchange inside its
node, and the busiest node's through its network cards. Additions are not charged: they move 3 bytes
of memory per byte received.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache
from itertools import groupby

from advisor.cost.ledger import Ledger
from engines.optional.aggregation.rounds import Round, parts, rounds
from engines.plan import Aggregation
from profiles.machine.cluster import ClusterProfile, Collective

# Error of latency + bytes / bandwidth, and if links carry several concurrent messages in each
# direction, whose flows interfere. Calibrated: gloo over 100 Mbit/s, two to four ranks (`python -m
# tests.benchmarks.aggregation`).
ONE_BY_ONE_ERROR, CROSSING_ERROR = 0.25, 0.4
_CROSSING = (Aggregation.ALL_TO_ALL, Aggregation.GATHER_PARTS)


@dataclass(frozen=True, slots=True)
class Load:
    """Demand of a round on a link: a share of the tensor, sent in groups of `size` ranks with this
    stride within the aggregating group."""

    share: float
    size: int
    stride: int = 1


@dataclass(frozen=True, slots=True)
class EqualRounds:
    """Equal rounds in sequence; each takes as long as its slowest load."""

    rounds: int
    loads: tuple[Load, ...]


@dataclass(frozen=True, slots=True)
class Price:
    """Cost of an aggregation on a given cluster.

    Attributes:
        seconds: from first to last message; `relative_error` is half of the range.
        link_bytes: over the busiest link, in both directions.
        buffer_bytes: of the rank that receives most at once, without the tensor.
    """

    seconds: float
    link_bytes: float
    buffer_bytes: float
    relative_error: float = ONE_BY_ONE_ERROR


def price(
    kind: Aggregation,
    payload_bytes: float,
    cluster: ClusterProfile,
    *,
    group_size: int,
    stride: int = 1,
    devices: int = 1,
) -> Price:
    """Cost of summing `payload_bytes` over groups of `group_size` ranks with a stride of `stride`.

    Args:
        devices: parameter devices of GATHER.
    """
    if group_size < 2:
        return Price(0.0, 0.0, 0.0)
    ledger = Ledger(cluster, {})
    if kind is Aggregation.BACKEND:
        reduced = Collective.ALL_REDUCE
        bus_bytes = reduced.bus_factor(group_size) * payload_bytes
        seconds = ledger.seconds(reduced, payload_bytes, group_size, stride)
        return Price(seconds, bus_bytes, 0.0)
    per_node = cluster.ranks_per_node(group_size, stride)
    seconds = link_bytes = 0.0
    for step in steps(kind, group_size, per_node=per_node, devices=devices):
        one, load = slowest(step, payload_bytes, ledger, stride=stride)
        seconds += step.rounds * one
        link_bytes += step.rounds * load.share * payload_bytes
    share = buffer_share(kind, group_size, per_node=per_node, devices=devices)
    error = CROSSING_ERROR if kind in _CROSSING and group_size > 2 else ONE_BY_ONE_ERROR
    return Price(seconds, link_bytes, share * payload_bytes, error)


def slowest(
    step: EqualRounds, payload_bytes: float, ledger: Ledger, *, stride: int = 1
) -> tuple[float, Load]:
    """Seconds of one round, and its slowest load."""
    timed = [
        (
            ledger.seconds(
                Collective.SEND_RECV, load.share * payload_bytes, load.size, load.stride * stride
            ),
            load,
        )
        for load in step.loads
    ]
    return max(timed, key=lambda timing: timing[0])


@lru_cache(maxsize=256)
def steps(
    kind: Aggregation, ranks: int, *, per_node: int, devices: int = 1
) -> tuple[EqualRounds, ...]:
    """Rounds of an aggregation over several ranks, `per_node` of them on each node."""
    n, k = ranks, per_node
    nodes = n // k
    match kind:
        case Aggregation.GATHER | Aggregation.GATHER_PARTS:
            homes = n if kind is Aggregation.GATHER_PARTS else devices
            here = -(-homes // nodes)  # parameter devices on one node
            return (EqualRounds(2, _both((k - 1) / homes, here * (n - k) / homes, n, k)),)
        case Aggregation.ALL_TO_ALL:
            return (EqualRounds(1, _both(k - 1, k * (n - k), n, k)),)
        case Aggregation.RING:
            return (EqualRounds(2 * (n - 1), (Load(1 / n, n),)),)
        case Aggregation.HIERARCHICAL:
            inside = EqualRounds(2 * (k - 1), (Load(1 / k, k),))
            between = EqualRounds(2 * (nodes - 1), (Load(1 / n, nodes, k),))
            return tuple(step for step in (inside, between) if step.rounds)
    return tuple(_walked(kind, n, k))


def _both(inside: float, between: float, ranks: int, per_node: int) -> tuple[Load, ...]:
    """Loads inside nodes and between them, if present."""
    loads = []
    if per_node > 1:
        loads.append(Load(inside, per_node))
    if ranks > per_node:
        loads.append(Load(between, ranks))
    return tuple(loads)


def _walked(kind: Aggregation, ranks: int, per_node: int) -> Iterator[EqualRounds]:
    """Count messages, since trees map to nodes irregularly."""
    pieces = parts(kind, ranks)
    busiest = (_busiest(messages, per_node) for messages in rounds(kind, ranks, per_node=1))
    for (inside, between), same in groupby(busiest):
        shares = inside / pieces, between / pieces
        loads = _both(*shares, ranks, per_node)
        yield EqualRounds(sum(1 for _ in same), loads)


def _busiest(messages: Round, per_node: int) -> tuple[int, int]:
    """(parts of the busiest device inside its node, of the busiest node), in one direction."""
    inside, between = Counter[tuple[int, bool]](), Counter[tuple[int, bool]]()
    for message in messages:
        home, away = message.source // per_node, message.target // per_node
        ends = (message.source, message.target) if home == away else (home, away)
        count = inside if home == away else between
        count[ends[0], True] += len(message.parts)
        count[ends[1], False] += len(message.parts)
    return max(inside.values(), default=0), max(between.values(), default=0)


def buffer_share(kind: Aggregation, ranks: int, *, per_node: int, devices: int = 1) -> float:
    """Buffer for incoming messages at the rank that receives most at once, as a share of the
    tensor."""
    match kind:
        case Aggregation.BACKEND:
            return 0.0
        case Aggregation.GATHER:
            return (ranks - 1) / devices
        case Aggregation.GATHER_PARTS:
            return (ranks - 1) / ranks
        case Aggregation.ALL_TO_ALL:
            return ranks - 1
        case Aggregation.RING:
            return 1 / ranks
        case Aggregation.TREE:
            return min(2, ranks - 1) / parts(kind, ranks)  # from two children
        case Aggregation.HIERARCHICAL:
            return 1 / per_node
        case Aggregation.REDUCE_BROADCAST:
            return 1.0
