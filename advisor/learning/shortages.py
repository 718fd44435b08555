"""Plans that ran out of memory here: what later plans of such models must stay below.

A plan that was predicted to fit and did not has said two things: what there is (less than it
needed), and what estimates of this model lack on this machine, which is charged to every plan as
memory of the process.
"""

from __future__ import annotations

from collections.abc import Iterable
from datetime import UTC, datetime, timedelta

from pydantic import NonNegativeFloat

from advisor.cost import estimate
from advisor.inputs.facts import Facts
from advisor.learning.run_log import fingerprint_of
from engines.plan import Plan
from profiles.cache import cache_path, every, keep
from profiles.errors import AdvisorError
from profiles.provenance import Quantity, Source
from profiles.record import Document
from profiles.timing import runs
from profiles.timing.runs import Machine
from profiles.units import format_gib

KEPT_DAYS = 30
"""A driver, a release of torch or a neighbour on the device may have been the cause: a plan is
tried again after that."""


class FailedPlan(Document):
    """A plan of a model, and the memory that it needed at least.

    Attributes:
        fingerprint: hash of the model's profile.
        plan: as `Plan.parse` reads it.
        needed_bytes: held when it failed, with the allocation that failed.
        ended_at: UTC.
    """

    machine: Machine
    fingerprint: str
    dtype: str
    plan: str
    needed_bytes: NonNegativeFloat
    ended_at: str


def failed_plan(plan: Plan, facts: Facts, *, needed_bytes: float) -> FailedPlan:
    """The record of a `plan` that failed now."""
    return FailedPlan(
        machine=runs.machine_of(facts.cluster),
        fingerprint=fingerprint_of(facts.model),
        dtype=facts.precision.dtype,
        plan=str(plan),
        needed_bytes=needed_bytes,
        ended_at=datetime.now(UTC).isoformat(timespec="seconds"),
    )


def keep_failed(failed: FailedPlan) -> None:
    """Store it for `failed_here`, one file a plan."""
    key = failed.machine.model_dump(mode="json"), failed.fingerprint, failed.dtype, failed.plan
    keep(cache_path("shortages", *key), failed)


def failed_here(facts: Facts) -> tuple[FailedPlan, ...]:
    """Plans of this model that failed on such machines in the last `KEPT_DAYS`."""
    oldest = (datetime.now(UTC) - timedelta(days=KEPT_DAYS)).isoformat(timespec="seconds")
    key = runs.machine_of(facts.cluster), fingerprint_of(facts.model), facts.precision.dtype
    known = (one for one in every("shortages", FailedPlan) if one.ended_at >= oldest)
    return tuple(one for one in known if (one.machine, one.fingerprint, one.dtype) == key)


def below(facts: Facts, failed: Iterable[FailedPlan]) -> Facts:
    """Return `facts` under which none of the failed plans fits.

    The device has no more memory than the least that was not enough, and its context grows by what
    the estimates of the failed plans lacked. Notes of the cluster, which reports show, say so.
    """
    device = facts.cluster.device
    memory, missing, notes = device.memory_bytes, 0.0, []
    for one in failed:
        try:
            predicted = estimate(Plan.parse(one.plan), facts).peak_bytes
        except AdvisorError:  # of another release
            continue
        missing = max(missing, one.needed_bytes - predicted)
        if one.needed_bytes < memory.value:
            origin = f"{one.plan} needed as much and failed, {one.ended_at[:10]}"
            memory = _seen(memory, one.needed_bytes, origin)
            notes = [
                f"`{one.plan}` ran out of memory here on {one.ended_at[:10]} when it needed"
                f" {format_gib(one.needed_bytes)}: a device is taken to have no more"
            ]
    context = device.context_bytes
    if missing > 0:
        lacked = f"{format_gib(missing)} that plans which failed here lacked"
        context = _seen(context, context.value + missing, f"with {lacked}")
        notes.append(f"processes are charged {lacked} in their estimates")
    if not notes:
        return facts
    device = device.model_copy(update={"memory_bytes": memory, "context_bytes": context})
    said = (*facts.cluster.notes, *notes)
    cluster = facts.cluster.model_copy(update={"device": device, "notes": said})
    return facts.model_copy(update={"cluster": cluster})


def _seen(quantity: Quantity, value: float, origin: str) -> Quantity:
    """`value` as a failure showed it; in doubt are as many bytes as before."""
    error = quantity.relative_error * quantity.value / value if value else 0.0
    return Quantity(value=value, source=Source.MEASURED, relative_error=error, origin=origin)
