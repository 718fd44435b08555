"""Partition of tensors over servers. No torch here."""

from __future__ import annotations

from collections.abc import Sequence


def partition(sizes: Sequence[int], parts: int) -> list[list[int]]:
    """Numbers of the tensors of each part, ascending; parts of nearly equal bytes.

    The largest first, each to the part that has least so far: the fullest part has at most 4/3 of
    what it has in the best partition (Graham 1969, "Bounds on multiprocessing timing anomalies").
    Tensors stay whole, so that any optimizer steps them as it would elsewhere.

    >>> partition([10, 30, 20, 40], 2)
    [[0, 3], [1, 2]]
    """
    shares: list[list[int]] = [[] for _ in range(parts)]
    filled = [0] * parts
    for number in sorted(range(len(sizes)), key=lambda n: (-sizes[n], n)):
        least = filled.index(min(filled))
        shares[least].append(number)
        filled[least] += sizes[number]
    return [sorted(part) for part in shares]
