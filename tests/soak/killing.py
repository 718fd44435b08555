"""A training under torchrun's agent whose ranks and launchers are killed at random times."""

from __future__ import annotations

import contextlib
import os
import random
import signal
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

from engines.plan import Plan
from engines.state.checkpoint.folder import complete_saves, step_of
from engines.state.checkpoint.manifest import read_manifest
from tests.launching import Launched
from tests.soak.report import Soaked
from tests.soak.training import identity

LATE_S = 600.0
"""For ranks to start, or a moment to come: later is a hang."""
MOMENTS = ("start", "step", "save")
LAUNCHERS = 0.25
"""Part of the kills that are of the launcher; its ranks follow within a second, as a scheduler
would have it."""
MOST_DIFFERENCES = 5


class SoakFailure(AssertionError):
    """The training did not come back; with the end of its log."""


def soaked(
    name: str, plan: str, *, folder: Path, steps: int, save_every: int, kills: int, seed: int
) -> Soaked:
    """Train undisturbed and under kills in `folder`, and compare.

    Raises:
        SoakFailure: a launcher gave up, or ranks hung.
    """
    began = time.monotonic()
    alone = Job(folder / "alone", plan, steps, save_every)
    alone.start()
    alone.wait_for_end()
    under = Job(folder / "killed", plan, steps, save_every)
    done = under.run_killed(kills, random.Random(f"{seed} {name}"), start_s=alone.start_s)
    lines = [path.read_text().splitlines() for path in under.logs()]
    numbered = [line for line in lines[0] if line[0].isdigit()]
    return Soaked(
        name=name,
        plan=plan,
        ranks=under.ranks,
        steps=steps,
        kills=dict(sorted(done.items())),
        attempts=under.attempts,
        repeated_steps=len(numbered) - steps,
        seconds=round(time.monotonic() - began, 1),
        differences=tuple(differences(alone, under)[:MOST_DIFFERENCES]),
    )


class Job:
    """One training of `tests.soak.training` in a folder, with all its attempts."""

    def __init__(self, folder: Path, plan: str, steps: int, save_every: int) -> None:
        self.folder, self.ranks = folder, Plan.parse(plan).world_size
        self.attempts, self.start_s = 0, 0.0
        self._words = [str(folder), "--plan", plan]
        self._words += ["--steps", str(steps), "--save-every", str(save_every)]
        self._launched: Launched | None = None
        self._known: set[str] = set()
        self._read = 0
        folder.mkdir(parents=True)
        for path in self.logs():
            path.touch()

    @property
    def saves(self) -> Path:
        return self.folder / "saves"

    def logs(self) -> list[Path]:
        """The lines of each rank."""
        return [self.folder / f"steps.{rank}" for rank in range(self.ranks)]

    def newest(self) -> int:
        """Step of the newest complete save; 0 without one."""
        return max((step_of(path) for path in complete_saves(self.saves)), default=0)

    def start(self) -> None:
        """Start a launcher, and wait for its ranks."""
        log = self.folder / "log"
        self._launched = Launched(self._words, module="tests.soak.launcher", log=log)
        self._await_ranks()

    def wait_for_end(self) -> None:
        """Wait until all steps are done."""
        assert self._launched is not None
        began = time.monotonic()
        try:
            self._until(lambda: self._steps_of_attempt() > 0)
            self.start_s = time.monotonic() - began
            self._until(lambda: not self._is_running())
        finally:
            self._kill_all()

    def run_killed(self, kills: int, draw: random.Random, *, start_s: float) -> Counter[str]:
        """Start and kill until all steps are done; what was killed, and when.

        Args:
            start_s: from the start of ranks to their first step.
        """
        done: Counter[str] = Counter()
        self.start()
        try:
            while done.total() < kills:
                moment = draw.choice(MOMENTS)
                if not self._await_moment(moment, draw, start_s):
                    break  # all steps are done
                is_launcher = draw.random() < LAUNCHERS
                done[f"{'launcher' if is_launcher else 'rank'}, {moment}"] += 1
                (self._kill_launcher if is_launcher else self._kill_rank)(draw)
            self._until(lambda: not self._is_running())
        finally:
            self._kill_all()
        return done

    def _living(self) -> dict[int, str]:
        """The processes of the ranks that live, as they introduced themselves."""
        living = {}
        for rank in range(self.ranks):
            with contextlib.suppress(OSError):
                said = (self.folder / f"process.{rank}").read_text()
                if said and identity(int(said.split()[0])) == said:
                    living[rank] = said
        return living

    def _kill_all(self) -> None:
        """Kill launcher and ranks, by their numbers, and wait until they are gone."""
        if self._launched is not None:
            self._launched.kill()
        for process in self._living().values():
            _kill(process)
        self._until(lambda: not self._living())

    def _kill_rank(self, draw: random.Random) -> None:
        living = self._living()
        if living:
            _kill(living[draw.choice(sorted(living))])
        self._note_kill()
        self._await_ranks()

    def _kill_launcher(self, draw: random.Random) -> None:
        assert self._launched is not None
        self._launched.kill()
        self._note_kill()
        time.sleep(draw.random())
        self._kill_all()
        self.start()

    def _note_kill(self) -> None:
        """Write into all lines which save the next attempt must not miss."""
        newest = self.newest()
        for path in self.logs():
            with open(path, "a") as lines:
                lines.write(f"kill {newest}\n")

    def _await_ranks(self) -> None:
        """Wait for ranks that are none of the last attempt's, or for the end of the training."""

        def are_new() -> bool:
            living = set(self._living().values())
            if len(living) < self.ranks or living & self._known:
                return not self._is_running()
            self._known = living
            return True

        self._until(are_new)
        self.attempts += 1
        self._read = self.logs()[0].stat().st_size

    def _await_moment(self, moment: str, draw: random.Random, start_s: float) -> bool:
        """Wait for a moment of this attempt; False where the training was over first."""
        if moment == "start":
            end = time.monotonic() + draw.uniform(0, start_s)
            self._until(lambda: time.monotonic() > end or not self._is_running())
        elif moment == "step":
            more = draw.randint(1, 20)
            self._until(lambda: self._steps_of_attempt() >= more or not self._is_running())
            time.sleep(draw.uniform(0, 0.05))
        else:
            before = set(self.saves.glob(".partial-*")) if self.saves.exists() else set()
            self._until(
                lambda: bool(set(self.saves.glob(".partial-*")) - before) or not self._is_running(),
                poll_s=0.0005,
            )
            time.sleep(draw.uniform(0, 0.01))
        return self._is_running()

    def _is_running(self) -> bool:
        """False where the training is over.

        Raises:
            SoakFailure: its launcher gave up.
        """
        assert self._launched is not None
        code = self._launched.process.poll()
        if code and code > 0:  # not by our own signal
            raise SoakFailure(f"the launcher ended with {code}:\n{self._launched.tail()}")
        return code is None

    def _until(self, condition: Callable[[], bool], *, poll_s: float = 0.005) -> None:
        deadline = time.monotonic() + LATE_S
        while not condition():
            if time.monotonic() > deadline:
                assert self._launched is not None
                raise SoakFailure(f"nothing happened in {LATE_S:.0f} s:\n{self._launched.tail()}")
            time.sleep(poll_s)

    def _steps_of_attempt(self) -> int:
        with open(self.logs()[0]) as lines:
            lines.seek(self._read)
            return sum(line[0].isdigit() for line in lines)


def _kill(process: str) -> None:
    """SIGKILL a process that is the one that it was."""
    pid = int(process.split()[0])
    if identity(pid) == process:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)


def differences(alone: Job, under: Job) -> list[str]:
    """Each difference between an undisturbed training and a killed one, in words."""
    problems: list[str] = []
    for rank, (wanted, path) in enumerate(zip(alone.logs(), under.logs(), strict=True)):
        losses = dict(line.split() for line in wanted.read_text().splitlines() if line[0].isdigit())
        newest, seen = 0, set()
        for line in path.read_text().splitlines():
            word, value = line.split()
            if word == "kill":
                newest = max(newest, int(value))
            elif word == "start" and int(value) < newest:
                problems.append(f"rank {rank} began at {value}, {newest} was saved")
            elif word.isdigit():
                seen.add(word)
                if losses.get(word) != value:
                    problems.append(f"rank {rank}, step {word}: {value}, not {losses.get(word)}")
        if seen != set(losses):
            problems.append(f"rank {rank} has {len(seen)} steps of {len(losses)}")
    if content(alone.saves) != content(under.saves):
        problems.append("the final states differ")
    return problems


def content(saves: Path) -> tuple[list[str], Any, Any]:
    """Of the newest save: hashes of its files, its values, and those of each rank."""
    manifest = read_manifest(complete_saves(saves)[0])
    return [file.sha256 for file in manifest.files.values()], manifest.values, manifest.ranks
