"""Memory, files and threads of a process that does one thing ten thousand times."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from pathlib import Path

from advisor.decide.choose import choose
from advisor.inputs.policy import Policy
from engines.state.checkpoint.folder import unlock
from profiles.allocator.process_peak import release_freed_memory
from tests.engines.cases import cpu_ranks
from tests.soak.report import Repeated
from tests.soak.training import build, global_batches
from tests.workers import Pool

MOST_GROWTH_MIB = 16.0
"""From a tenth of the repetitions to their end; an allocator's arenas settle before."""
RANKS = 8


def decisions(count: int, folder: Path) -> Repeated:
    """Decide `count` times in one process, for two machines in turn."""
    parallel, _ = build("dp_replicate=1", steps=1)
    assert parallel.decision is not None
    facts = parallel.decision.facts
    machines = [cpu_ranks(4), cpu_ranks(8)]

    def once(number: int) -> None:
        cluster = machines[number % 2]
        choose(facts.model_copy(update={"cluster": cluster}), policy=Policy())

    return repeat("decisions", count, once)


def saves(count: int, folder: Path) -> Repeated:
    """Save `count` times, by turns in the background, with two saves retained."""
    parallel, scheduler = build("dp_replicate=1", steps=count)
    parallel.register(scheduler=scheduler)
    loader = iter(parallel.shard(global_batches()))
    parallel.train_step(next(loader))

    def once(number: int) -> None:
        if number % 2 and number < count - 1:
            parallel.async_save(folder, keep_last=2)
        else:
            parallel.save(folder, keep_last=2)

    result = repeat("saves", count, once)
    unlock(folder)
    left = [path.name for path in folder.iterdir() if path.name.startswith("step-")]
    if len(left) != 2:
        return result.model_copy(update={"differences": (f"left over: {left}",)})
    return result


def _steps(count: int) -> Repeated:
    parallel, _ = build(f"dp_replicate={RANKS}", steps=count)
    batches = [*parallel.shard(global_batches())][:8]

    def once(number: int) -> None:
        parallel.train_step(batches[number % len(batches)])

    return repeat(f"steps on {RANKS} ranks", count, once)


def steps(count: int, folder: Path) -> Repeated:
    """Train `count` steps on eight ranks; the rank that grows most."""
    pool = Pool(RANKS)
    try:
        every = pool.run(_steps, count, world_size=RANKS, timeout_s=1800)
    finally:
        pool.close()
    return max(every, key=lambda each: each.last_mib - each.first_mib)


def repeat(name: str, count: int, once: Callable[[int], None]) -> Repeated:
    """Call `once` with 0, 1 ... and compare the process at a tenth of the calls and at the end."""
    first: tuple[float, int, int] | None = None
    for number in range(count):
        once(number)
        if first is None and number + 1 >= count / 10:
            first = _held()
    last = _held()
    assert first is not None
    differences = []
    if last[0] - first[0] > MOST_GROWTH_MIB:
        differences.append(f"resident memory grows by {last[0] - first[0]:.1f} MiB")
    for what, then, now in zip(("open files", "threads"), first[1:], last[1:], strict=True):
        if now > then:
            differences.append(f"{now - then} more {what}")
    return Repeated(
        name=name,
        count=count,
        first_mib=round(first[0], 1),
        last_mib=round(last[0], 1),
        files=last[1],
        threads=last[2],
        differences=tuple(differences),
    )


def _held() -> tuple[float, int, int]:
    """Resident memory in MiB, open files and threads of this process."""
    release_freed_memory()
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    files = len(os.listdir("/proc/self/fd"))
    return pages * os.sysconf("SC_PAGESIZE") / 2**20, files, threading.active_count()


PARTS: dict[str, tuple[Callable[[int, Path], Repeated], int]] = {
    "decisions": (decisions, 10_000),
    "saves": (saves, 200),
    "steps": (steps, 2_000),
}
"""What is repeated, and how often."""
