"""Pareto front of plans in step time, memory and cost.

Over the same devices the fastest plan is the cheapest; cost matters if plans use fewer devices.
"""

from __future__ import annotations

from collections.abc import Sequence
from heapq import heappop, heappush

import numpy as np
from pydantic import NonNegativeFloat

from advisor.cost import CostModel
from advisor.decide.candidates import searched
from advisor.decide.comparison import short_cuts, title
from advisor.inputs.facts import Facts
from advisor.inputs.policy import Policy
from advisor.inputs.resize import on
from advisor.search.cache import SearchCache
from advisor.search.columns import ROUNDING
from advisor.search.ranking import Candidate, simplicity
from advisor.search.search import Search
from engines.plan import PartialPlan, Plan
from profiles.record import Record
from profiles.units import format_gib, format_seconds

HOUR_S = 3600.0


class ParetoPoint(Record):
    """A plan on the front.

    Attributes:
        step_s, peak_high_bytes: of its estimate; memory is the upper end, as for fitting.
        device_seconds: of one step: devices x time.
        money: of one step, where the price of a device-hour is known.
        because: what it is best in, with numbers.
    """

    title: str
    plan: Plan
    step_s: float
    peak_high_bytes: float
    device_seconds: float
    money: NonNegativeFloat | None = None
    because: str


def front(
    candidates: Sequence[Candidate], *, price_per_device_hour: float | None = None
) -> tuple[ParetoPoint, ...]:
    """The candidates that fit and that no other one dominates, fastest first.

    One plan dominates another that is no better in step time, memory or device-seconds, and worse
    in one of them. Money is device-seconds at one price, so it adds no dimension. Of plans that are
    equal in all three the simplest is kept.

    >>> front([])
    ()
    """
    # In this order nothing that comes later dominates what came before, but for exact equals, of
    # which the simplest is first.
    ordered = sorted(
        (c for c in candidates if c.fits),
        key=lambda c: (*_goods(c), simplicity(c.plan), str(c.plan)),
    )
    undominated: list[Candidate] = []
    for candidate in ordered:
        mine = _goods(candidate)
        if not any(_at_least_as_good(_goods(other), mine) for other in undominated):
            undominated.append(candidate)
    return tuple(
        _point(candidate, before, price_per_device_hour)
        for candidate, before in zip(undominated, [None, *undominated], strict=False)
    )


def front_of(
    facts: Facts,
    *,
    policy: Policy,
    partial: PartialPlan,
    devices: Sequence[int] = (),
    price_per_device_hour: float | None = None,
) -> tuple[ParetoPoint, ...]:
    """The front of all plans that keep `partial`, on all devices and on smaller numbers of them.

    The global batch stays, so that every step does the same work; numbers of devices that allow no
    plan for it are left out.
    """
    candidates: list[Candidate] = []
    for count in dict.fromkeys((facts.cluster.world_size, *devices)):
        part = on(facts, count)
        candidates += _undominated(searched(SearchCache(CostModel(part)), partial, policy))
    return front(candidates, price_per_device_hour=price_per_device_hour)


def _undominated(search: Search) -> list[Candidate]:
    """Return plans over the same devices that may be on the front.

    A row is not estimated if an estimated plan dominates its lower bounds: those of all rows first,
    then with the row's best stage borders.
    """
    step_s = search.bounds.step_s * (1 - ROUNDING)
    peak_bytes = search.bounds.peak_high_bytes * (1 - ROUNDING)
    open_rows = search.may_fit
    estimated: list[Candidate] = []

    def is_open(seconds: float, nbytes: float) -> bool:
        return all(
            seconds < c.estimate.step_s or nbytes < c.estimate.peak_high_bytes for c in estimated
        )

    # Rows in the queue have the bounds of their own borders.
    waiting: list[tuple[float, float, int]] = []
    order = np.flatnonzero(open_rows)
    for place in [*order[np.argsort(step_s[order], kind="stable")].tolist(), None]:
        while waiting and (place is None or waiting[0][0] <= step_s[place]):
            seconds, nbytes, index = heappop(waiting)
            if not is_open(seconds, nbytes):
                continue
            candidate = search.candidate(index)
            if candidate is not None and candidate.fits:
                estimated.append(candidate)
                mine = candidate.estimate
                open_rows &= (step_s < mine.step_s) | (peak_bytes < mine.peak_high_bytes)
        if place is not None and open_rows[place]:
            seconds, nbytes = search.with_borders(place)
            if nbytes <= search.usable_bytes and is_open(seconds, nbytes):
                heappush(waiting, (seconds, nbytes, place))
    return estimated


Goods = tuple[float, float, float]


def _goods(candidate: Candidate) -> Goods:
    estimate = candidate.estimate
    return estimate.step_s, estimate.peak_high_bytes, _device_seconds(candidate)


def _device_seconds(candidate: Candidate) -> float:
    return candidate.estimate.step_s * candidate.plan.world_size


def _at_least_as_good(one: Goods, other: Goods) -> bool:
    return all(mine <= theirs for mine, theirs in zip(one, other, strict=True))


def _point(candidate: Candidate, faster: Candidate | None, price: float | None) -> ParetoPoint:
    plan, estimate = candidate.plan, candidate.estimate
    device_s = _device_seconds(candidate)
    return ParetoPoint(
        title=title(plan),
        plan=plan,
        step_s=estimate.step_s,
        peak_high_bytes=estimate.peak_high_bytes,
        device_seconds=device_s,
        money=None if price is None else price * device_s / HOUR_S,
        because=_because(candidate, faster),
    )


def _because(candidate: Candidate, faster: Candidate | None) -> str:
    """Advantage and drawback of the plan relative to its next faster neighbor on the front.

    It has an advantage, or that neighbor would dominate it.
    """
    mine = candidate.estimate
    if faster is None:
        return f"the fastest: {format_seconds(mine.step_s)} a step"
    memory = mine.peak_high_bytes - faster.estimate.peak_high_bytes
    cost = _device_seconds(candidate) - _device_seconds(faster)
    changes = {
        f"{format_gib(abs(memory))} {{}} memory": memory,
        f"{format_seconds(abs(cost))} {{}} device-time": cost,
    }
    gains = [words.format("less") for words, change in changes.items() if change < 0]
    losses = [words.format("more") for words, change in changes.items() if change > 0]
    losses.insert(0, f"{format_seconds(mine.step_s - faster.estimate.step_s)} more a step")
    name = title(faster.plan)
    if name == title(candidate.plan):
        name = f"with {short_cuts(faster.plan)}"
    return f"{' and '.join(gains)} than {name}, for {' and '.join(losses)}"
