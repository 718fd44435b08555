"""Fewest devices that a model trains on."""

from __future__ import annotations

from math import ceil

from advisor.inputs.facts import Facts
from advisor.inputs.policy import Policy
from advisor.inputs.resize import MOST_DEVICES, counts, devices_in_words, next_multiple, on
from advisor.whatif.sizing.answer import Answer, Trial, on_device, taken, trial
from engines.plan import PartialPlan
from profiles.errors import NoPlanError, PlanError
from profiles.units import format_gib
from profiles.workload.optimizers import upkeep

_DEFAULT = Policy()
_ALL_OPEN = PartialPlan()


def fewest_devices(
    facts: Facts,
    *,
    policy: Policy = _DEFAULT,
    partial: PartialPlan = _ALL_OPEN,
    most: int = MOST_DEVICES,
) -> Answer:
    """The fewest devices of this kind, in nodes of this kind, on which a plan fits.

    Every smaller number was tried, but for those on which the model states alone do not fit. States
    stay on the devices unless `partial` says otherwise. Where the global batch lets no plan share
    it out that fits, the next larger one that divides is taken, and a note says so.

    Raises:
        NoPlanError: `most` devices are not enough.
        PlanError: `partial` allows no legal plan on any number.
    """
    partial = on_device(partial)
    bound = _bound(facts, policy) if partial.offload == "none" else 1
    before = may_fit = None
    fewest: Trial | None = None
    for count in counts(facts.cluster, most):
        if count < bound:
            continue
        try:
            tried = _tried(facts, count, policy, partial)
        except PlanError as error:
            before = count, error.what
            continue
        if may_fit is None and tried.may_fit:
            may_fit = count
        if tried.fits:
            fewest = tried
            break
        before = count, tried.because
    if fewest is None:
        count, because = before or (most, f"the states alone need {bound}")
        raise NoPlanError(
            f"{devices_in_words(count)} of this kind are not enough: {because}",
            hints=["raise `most`, name a network, or take devices with more memory"],
        )
    winner = taken(fewest.facts, policy, partial)
    return Answer(
        question=f"Fewest {facts.cluster.device.name} on which {facts.model.name} trains:",
        value=winner.plan.world_size,
        unit="devices",
        low=may_fit or winner.plan.world_size,
        high=winner.plan.world_size,
        plan=winner.plan,
        step_s=winner.estimate.step_s,
        peak_high_bytes=winner.estimate.peak_high_bytes,
        verified=tuple(_verified(facts, policy, bound, before, winner.plan.world_size)),
        notes=tuple(_notes(facts, fewest.facts)),
    )


def _bound(facts: Facts, policy: Policy) -> int:
    """Bound by model states: plans can shard one copy over all devices at most."""
    return ceil(_states_bytes(facts) / policy.usable_bytes(facts.cluster.device))


def _states_bytes(facts: Facts) -> float:
    model = facts.model
    states = upkeep(facts.workload.optimizer, model.units).state_bytes
    return model.parameter_bytes + model.gradient_bytes + states


def _tried(facts: Facts, count: int, policy: Policy, partial: PartialPlan) -> Trial:
    """Try the requested batch, else one that so many devices can split."""
    batch = facts.workload.global_batch_size
    wanted = next_multiple(batch, count)
    try:
        as_asked = trial(on(facts, count), policy, partial)
    except PlanError:
        if wanted == batch:
            raise
        return trial(on(facts, count, batch=wanted), policy, partial)
    if as_asked.fits or wanted == batch:
        return as_asked
    return trial(on(facts, count, batch=wanted), policy, partial)


def _verified(
    facts: Facts, policy: Policy, bound: int, before: tuple[int, str] | None, value: int
) -> list[str]:
    if before is not None:
        count, because = before
        return [f"{devices_in_words(count)}: {because}"]
    if value == 1:
        return ["there is no smaller number"]
    states = format_gib(_states_bytes(facts))
    usable = format_gib(policy.usable_bytes(facts.cluster.device))
    return [f"below {bound} devices the model states alone, {states}, do not fit ({usable} each)"]


def _notes(facts: Facts, resized: Facts) -> list[str]:
    asked, used = facts.workload.global_batch_size, resized.workload.global_batch_size
    if asked == used:
        return []
    return [f"with a global batch of {used}: {asked} cannot be shared out among so many"]
