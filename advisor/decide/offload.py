"""What may leave the device where nothing fits on it: attempts in order, and what was said of them.

The first attempt of which a plan fits is taken. Each sends more than the one before, or over a
slower way, so that what is left to later ones is only what earlier ones cannot hold:

    one kind of thing in main memory     it goes and comes over the device's own link
    states and activations there         both go; the block in work and a chunk of states stay
    one kind of thing in files           main memory is short too; a node's devices share its disk
    states and activations in files      the last way there is

Files are tried where the disk is known (`advise probe --disk`, a cluster file, or the folder that a
job names): others may have none that is fast, or none.
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
    """What leaves, one or the other, and where to."""

    kinds: tuple[Offload, ...]
    to: OffloadTo

    def partial(self, partial: PartialPlan) -> PartialPlan:
        """Those of the search for it."""
        return partial if self.to is OffloadTo.HOST else partial.fixing(offload_to=self.to)


ATTEMPTS = tuple(Attempt(kinds, to) for to in OffloadTo for kinds in (_ONE, _BOTH))


def attempts(facts: Facts, partial: PartialPlan) -> Iterator[Attempt]:
    """Those that may be made here; none where `partial` says what leaves."""
    if partial.fixes("offload"):
        return
    cluster = facts.cluster
    for attempt in ATTEMPTS:
        if attempt.to is OffloadTo.HOST:
            # A CPU rank's device memory is the host's already.
            is_open = cluster.device.kind != "cpu"
        else:
            is_open = cluster.disk_write_bytes_per_s is not None and not partial.fixes("offload_to")
        if is_open:
            yield attempt


def with_disk(
    cluster: ClusterProfile, folder: str | os.PathLike[str] | None = None
) -> ClusterProfile:
    """`cluster` with a disk of the assumed rates where none is known, and with what is free in
    `folder`."""
    written, read = disk_bytes_per_s(cluster)
    update = {"disk_write_bytes_per_s": written, "disk_read_bytes_per_s": read}
    with contextlib.suppress(OSError):  # a folder that is missing is told where it is used
        if folder is not None:
            free = shutil.disk_usage(folder).free
            update["disk_free_bytes"] = Quantity(value=free, source=Source.MEASURED)
    return cluster.model_copy(update=update)


def hint(plan: Plan) -> Iterator[str]:
    """What a plan with files needs beside itself."""
    if plan.offload_to is OffloadTo.DISK:
        yield (
            "give `offload_folder=` to `auto_parallelize` or `apply_plan`: a folder on a fast local"
            " disk of every node; its files have no names and are gone when the job ends"
        )


def hopeless(kind: Offload, short_of_memory: Sequence[Offload]) -> bool:
    """Whether activations would go where the states alone found main memory short already."""
    return _FIRST_OF.get(kind) in short_of_memory


def reason(winner: Candidate, weighed: Sequence[Candidate]) -> Iterator[str]:
    """Why something leaves the device, and what its ways cost."""
    estimate = winner.estimate
    waiting = estimate.host_bytes or estimate.disk_bytes
    if not waiting:  # main memory is a processor's own
        return
    where = "files" if estimate.disk_bytes else "main memory"
    moved_s = estimate.time.host_s
    costs = (
        f"{format_gib(waiting)} a rank wait in {where}, and their ways take"
        f" {format_seconds(moved_s)} of a step ({format_percent(moved_s / estimate.step_s)})"
    )
    here = [c for c in weighed if c.plan.offload is Offload.NONE]
    if here:
        miss = nearest_miss(here)
        if miss.finding is not None:
            because = f"{title(miss.plan)} comes nearest and {miss.finding.because}"
            yield f"With everything on the device nothing fits: {because}. {_capitalised(costs)}"
            earlier = _earlier(winner, weighed)
            if earlier:
                yield earlier
            return
    yield _capitalised(costs)


def _earlier(winner: Candidate, weighed: Sequence[Candidate]) -> str:
    """What was tried before with something outside the device, and by how much it missed."""
    own = next(n for n, a in enumerate(ATTEMPTS) if _is_of(winner, a))
    missed = []
    for attempt in ATTEMPTS[:own]:
        tried = [c for c in weighed if _is_of(c, attempt) and not c.fits]
        if tried:
            # What fits the device and not the place beside it says why that place was left.
            beside = [c for c in tried if c.finding and c.finding.rule != _DEVICE]
            miss = nearest_miss(beside or tried)
            assert miss.finding is not None
            missed.append(f"{title(miss.plan)} {miss.finding.because}")
    return f"Tried before: {'; '.join(missed)}" if missed else ""


def _is_of(candidate: Candidate, attempt: Attempt) -> bool:
    plan = candidate.plan
    return plan.offload in attempt.kinds and plan.offload_to is attempt.to


def _capitalised(words: str) -> str:
    return words[:1].upper() + words[1:]
