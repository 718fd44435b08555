"""Kind of device that finishes a run before a deadline for the least money."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence

from advisor.decide.decide import decide
from advisor.inputs.facts import Facts
from advisor.inputs.policy import Objective, Policy
from advisor.inputs.resize import (
    MOST_DEVICES,
    counts,
    devices_in_words,
    next_multiple,
    resized,
)
from advisor.whatif.pareto import HOUR_S
from advisor.whatif.sizing.budget import Budget, budget, samples_of
from engines.plan import PartialPlan
from profiles.errors import InputError
from profiles.machine.cluster import ClusterProfile
from profiles.provenance import Quantity
from profiles.record import Record

_DEFAULT = Policy()
_ALL_OPEN = PartialPlan()


class Offer(Record):
    """One kind of device: the number of them that is in time for least, or why none is.

    Attributes:
        device: its name.
        devices: how many; None where no number is in time.
        budget: time, energy and money of it.
        because: in words, with the number that fails.
    """

    device: str
    devices: int | None = None
    budget: Budget | None = None
    because: str

    def __str__(self) -> str:
        costs = f" ({self.budget})" if self.budget else ""
        return f"{self.device}: {self.because}{costs}"


class Cheapest(Record):
    """Offers: those with a price first, cheapest first; then by device-hours; then those too slow.

    `best` is None where none is in time, or where several are and some have no price.
    """

    deadline_s: float
    offers: tuple[Offer, ...]
    best: str | None
    because: str

    def __str__(self) -> str:
        return "\n".join(
            [
                f"{self.best or 'undecided'}: {self.because}",
                *(f"  {offer}" for offer in self.offers),
            ]
        )


def cheapest_device(
    facts: Facts,
    clusters: Sequence[ClusterProfile],
    *,
    deadline_s: float,
    tokens: float | None = None,
    samples: float | None = None,
    prices: Mapping[str, Quantity] | None = None,
    watts: Mapping[str, Quantity] | None = None,
    policy: Policy = _DEFAULT,
    partial: PartialPlan = _ALL_OPEN,
    most: int = MOST_DEVICES,
) -> Cheapest:
    """The kind and number of devices that train on so much data before the deadline for least.

    Numbers of devices are 1, 2, 4 ... of a node, then 1, 2, 4 ... nodes, then what a bisection
    between the last that is too slow and the first that is not finds; the upper end of the step's
    range counts. The global batch is rounded up where so many devices do not share it.

    Args:
        clusters: one of each kind; how many nodes they have does not matter.
        prices, watts: of a device, by its name (`Device.name`). Without prices the kinds cannot be
            compared in money, and device-hours are given; without watts the board's printed ones
            are taken where they are known.

    Raises:
        InputError: a deadline that is not above 0; what `budget` refuses.
    """
    if not deadline_s > 0:
        raise InputError(f"`deadline_s` = {deadline_s:g}: more than 0 is wanted")
    wanted = samples_of(tokens, samples, facts.tokens_per_sample)
    fast = policy.model_copy(update={"objective": Objective.TIME})

    def planned(cluster: ClusterProfile, count: int) -> Budget | str:
        """Return the budget of so many devices, or the reason why there is none."""
        batch = next_multiple(facts.workload.global_batch_size, count)
        workload = facts.workload.model_copy(update={"global_batch_size": batch})
        try:
            whole = facts.rebuilt(cluster=resized(cluster, count), workload=workload)
            winner = decide(whole, policy=fast, partial=partial, nearest=False).winner
        except InputError as error:
            return error.what
        if winner is None:
            return "nothing fits"
        name = cluster.device.name
        return budget(
            winner.plan,
            winner.estimate,
            samples=wanted,
            watts_per_device=(watts or {}).get(name, cluster.device.board_power_w),
            price_per_device_hour=(prices or {}).get(name),
        )

    offers = [_offer(cluster, deadline_s, planned, most) for cluster in clusters]
    return _cheapest(sorted(offers, key=_rank), deadline_s)


Planned = Callable[[ClusterProfile, int], Budget | str]


def _offer(cluster: ClusterProfile, deadline_s: float, planned: Planned, most: int) -> Offer:
    """Return the cheapest of the tried numbers of devices that meets the deadline."""
    known: dict[int, Budget | str] = {}

    def in_time(count: int) -> bool:
        if count not in known:
            known[count] = planned(cluster, count)
        outcome = known[count]
        return isinstance(outcome, Budget) and outcome.seconds.high <= deadline_s

    numbers = list(counts(cluster, most))
    places = list(_doubling(len(numbers)))
    first = next((n for n, place in enumerate(places) if in_time(numbers[place])), None)
    if first is not None and first > 0:
        low, high = places[first - 1], places[first]
        while high - low > 1:
            middle = (low + high) // 2
            low, high = (low, middle) if in_time(numbers[middle]) else (middle, high)
        # Beyond the fewest devices in time, more are rarely cheaper, but sometimes are.
        for place in places[first:]:
            in_time(numbers[place])
    name = cluster.device.name
    tried = {count: outcome for count, outcome in known.items() if isinstance(outcome, Budget)}
    enough = {count: outcome for count, outcome in tried.items() if in_time(count)}
    if not enough:
        count, last = max(known.items())
        because = last if isinstance(last, str) else f"takes {_hours(last.seconds.high)}"
        return Offer(device=name, because=f"{devices_in_words(count)}: {because}")
    count = min(enough, key=lambda n: (_cost(enough[n]), n))
    slower = [n for n in known if n < min(enough)]
    return Offer(
        device=name,
        devices=count,
        budget=enough[count],
        because=_because(known, count, max(slower, default=None)),
    )


def _doubling(length: int) -> Iterator[int]:
    """Yield 0, 1, 3, 7, ... and the last index."""
    place = 0
    while place < length - 1:
        yield place
        place = 2 * place + 1
    yield length - 1


def _because(known: Mapping[int, Budget | str], count: int, slower: int | None) -> str:
    budget = known[count]
    assert isinstance(budget, Budget)
    words = f"{devices_in_words(count)} take up to {_hours(budget.seconds.high)}"
    if slower is None:
        return words
    other = known[slower]
    why = other if isinstance(other, str) else f"up to {_hours(other.seconds.high)}, too late"
    return f"{words}; {devices_in_words(slower)}: {why}"


def _hours(seconds: float) -> str:
    return f"{seconds / HOUR_S:.3g} h"


def _cost(budget: Budget) -> float:
    return budget.money.value if budget.money else budget.device_hours.value


def _rank(offer: Offer) -> tuple[int, float, str]:
    if offer.budget is None:
        return 2, 0.0, offer.device
    return (0 if offer.budget.money else 1), _cost(offer.budget), offer.device


def _cheapest(offers: Sequence[Offer], deadline_s: float) -> Cheapest:
    in_time = [offer for offer in offers if offer.budget]
    unpriced = [offer.device for offer in in_time if offer.budget and not offer.budget.money]
    best = None
    if not in_time:
        because = "none is in time"
    elif len(in_time) > 1 and unpriced:
        because = f"no price of {' or '.join(unpriced)} is known: they cannot be compared in money"
    else:
        best = in_time[0].device
        because = in_time[0].because
    return Cheapest(deadline_s=deadline_s, offers=tuple(offers), best=best, because=because)
