"""The deepest model that a script trains in a limit of tensor memory.

A model fits if the peak of its step, counted exactly (`tests.contract.watch.LiveBytes`), is no more
than the limit on every rank. This is what an allocator with that limit would let pass, and unlike a
refused allocation, which one rank of a collective meets alone, it leaves no rank waiting.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from profiles.machine.cluster import ClusterProfile
from profiles.provenance import Quantity, Source
from tests.peers.race import Attempt
from tests.peers.results import Capacity
from tests.peers.scripts import Job
from tests.peers.subjects import SUBJECTS

SUBJECT = "Llama"
LIMIT_BYTES = 48 * 2**20
DEEPEST = 64


def tensors_alone(cluster: ClusterProfile, *, memory_bytes: float | None = None) -> ClusterProfile:
    """The machines with processes that take no memory but for tensors, `memory_bytes` if given."""
    device = cluster.device
    assumed = {"context_bytes": Quantity(value=0.0, source=Source.ASSUMED)}
    if memory_bytes is not None:
        assumed["memory_bytes"] = Quantity(value=memory_bytes, source=Source.ASSUMED)
    return cluster.model_copy(update={"device": device.model_copy(update=assumed)})


def largest(fits: Callable[[int], bool], most: int) -> int:
    """The largest number up to `most` that fits, if all smaller ones do; 0 if 1 does not.

    Doubles first, as a step of a deep model takes long, then bisects.
    """
    good, bad = 0, most + 1
    while bad - good > 1:
        middle = min(most, max(1, 2 * good)) if bad == most + 1 else (good + bad) // 2
        if middle == good:
            middle = (good + bad) // 2
        if fits(middle):
            good = middle
        else:
            bad = middle
    return good


def capacity(script: str, job: Job) -> Capacity:
    """Bisect the depth of a script; all ranks call it. Ours is told the limit as its devices'."""
    job = replace(job, cluster=tensors_alone(job.cluster, memory_bytes=LIMIT_BYTES))
    subject, fitting = SUBJECTS[SUBJECT], dict[int, Attempt]()
    errors: list[str] = []

    def fits(depth: int) -> bool:
        attempt = Attempt(script, subject, job, depth)
        attempt.end()
        if attempt.error:
            errors.append(attempt.error)
            return False
        if attempt.peak_bytes <= LIMIT_BYTES:
            fitting[depth] = attempt
        return depth in fitting

    depth = largest(fits, DEEPEST)
    known = Capacity(subject=SUBJECT, script=script, limit_bytes=LIMIT_BYTES)
    if not depth:
        return known.model_copy(update={"left_out": errors[-1] if errors else "no depth fits"})
    best = fitting[depth]
    parameters = sum(p.numel() for p in subject.model(depth).parameters())
    return known.model_copy(
        update={
            "depth": depth,
            "parameters": parameters,
            "plan": best.plan,
            "peak_bytes": best.peak_bytes,
        }
    )
