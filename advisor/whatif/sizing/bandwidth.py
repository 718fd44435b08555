"""Link bandwidth at which a strategy does not wait for communication."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from math import sqrt

from advisor.decide.decide import decide
from advisor.inputs.changed_facts import Lever, shown, value, varied
from advisor.inputs.facts import Facts
from advisor.inputs.policy import Objective, Policy
from advisor.search.ranking import Candidate
from advisor.whatif.sizing.answer import Answer
from engines.plan import PartialPlan
from profiles.errors import NoPlanError
from profiles.units import format_percent

_DEFAULT = Policy()
_ALL_OPEN = PartialPlan()
# A link that is this much faster than it is counts as one that takes no time.
_ENDLESS = 2.0**20
# Slowdown at which a strategy that still loses nothing does not use the link.
_NOTHING = 2.0**-20
_RESOLUTION = 0.01


def bandwidth_needed(
    facts: Facts,
    link: Lever,
    *,
    policy: Policy = _DEFAULT,
    partial: PartialPlan = _ALL_OPEN,
) -> Answer:
    """The slowest `link` over which the best plan that keeps `partial` still runs unhindered.

    Unhindered: its step takes no more than the policy's margin longer than over a link that takes
    no time; latency stays. In the node per device, between nodes per node, as in `Link`.

    Args:
        link: `Lever.LINKS_IN_NODE` or `Lever.LINKS_BETWEEN_NODES`.
        partial: the strategy, as `PartialPlan` reads "dp_shard=8" or "pp=4 tp=2".

    Raises:
        InputError: there is no such link.
        PlanError: `partial` allows no legal plan.
        NoPlanError: no plan that keeps them fits.
    """
    now = value(facts, link)
    fast = policy.model_copy(update={"objective": Objective.TIME})
    known: dict[float, Candidate] = {}

    def at(rate: float) -> Candidate:
        if rate not in known:
            winner = decide(
                varied(facts, link, rate), policy=fast, partial=partial, nearest=False
            ).winner
            if winner is None:
                raise NoPlanError(f"nothing that keeps {dict(partial)} fits, over any link")
            known[rate] = winner
        return known[rate]

    free = at(now * _ENDLESS).estimate.step_s
    limit = (1 + policy.simplicity_margin) * free
    slow, enough = now * _NOTHING, now * _ENDLESS
    if at(slow).estimate.step_s <= limit:
        slow, enough = 0.0, slow
    while slow and enough / slow > 1 + _RESOLUTION:
        middle = sqrt(slow * enough)
        slow, enough = (slow, middle) if at(middle).estimate.step_s <= limit else (middle, enough)
    best = at(enough)
    needed = enough if slow else 0.0
    estimate = best.estimate
    sent, computed = estimate.communication_error, estimate.compute_error
    return Answer(
        question=f"Bandwidth of {link} that it needs:",
        value=needed,
        unit="bytes/s",
        # Needed is bytes over the time that computing leaves for them: both may be off.
        low=needed * (1 - sent) / (1 + computed),
        high=needed * (1 + sent) / (1 - computed),
        plan=best.plan,
        step_s=estimate.step_s,
        peak_high_bytes=estimate.peak_high_bytes,
        verified=tuple(_verified(link, slow, at, free) if slow else ["it loses nothing over any"]),
        notes=(f"here: {shown(link, now)}, {'enough' if now >= needed else 'too slow'}",),
    )


def _verified(
    link: Lever, slow: float, at: Callable[[float], Candidate], free: float
) -> Iterator[str]:
    lost = at(slow).estimate.step_s / free - 1
    yield f"{shown(link, slow)}: {format_percent(lost)} slower than over a link that takes no time"
