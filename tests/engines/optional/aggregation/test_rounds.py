"""The messages of every aggregation, played on a table: who ends with what, and who sends how much.

The oracle is a table of sets: a part of a rank is the set of ranks whose values are in it.
"""

from __future__ import annotations

from collections import Counter
from fractions import Fraction
from itertools import pairwise
from math import ceil, log2

import pytest

from engines.optional.aggregation.rounds import Message, Round, parts, rounds
from engines.plan import Aggregation
from profiles.errors import InputError

KINDS = [kind for kind in Aggregation if kind is not Aggregation.BACKEND]
SIZES = (1, 2, 3, 4, 6, 7, 8, 13, 16)


def played(script: list[Round], ranks: int, pieces: int) -> list[list[frozenset[int]]]:
    """Contents of each part on each rank when all messages have arrived."""
    contents = [[frozenset({rank})] * pieces for rank in range(ranks)]
    for messages in script:
        before = [list(row) for row in contents]
        for message in messages:
            for part in message.parts:
                sent = before[message.source][part]
                if message.adds:
                    assert not contents[message.target][part] & sent, (
                        f"{message} counts a rank twice"
                    )
                    contents[message.target][part] |= sent
                else:
                    contents[message.target][part] = sent
    return contents


def sent_by(script: list[Round], ranks: int, pieces: int) -> tuple[list[Fraction], list[Fraction]]:
    """(sent, received) by each rank, in tensors."""
    sent, got = Counter[int](), Counter[int]()
    for message in (message for messages in script for message in messages):
        sent[message.source] += len(message.parts)
        got[message.target] += len(message.parts)
    return tuple([Fraction(count[r], pieces) for r in range(ranks)] for count in (sent, got))  # type: ignore[return-value]


@pytest.mark.parametrize("ranks", SIZES)
@pytest.mark.parametrize("kind", KINDS)
def test_every_rank_ends_with_the_sum_of_all_ranks(kind: Aggregation, ranks: int) -> None:
    for per_node in range(1, ranks + 1):
        if ranks % per_node:
            continue
        script = list(rounds(kind, ranks, per_node=per_node))
        contents = played(script, ranks, parts(kind, ranks))
        assert all(part == frozenset(range(ranks)) for row in contents for part in row)
        if kind is not Aggregation.HIERARCHICAL:
            break


@pytest.mark.parametrize("ranks", SIZES)
def test_a_ring_sends_the_documented_bytes(ranks: int) -> None:
    """2(n-1) rounds, 2(n-1)/n of the tensor to the next rank alone (Patarasuk and Yuan 2009)."""
    script = list(rounds(Aggregation.RING, ranks))
    assert len(script) == 2 * (ranks - 1)
    sent, got = sent_by(script, ranks, ranks)
    assert {*sent, *got} == {Fraction(2 * (ranks - 1), ranks)}
    assert all(m.target == (m.source + 1) % ranks for messages in script for m in messages)


def test_one_parameter_device_carries_the_traffic_of_all_ranks() -> None:
    """n - 1 tensors come in and as many go out; with a device for each part everyone carries as
    much as in a ring, in two rounds."""
    script = list(rounds(Aggregation.GATHER, 8))
    sent, got = sent_by(script, 8, 1)
    assert (sent[0], got[0]) == (7, 7)
    assert set(sent[1:] + got[1:]) == {1}
    script = list(rounds(Aggregation.GATHER_PARTS, 8))
    assert len(script) == 2
    assert {*sent_by(script, 8, 8)[0]} == {Fraction(14, 8)}


def test_several_parameter_devices_share_the_load() -> None:
    script = list(rounds(Aggregation.GATHER, 8, devices=2))
    assert all(part == frozenset(range(8)) for row in played(script, 8, 2) for part in row)
    sent, _ = sent_by(script, 8, 2)
    assert sent == [4, *[Fraction(1)] * 3, 4, *[Fraction(1)] * 3]


@pytest.mark.parametrize("ranks", SIZES)
def test_reducing_and_broadcasting_takes_twice_the_depth_of_a_binomial_tree(ranks: int) -> None:
    """Thakur, Rabenseifner and Gropp 2005: ceil(log2 n) rounds each way."""
    script = list(rounds(Aggregation.REDUCE_BROADCAST, ranks))
    assert len(script) == 2 * ceil(log2(ranks))


def test_a_tree_loads_all_ranks_alike_and_a_level_costs_two_rounds() -> None:
    """Each rank is inside one tree at the most, so that none sends more than twice the tensor."""
    for ranks in SIZES[1:]:
        sent, got = sent_by(list(rounds(Aggregation.TREE, ranks)), ranks, 8)
        assert max(*sent, *got) <= 2
        assert sum(sent) == 2 * (ranks - 1)  # up and down every edge
    count = [len(list(rounds(Aggregation.TREE, 2**depth))) for depth in range(2, 7)]
    assert [b - a for a, b in pairwise(count)] == [2] * 4


@pytest.mark.parametrize(("nodes", "per_node"), [(2, 2), (2, 4), (3, 4), (4, 2)])
def test_between_nodes_a_hierarchy_sends_what_a_ring_of_nodes_would(
    nodes: int, per_node: int
) -> None:
    """2(N-1)/N of the tensor leaves a node, with a flat ring 2(n-1)/n of it."""
    ranks = nodes * per_node

    def leaves(kind: Aggregation) -> set[Fraction]:
        count = Counter[int]()
        for messages in rounds(kind, ranks, per_node=per_node):
            for m in messages:
                if m.source // per_node != m.target // per_node:
                    count[m.source // per_node] += len(m.parts)
        return {Fraction(each, ranks) for each in count.values()}

    assert leaves(Aggregation.HIERARCHICAL) == {Fraction(2 * (nodes - 1), nodes)}
    assert leaves(Aggregation.RING) == {Fraction(2 * (ranks - 1), ranks)}


def test_a_message_reads_as_a_sentence() -> None:
    assert str(Message(0, 1, range(2, 4), True)) == "0 -> 1: parts 2-3, added"
    assert str(Message(3, 0, range(1), False)) == "3 -> 0: part 0"


def test_impossible_groups_are_refused_with_the_numbers() -> None:
    with pytest.raises(InputError, match="6 ranks are no whole number of nodes of 4: 6 % 4 = 2"):
        rounds(Aggregation.HIERARCHICAL, 6, per_node=4)
    with pytest.raises(InputError, match="5 parameter devices among 4 ranks: give 1 to 4"):
        rounds(Aggregation.GATHER, 4, devices=5)
    with pytest.raises(InputError, match="the backend sums up is its own affair"):
        rounds(Aggregation.BACKEND, 4)
