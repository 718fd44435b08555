"""Saves that end at every file event in turn: the old state or the new one is loaded afterwards.

An event is an `open`, `rename`, `mkdir`, `remove` or `rmdir` below the folder, as Python audits
them. A process is killed before the operation, so that the next point is "after this one".
"""

from __future__ import annotations

import hashlib
import os
import shutil
import signal
import sys
from collections.abc import Iterable
from pathlib import Path

from torch import Tensor

from engines.parallel import ParallelModel
from engines.state.checkpoint.folder import STEP, unlock
from profiles.errors import AdvisorError
from tests.soak.report import CrashPoints
from tests.soak.training import build, global_batches
from tests.workers import Pool, RankFailure

PLANS = {1: "dp_replicate=1", 2: "dp_shard=2"}
EVENTS = {"open", "os.rename", "os.mkdir", "os.remove", "os.rmdir"}
STEPS = 8


class Audit:
    """Counts the file events below a folder; the process ends at event number `last`."""

    def __init__(self, folder: str, last: int | None) -> None:
        self.count = 0
        self._folder, self._last = folder, last
        self._is_armed = True
        sys.addaudithook(self._hear)

    def _hear(self, event: str, args: tuple[object, ...]) -> None:
        if event not in EVENTS or not self._is_armed or isinstance(args[0], int):
            return
        if not os.fsdecode(args[0]).startswith(self._folder):  # type: ignore[arg-type]
            return
        self.count += 1
        if self.count == self._last:
            os.kill(os.getpid(), signal.SIGKILL)

    def disarm(self) -> int:
        """The number of events; later ones do not count."""
        self._is_armed = False
        return self.count


def _begin(plan: str, folder: str) -> None:
    """The old state, saved."""
    parallel, scheduler = build(plan, steps=STEPS)
    parallel.fit(global_batches(), steps=2, save=folder, scheduler=scheduler)
    unlock(Path(folder))


def _go_on(plan: str, folder: str, victim: int, last: int | None) -> int:
    """One step from the old state, saved in its place; returns the file events of this rank."""
    parallel, scheduler = build(plan, steps=STEPS)
    loader = parallel.shard(global_batches())
    parallel.register(scheduler=scheduler)
    parallel.load(folder)
    parallel.train_step(next(iter(loader)))
    audit = Audit(folder, last if parallel.data_rank == victim else None)
    parallel.save(folder, keep_last=1)
    count = audit.disarm()
    unlock(Path(folder))
    return count


def crash_points(
    ranks: int, folder: Path, *, every: int = 1, pool: Pool | None = None
) -> CrashPoints:
    """Break a save off at each point of each rank, or each `every`-th, and load what is there."""
    plan, own = PLANS[ranks], pool or Pool(ranks)
    before, after, work = (folder / name for name in ("before", "after", "work"))
    try:
        own.run(_begin, plan, str(before), world_size=ranks)
        shutil.copytree(before, after)
        counts = own.run(_go_on, plan, str(after), -1, None, world_size=ranks)
        reader = Reader()
        old, new = reader.state(before), reader.state(after)
        assert old != new
        loaded: list[str] = []
        wrong: list[str] = []
        for victim, count in enumerate(counts):
            for last in range(1, count + 1, every):
                shutil.copytree(before, work)
                try:
                    own.run(_go_on, plan, str(work), victim, last, world_size=ranks)
                    wrong.append(f"rank {victim} lived through event {last} of {count}")
                except RankFailure:
                    pass
                state = reader.state(work)
                loaded.append(state)
                left = reader.leftovers(work)
                if state not in (old, new) or left:
                    wrong.append(f"rank {victim}, event {last} of {count}: {left or state}")
                shutil.rmtree(work)
    finally:
        if pool is None:
            own.close()
    return CrashPoints(
        ranks=ranks,
        points=tuple(counts),
        old=loaded.count(old),
        new=loaded.count(new),
        differences=tuple(wrong[:5]),
    )


class Reader:
    """One process that loads checkpoints of any ranks."""

    def __init__(self) -> None:
        self._parallel, scheduler = build(PLANS[1], steps=STEPS)
        self._parallel.register(scheduler=scheduler)

    def state(self, folder: Path) -> str:
        """A hash of all that `load(folder, step="latest")` gave, or its error."""
        try:
            self._parallel.load(folder, step="latest")
        except AdvisorError as error:
            return str(error)
        return _hash(self._parallel)

    def leftovers(self, folder: Path) -> list[str]:
        """Entries besides complete saves, pointer and lock, after one more save there."""
        self._parallel.save(folder)
        unlock(folder)
        names = [path.name for path in folder.iterdir()]
        return [name for name in names if not (name in ("latest", "lock") or STEP.fullmatch(name))]


def _hash(parallel: ParallelModel) -> str:
    digest = hashlib.sha256(str(parallel.step).encode())
    for tensor in _tensors([parallel.state_dict(), parallel.optimizer.state_dict()]):
        digest.update(tensor.detach().numpy().tobytes())
    return digest.hexdigest()


def _tensors(values: Iterable[object]) -> Iterable[Tensor]:
    for value in values:
        if isinstance(value, Tensor):
            yield value
        elif isinstance(value, dict):
            yield from _tensors(value.values())
        elif isinstance(value, list | tuple):
            yield from _tensors(value)
