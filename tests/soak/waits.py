"""Faults of one rank of a running training: when the others end, and if they name it.

Nothing is set to be quicker than it is for users, and no launcher ends the ranks that are left:
they find out by themselves. Ranks are forked from a process that imported torch.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import re
import socket
import sys
import time
from collections.abc import Collection, Iterable, Iterator, Mapping
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from pathlib import Path

import torch

from engines.plan import Plan
from engines.runtime import heartbeat
from tests.soak.faults import (
    AFTER,
    FAULTS,
    FAULTY,
    RAISING,
    FaultPlace,
    batches_of,
    faults_of,
    happened_at,
)
from tests.soak.report import Wait
from tests.soak.training import build
from tests.workers import IMPORTED

STEPS = 100_000
"""More than are done before anyone gives up."""
LONGEST_S, RAISED_S = 60.0, 10.0
"""Marks: of every fault, and of a rank that raises."""
BUILT_S, GIVEN_UP_S = 300.0, 150.0
BUILT = "built"


def waited(name: str, plan: str, fault: str, folder: Path) -> Wait:
    """Train under `plan`, let one rank have the fault, and see how the others end."""
    folder.mkdir(parents=True)
    job = FaultyJob(plan, fault, folder)
    try:
        built = job.collect(job.pipes, BUILT_S)
        if [text for _, text in built.values()] != [BUILT] * len(job.pipes):
            raise AssertionError(f"ranks did not come to train within {BUILT_S:.0f} s: {built}")
        answers = job.collect({r: p for r, p in job.pipes.items() if r != FAULTY}, GIVEN_UP_S)
    finally:
        job.end()
    at = happened_at(folder)
    silent = [rank for rank in job.pipes if rank != FAULTY and rank not in answers]
    texts = [text for _, text in answers.values()]
    seconds = GIVEN_UP_S if silent else max(when for when, _ in answers.values()) - at
    nameless = [text for text in texts if not names_rank(text, FAULTY, of=len(job.pipes))]
    most = RAISED_S if fault in RAISING else LONGEST_S
    wrong = [f"ranks {silent} did not end"] if silent else []
    wrong += [f"{seconds:.1f} s of at most {most:.0f} s"] * (not silent and seconds > most)
    wrong += [f"not named: {text.splitlines()[0]}" for text in nameless[:1]]
    collectives = [match[1] for text in texts if (match := re.search(r"\((gloo:\w+)\)", text))]
    return Wait(
        name=name,
        plan=plan,
        fault=fault,
        seconds=round(seconds, 1),
        most_s=most,
        named=not nameless and not silent,
        collective=collectives[0] if collectives else "",
        message=next((text.splitlines()[0] for text in (*nameless, *texts)), ""),
        differences=tuple(f"{name}, {fault}: {text}" for text in wrong),
    )


def names_rank(text: str, rank: int, *, of: int) -> bool:
    """True if the text names this rank, alone or among some of all.

    >>> [names_rank(text, 1, of=4) for text in ("rank 1 failed", "ranks 0-1", "ranks 1, 3")]
    [True, True, True]
    >>> [names_rank(text, 1, of=4) for text in ("rank 11 failed", "ranks 0, 2", "ranks 0-3")]
    [False, False, False]
    """
    for listed in re.findall(r"\branks? (\d+(?:(?:-|, | and )\d+)*)", text):
        named = set[int]()
        for part in re.split(", | and ", listed):
            first, _, last = part.partition("-")
            named |= set(range(int(first), int(last or first) + 1))
        if rank in named and len(named) < of:
            return True
    return False


class FaultyJob:
    """The ranks of a training, each a process with a pipe on which it tells its end."""

    def __init__(self, plan: str, fault: str, folder: Path) -> None:
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload([*IMPORTED, "tests.soak.waits"])
        self._jobs: list[BaseProcess] = []
        self.pipes: dict[int, Connection] = {}
        for rank in range(Plan.parse(plan).world_size):
            self.pipes[rank], theirs = context.Pipe(duplex=False)
            words = (plan, fault, rank, port, folder, theirs)
            # No daemon: those may have no worker that loads data.
            self._jobs.append(context.Process(target=_rank, args=words))
            self._jobs[-1].start()
            theirs.close()

    def collect(
        self, pipes: Mapping[int, Connection], within_s: float
    ) -> dict[int, tuple[float, str]]:
        """The next word of each rank: when it was said, and what; without those that said none."""
        answers: dict[int, tuple[float, str]] = {}
        deadline = time.monotonic() + within_s
        while left := {pipe: rank for rank, pipe in pipes.items() if rank not in answers}:
            ready = wait(list(left), timeout=max(0.0, deadline - time.monotonic()))
            if not ready:
                break
            for pipe in ready:
                assert isinstance(pipe, Connection)
                try:
                    answers[left[pipe]] = pipe.recv()
                except EOFError:
                    answers[left[pipe]] = time.monotonic(), "ended without a word"
        return answers

    def end(self) -> None:
        """Kill and reap every rank."""
        for job in self._jobs:
            job.kill()
        for job in self._jobs:
            job.join(10)
        for pipe in self.pipes.values():
            pipe.close()


def _rank(plan: str, fault: str, rank: int, port: int, folder: Path, answer: Connection) -> None:
    """Run a script on a rank, up to the end of its interpreter."""
    ranks = Plan.parse(plan).world_size
    names = {"RANK": rank, "WORLD_SIZE": ranks, "LOCAL_RANK": rank, "LOCAL_WORLD_SIZE": ranks}
    os.environ |= {name: str(value) for name, value in names.items()}
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    torch.set_num_threads(1)
    with open(folder / f"log.{rank}", "w") as log:
        os.dup2(log.fileno(), 1)
        os.dup2(log.fileno(), 2)
    try:
        _train(plan, fault, rank, folder, answer)
        answer.send((time.monotonic(), "trained to its end"))
    except Exception as error:
        with contextlib.suppress(BrokenPipeError):
            answer.send((time.monotonic(), str(error).strip() or repr(error)))
        sys.excepthook(*sys.exc_info())  # type: ignore[arg-type]
    heartbeat._end_with_process()
    for worker in multiprocessing.active_children():
        worker.kill()
    os._exit(0)


def _train(plan: str, fault: str, rank: int, folder: Path, answer: Connection) -> None:
    """Train without an end; from step `AFTER` on there is the fault."""
    parallel, _ = build(plan, steps=STEPS, timeout_s=None)
    place = FaultPlace(parallel, folder)
    loader = parallel.shard(batches_of(fault, rank, folder))
    answer.send((time.monotonic(), BUILT))
    while parallel.step < STEPS:
        for place.batch in loader:
            if parallel.step == AFTER:
                if rank == FAULTY:
                    FAULTS[fault](place)
                if fault == "full disk":
                    parallel.save(folder / "saves")
            parallel.train_step(place.batch)


def every_wait(
    plans: Mapping[str, str],
    folder: Path,
    known: Iterable[Wait],
    *,
    faults: Collection[str] = FAULTS,
) -> Iterator[Wait]:
    """Each of `faults` under each plan, but for those that are known."""
    done = {(each.name, each.fault) for each in known}
    for name, plan in plans.items():
        for fault in faults_of(name):
            if fault in faults and (name, fault) not in done:
                yield waited(name, plan, fault, folder / f"{name} {fault}")
