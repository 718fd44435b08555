"""Activations and work of a microbatch, unit by unit: the same in every way of data parallelism."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from advisor.cost.load.loads import Loads
from advisor.cost.load.unit_load import UnitLoad
from engines.plan import Recompute


class MicrobatchTimeline(NamedTuple):
    """Bytes of each entry of some loads, in call order.

    Attributes:
        saved: from its forward to its backward, on the device; of one unit.
        before: saved by the entries before it, when its forward runs.
        live: saved by it and those before it, when its backward runs.
        forward, backward: while it runs, besides saved ones.
        after, following: the entries that are fetched while its forward and its backward run.
    """

    saved: Sequence[float]
    before: Sequence[float]
    live: Sequence[float]
    forward: Sequence[float]
    backward: Sequence[float]
    after: Sequence[int]
    following: Sequence[int]


def timeline_of(loads: Loads, recompute: Recompute, *, away: bool = False) -> MicrobatchTimeline:
    """Timeline of the units of `loads`; `away` if activations of blocks are offloaded."""
    units = loads.entries
    is_away = [unit.is_block and away for unit in units]
    saved = [
        0.0 if left else saved_bytes(unit, recompute)
        for unit, left in zip(units, is_away, strict=True)
    ]
    of_entries = [mine * unit.count for mine, unit in zip(saved, units, strict=True)]
    before, so_far = [], 0.0
    for mine in of_entries:
        before.append(so_far)
        so_far += mine
    live, left_over = [], sum(of_entries)
    for mine in reversed(of_entries):
        live.append(left_over)
        left_over -= mine
    return MicrobatchTimeline(
        saved=saved,
        before=before,
        live=live[::-1],
        forward=[unit.input_bytes + unit.forward_transient_bytes for unit in units],
        backward=[
            backward_work(unit, recompute, mine, is_reloaded=left)
            for unit, mine, left in zip(units, saved, is_away, strict=True)
        ],
        after=next_separate(units, backward=False),
        following=next_separate(units, backward=True),
    )


def saved_bytes(unit: UnitLoad, recompute: Recompute) -> float:
    """Bytes saved from a unit's forward to its backward."""
    if not unit.runs_again(recompute):
        return unit.activation_bytes
    return unit.input_bytes if recompute is Recompute.FULL else unit.selective_bytes


def backward_work(
    unit: UnitLoad, recompute: Recompute, saved: float, *, is_reloaded: bool = False
) -> float:
    """Bytes of a unit's backward in addition to its `saved` ones: the incoming gradient,
    temporaries, and activations that are recomputed or reloaded.

    A recomputed block has all its activations while its backward runs. Offloaded ones are reloaded
    operation by operation: at most all of them.
    """
    runs_again = unit.runs_again(recompute)
    again = max(0.0, unit.activation_bytes - saved) if runs_again or is_reloaded else 0.0
    work = again + unit.backward_transient_bytes
    return unit.output_bytes + (max(work, unit.forward_transient_bytes) if runs_again else work)


def next_separate(units: Sequence[UnitLoad], *, backward: bool) -> list[int]:
    """For each entry, the index of the one prefetched during it; -1 for none."""
    order = range(len(units))
    following, upcoming = [-1] * len(units), -1
    for i in order if backward else reversed(order):
        following[i] = upcoming
        if units[i].is_separate:
            upcoming = i
    return following
