"""Offload if nothing fits on the device: attempts in order, and the reasons for one.

The first attempt with a plan that fits is taken. Each moves more than the one before, or over a
slower link:

    one kind in main memory               over the device's own link to the host
    states and activations there          the running block and a chunk of states stay on the device
    one kind in files                     if main memory is short too; a node shares its disk
    states and activations in files       last resort

Files are tried if the disk is known (`advise probe --disk`, a cluster file, or the folder of a
job): other machines may have no fast one, or none.
"""

from __future__ import annotations

import contextlib
import os
import shutil
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from advisor.cost.ledger import disk_bytes_per_s
from advisor.decide.comparison import nearest_miss, title
from advisor.inputs.facts import Facts
from advisor.search.ranking import Candidate, fits_device
from engines.plan import Offload, OffloadTo, PartialPlan, Plan
from profiles.machine.cluster import ClusterProfile
from profiles.provenance import Quantity, Source
from profiles.units import format_gib, format_percent, format_seconds

_ONE = (Offload.OPTIMIZER, Offload.STATES, Offload.ACTIVATIONS)
_BOTH = (Offload.OPTIMIZER_ACTIVATIONS, Offload.STATES_ACTIVATIONS)
_FIRST_OF = {
    Offload.OPTIMIZER_ACTIVATIONS: Offload.OPTIMIZER,
    Offload.STATES_ACTIVATIONS: Offload.STATES,
}
_DEVICE = fits_device.__name__.replace("_", "-")


@dataclass(frozen=True, slots=True)
class Attempt:
    """Kinds of offload to try, one at a time, and their destination."""

    kinds: tuple[Offload, ...]
    to: OffloadTo

    def partial(self, partial: PartialPlan) -> PartialPlan:
        """Return the settings of the search for it."""
        return partial if self.to is OffloadTo.HOST else partial.fixing(offload_to=self.to)


ATTEMPTS = tuple(Attempt(kinds, to) for to in OffloadTo for kinds in (_ONE, _BOTH))


def attempts(facts: Facts, partial: PartialPlan) -> Iterator[Attempt]:
    """Yield the attempts that are possible here; none if `partial` fixes the offload."""
    if partial.fixes("offload"):
        return
    cluster = facts.cluster
    for attempt in ATTEMPTS:
        if attempt.to is OffloadTo.HOST:
            # The device memory of a CPU rank is main memory already.
            is_open = cluster.device.kind != "cpu"
        else:
            is_open = cluster.disk_write_bytes_per_s is not None and not partial.fixes("offload_to")
        if is_open:
            yield attempt


def with_disk(
    cluster: ClusterProfile, folder: str | os.PathLike[str] | None = None
) -> ClusterProfile:
    """Return `cluster` with a disk, of assumed rates if none are known, and the free space of
    `folder`."""
    written, read = disk_bytes_per_s(cluster)
    update = {"disk_write_bytes_per_s": written, "disk_read_bytes_per_s": read}
    with contextlib.suppress(OSError):  # a missing folder is reported on its first use
        if folder is not None:
            free = shutil.disk_usage(folder).free
            update["disk_free_bytes"] = Quantity(value=free, source=Source.MEASURED)
    return cluster.model_copy(update=update)


def hint(plan: Plan) -> Iterator[str]:
    """Yield what a plan that offloads to files needs to run."""
    if plan.offload_to is OffloadTo.DISK:
        yield (
            "give `offload_folder=` to `auto_parallelize` or `apply_plan`: a folder on a fast local"
            " disk of every node; its files have no names and are gone when the job ends"
        )


def hopeless(kind: Offload, short_of_memory: Sequence[Offload]) -> bool:
    """True if main memory was too short for the states alone, without the activations of `kind`."""
    return _FIRST_OF.get(kind) in short_of_memory


def reason(winner: Candidate, weighed: Sequence[Candidate]) -> Iterator[str]:
    """Yield the reason for the offload, and its cost."""
    estimate = winner.estimate
    waiting = estimate.host_bytes or estimate.disk_bytes
    if not waiting:  # on a CPU, main memory is the device's
        return
    where = "files" if estimate.disk_bytes else "main memory"
    moved_s = estimate.time.host_s
    costs = (
        f"{format_gib(waiting)} a rank are kept in {where}, and transfers take"
        f" {format_seconds(moved_s)} of a step ({format_percent(moved_s / estimate.step_s)})"
    )
    here = [c for c in weighed if c.plan.offload is Offload.NONE]
    if here:
        miss = nearest_miss(here)
        if miss.finding is not None:
            because = f"{title(miss.plan)} comes nearest and {miss.finding.because}"
            yield f"Nothing fits without offload: {because}. {costs}"
            earlier = _earlier(winner, weighed)
            if earlier:
                yield earlier
            return
    yield costs


def _earlier(winner: Candidate, weighed: Sequence[Candidate]) -> str:
    """Describe the earlier attempts at offload, and by how much they missed."""
    own = next(n for n, a in enumerate(ATTEMPTS) if _is_of(winner, a))
    missed = []
    for attempt in ATTEMPTS[:own]:
        tried = [c for c in weighed if _is_of(c, attempt) and not c.fits]
        if tried:
            # A plan that fits the device shows best why the destination was not enough.
            too_large = [c for c in tried if c.finding and c.finding.rule != _DEVICE]
            miss = nearest_miss(too_large or tried)
            assert miss.finding is not None
            missed.append(f"{title(miss.plan)} {miss.finding.because}")
    return f"Tried before: {'; '.join(missed)}" if missed else ""


def _is_of(candidate: Candidate, attempt: Attempt) -> bool:
    plan = candidate.plan
    return plan.offload in attempt.kinds and plan.offload_to is attempt.to
