"""Races: every script in turns on one model, from the same parameters."""

from __future__ import annotations

import gc
import random
import statistics
import time
import warnings
from collections.abc import Callable, Sequence
from typing import Any

import torch.distributed as dist

from tests.contract.watch import LiveBytes
from tests.peers.results import Entry, Race
from tests.peers.scripts import (
    FRUGAL,
    LOSSY,
    OURS,
    OURS_FASTEST,
    OURS_LOSSY,
    PLAIN,
    SCRIPTS,
    Job,
    Running,
)
from tests.peers.subjects import ROWS, SUBJECTS, Subject, adam

WARM_UP = 2
"""Steps: DDP settles on its buckets, optimizers make their states; the peak is of the second."""


class Attempt:
    """One script on one model; it fails on all ranks or on none.

    Attributes:
        plan: what the script settled on; empty where it does not choose.
        losses: of this rank, by step.
        peak_bytes: of live tensors in a step, on the fullest rank.
        error: of the first rank that failed.
    """

    def __init__(self, script: str, subject: Subject, job: Job, depth: int | None = None) -> None:
        self.script = script
        self.losses: list[float] = []
        self.peak_bytes = 0
        self._step = 0
        self._subject, self._job = subject, job
        self.plan = ""
        self._running: Running | None = None
        error = ""
        try:
            self._start(depth)
        except Exception as failure:
            lines = [line.strip() for line in str(failure).splitlines() if line.strip()]
            error = f"{type(failure).__name__}: {lines[0] if lines else ''}"[:300]
        self.error = next((text for text in from_all(error) if text), "")

    def _start(self, depth: int | None) -> None:
        watched = LiveBytes([])
        with warnings.catch_warnings(), watched:
            warnings.simplefilter("ignore")
            model = self._subject.model(depth)
            self._running = SCRIPTS[self.script](self._subject, model, self._job)
            self.plan = self._running.plan
            del model
            self.step()
            gc.collect()
            watched.peak_bytes = 0
            self.step()
        self.peak_bytes = max(from_all(watched.peak_bytes))

    def end(self) -> None:
        """Free the model."""
        self._running = None
        gc.collect()

    def step(self) -> None:
        """Train on the next batch."""
        assert self._running is not None
        loss = self._running.step(self._subject.batch(self._step))
        self.losses.append(float(loss))
        self._step += 1

    def turn(self, steps: int) -> float:
        """Seconds of some steps, until all ranks have made them."""
        gc.collect()
        dist.barrier()
        start = time.perf_counter()
        for _ in range(steps):
            self.step()
        dist.barrier()
        return time.perf_counter() - start


def from_all(value: Any) -> list[Any]:
    """The values of all ranks."""
    values: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(values, value)
    return values


def scripts_of(nodes: int) -> list[str]:
    """Ours first; those that round gradients only where a link is slow."""
    rest = [name for name in SCRIPTS if name != FRUGAL]
    return [name for name in rest if nodes > 1 or name not in LOSSY]


def race(
    name: str,
    link: str,
    job: Job,
    *,
    rounds: int,
    steps: int,
    without: Sequence[str] = (),
    say: Callable[[str], None] = lambda text: None,
) -> Race:
    """Run a race; all ranks call it.

    Args:
        steps: of a turn.
        without: scripts that brought the job down before.
        say: called before each turn of a script, so that one that hangs is known.
    """
    subject = SUBJECTS[name]
    attempts: list[Attempt] = []
    left_out: dict[str, str] = dict.fromkeys(without, "it ended or stopped a job on this link")
    for script in scripts_of(job.nodes):
        if script in left_out:
            continue
        say(script)
        attempt = Attempt(script, subject, job)
        same = _same_plan(attempt, attempts)
        if same:
            left_out[script] = f"the plan of `{same}`"
        elif attempt.error:
            left_out[script] = attempt.error
        else:
            attempts.append(attempt)
            continue
        attempt.end()
    turns: dict[str, list[float]] = {attempt.script: [] for attempt in attempts}
    order = random.Random(0)
    for _ in range(rounds):
        order.shuffle(attempts)
        for attempt in attempts:
            say(attempt.script)
            turns[attempt.script].append(attempt.turn(steps))
    say("")
    losses = {a.script: [statistics.mean(step) for step in zip(*from_all(a.losses), strict=True)]
              for a in attempts}  # fmt: skip
    reference = losses.get(PLAIN) if subject.has_batch_norms else alone(subject, job, rounds, steps)
    by_script = {attempt.script: attempt for attempt in attempts}
    entries = []
    for script in scripts_of(job.nodes):
        if script in left_out:
            entries.append(Entry(script=script, left_out=left_out[script]))
            continue
        entries.append(
            Entry(
                script=script,
                plan=by_script[script].plan,
                turns_s=tuple(round(seconds, 5) for seconds in turns[script]),
                loss_error=largest_difference(losses[script], reference),
                peak_bytes=by_script[script].peak_bytes,
                is_lossy=script in LOSSY and _rounds(by_script[script].plan),
            )
        )
    count = sum(p.numel() for p in subject.model().parameters())
    return Race(
        subject=name, link=link, parameters=count, rows=ROWS, steps=steps, entries=tuple(entries)
    )


def _rounds(plan: str) -> bool:
    """True if gradients are rounded: by the script that says no plan, or by a plan that says so."""
    return not plan or "compression=" in plan


def _same_plan(attempt: Attempt, others: Sequence[Attempt]) -> str:
    """The script of ours that took the same plan before; empty if there is none."""
    if attempt.error or attempt.script not in (OURS_FASTEST, OURS_LOSSY):
        return ""
    mine = (OURS, OURS_FASTEST)
    return next((o.script for o in others if o.script in mine and o.plan == attempt.plan), "")


def largest_difference(losses: Sequence[float], reference: Sequence[float] | None) -> float | None:
    """Of losses by step, relative to the reference's; None if there is none."""
    if reference is None:
        return None
    pairs = zip(losses, reference, strict=True)
    return float(f"{max(abs(a - b) / abs(b) for a, b in pairs):.1e}")


def alone(subject: Subject, job: Job, rounds: int, steps: int) -> list[float]:
    """Losses of the same training in one process: rank 0's, the others wait."""
    losses: list[float] = []
    if job.rank == 0:
        model = subject.model()
        optimizer = adam(list(model.parameters()))
        for step in range(WARM_UP + rounds * steps):
            loss = subject.loss(model, subject.batch(step))
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.item())
    result: list[float] = from_all(losses)[0]
    return result
