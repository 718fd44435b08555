"""Iterators in the place of others: what they yield, and that the others stay where they are."""

from __future__ import annotations

import itertools
import sys
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from profiles.capture.fakes.iterators import is_iterator, iterator_like, place_of

MAKERS: dict[str, Callable[[], Iterator[Any]]] = {
    "list": lambda: iter([1, 2, 3, 4, 5, 6, 7]),
    "mapping": lambda: iter(dict.fromkeys("abcdefg")),
    "range": lambda: iter(range(9)),
    "enumerate": lambda: enumerate("abcdefg"),
    "zip": lambda: zip(range(9), "abcdefg", strict=False),
    "map": lambda: map(str, range(9)),
}
OF_ITERTOOLS: dict[str, Callable[[], Iterator[Any]]] = {
    "count": lambda: itertools.count(3, 2),
    "cycle": lambda: itertools.cycle([1, 2, 3]),
    "chain": lambda: itertools.chain([1, 2, 3], [4, 5, 6]),
    "islice": lambda: itertools.islice(itertools.count(), 7),
    "map of a count": lambda: map(str, itertools.count()),
}
if sys.version_info < (3, 14):
    MAKERS |= OF_ITERTOOLS


def _taken(iterator: Iterator[Any], number: int) -> list[Any]:
    return list(itertools.islice(iterator, number))


@pytest.mark.parametrize("name", MAKERS)
@pytest.mark.parametrize("taken", [0, 2, 4])
def test_another_one_goes_on_from_the_same_place_and_leaves_the_first_there(
    name: str, taken: int
) -> None:
    first, whole = MAKERS[name](), _taken(MAKERS[name](), taken + 2)
    _taken(first, taken)
    place = place_of(first)
    assert _taken(iterator_like(first), 2) == whole[taken:]
    assert place_of(first) == place
    assert _taken(first, 2) == whole[taken:]
    assert place_of(first) != place


def test_a_generator_has_a_place_and_no_other() -> None:
    def counted() -> Iterator[int]:
        yield from itertools.count(1000)

    generator = counted()
    places = [place_of(generator)]
    for _ in range(2):
        next(generator)
        places.append(place_of(generator))
    assert len(set(places)) == 3
    assert place_of(generator) == places[-1]
    assert iterator_like(generator) is generator
    generator.close()  # type: ignore[attr-defined]
    assert place_of(generator) not in places


def test_what_is_no_iterator_of_python_is_none() -> None:
    assert not any(map(is_iterator, ([1], range(3), "abc", open, None)))
