"""Cluster of a command: by name, from a file, or the current machine.

A command under torchrun runs on every rank. All ranks probe and measure; only rank 0 continues.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from advisor.inputs.console import say

if TYPE_CHECKING:
    from profiles.machine.cluster import ClusterProfile


def resolve(text: str, *, bench: bool) -> ClusterProfile:
    """`--cluster`: "auto" is this machine, or the job under torchrun.

    A job is timed first unless `bench` is false, or an equal one was timed before.
    """
    if text != "auto":
        from profiles.machine.clusters import resolve_cluster

        only_first_rank()
        return resolve_cluster(text)
    if not bench:
        return look(measure=True)
    from profiles.machine.launcher import launcher
    from profiles.machine.probe import probe

    job = launcher()
    if job.world_size == 1:
        return probe(launcher=job, measure=True)
    if job.kind != "torchrun":
        if job.rank == 0:
            say(f"note: {job.kind} starts no process group; under torchrun links are timed")
        return look(measure=True)
    from profiles.machine.bench import recall_or_bench

    with _joined(job.rank):
        return recall_or_bench(probe(launcher=job), note=_note if job.rank == 0 else _silence)


def only_first_rank() -> None:
    """Exit on all ranks but rank 0, if every rank would give the same answer."""
    from profiles.machine.launcher import launcher

    if launcher().rank > 0:
        sys.exit(0)


def look(*, measure: bool = False) -> ClusterProfile:
    """Probe this machine or job without communication."""
    from profiles.machine.launcher import launcher
    from profiles.machine.probe import probe

    job = launcher()
    machines = probe(launcher=job, measure=measure)
    if job.rank > 0:
        sys.exit(0)
    return machines


def timed_here() -> ClusterProfile:
    """Measure this machine or job and cache the result for `resolve`; without a job, links between
    several GPUs are not measured."""
    from profiles.machine.bench import BUDGET_S, bench, keep, progress
    from profiles.machine.launcher import launcher
    from profiles.machine.probe import probe

    job = launcher()
    machines = probe(launcher=job, measure=job.world_size == 1)
    if machines.world_size > 1 and job.world_size == 1:
        say("note: links are timed under torchrun, one rank per device")
        return machines
    with _joined(job.rank):
        with progress(rank=job.rank, budget_s=BUDGET_S) as tell:
            timed = bench(machines, tell=tell)
        keep(timed)
        return timed


@contextmanager
def _joined(rank: int) -> Iterator[None]:
    """Join the job while the body runs; afterwards only rank 0 continues."""
    from engines.runtime.world import join_world, leave_world

    join_world()
    try:
        yield
    finally:
        leave_world()
    if rank > 0:
        sys.exit(0)


def _note(text: str) -> None:
    say(f"note: {text}; `advise probe --bench` times them anew, `--no-bench` does without")


def _silence(text: str) -> None:
    pass
