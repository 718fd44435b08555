"""A function on several local processes that talk through gloo, and what each of them returned.

What ranks run has to be importable by name: a fresh process does not have the cells of a notebook.
"""

from __future__ import annotations

import multiprocessing
import os
import signal
import tempfile
import threading
import time
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import TypeVar

from profiles.errors import RankError
from profiles.machine.host import machine_cores

T = TypeVar("T")

TIME_LIMIT_S = 120.0
# How long the others may still take once one rank has failed: they often say what they saw of it.
GRACE_S = 2.0
WAITING_SHARE = 0.8  # of the limit: who waits in vain has time to say for whom
REAP_S = 10.0  # for the kernel to take back what a killed process had
LOG_CHARACTERS = 4000  # of a rank that failed: a traceback and what led to it
# By the process that ranks are forked from: torch alone takes seconds. None of it starts a thread,
# which no fork would have.
_IMPORTED = ["advisor.auto.parallelize", "torch.distributed.pipelining"]


@dataclass(frozen=True, slots=True)
class _Place:
    """What a process is told of its place in the job."""

    rank: int
    ranks: int
    folder: Path
    timeout_s: float

    @property
    def log(self) -> Path:
        """What it prints, and the error that ends it."""
        return self.folder / f"rank-{self.rank}"

    def said(self) -> str:
        """The end of the log."""
        return (
            self.log.read_text(errors="replace")[-LOG_CHARACTERS:].strip()
            if self.log.exists()
            else ""
        )


def on_ranks(
    function: Callable[..., T], *args: object, ranks: int, timeout_s: float = TIME_LIMIT_S
) -> list[T]:
    """Call `function(*args)` on each of `ranks` fresh processes at once; results in rank order.

        losses = on_ranks(train, "dp_replicate=2", ranks=2)

    They compute on the processor, share its cores, and form a gloo group. However this ends (an
    error, an interrupt), the processes have ended before it does.

    Args:
        function: importable by its name; arguments and result can be pickled.
        timeout_s: bound of the whole; a wait of a rank for another ends sooner.

    Raises:
        RankError: names the rank that failed first, or those that did not end, with what they said.
    """
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(_IMPORTED)
    processes: list[BaseProcess] = []
    pipes: list[Connection] = []
    with tempfile.TemporaryDirectory() as folder:
        places = [_Place(rank, ranks, Path(folder), timeout_s) for rank in range(ranks)]
        try:
            for place in places:
                ours, theirs = context.Pipe(duplex=False)
                job = (theirs, place, function, args)
                process: BaseProcess = context.Process(target=_be_a_rank, args=job, daemon=True)
                process.start()
                theirs.close()
                processes.append(process)
                pipes.append(ours)
            return _collected(pipes, places)
        finally:
            for one in processes:
                one.kill()
            for one in processes:
                one.join(REAP_S)
            for pipe in pipes:
                pipe.close()


def _collected(pipes: Sequence[Connection], places: Sequence[_Place]) -> list[T]:
    results: dict[int, T] = {}
    failed: dict[int, float] = {}
    waiting = {pipe: rank for rank, pipe in enumerate(pipes)}
    deadline = time.monotonic() + places[0].timeout_s
    while waiting and time.monotonic() < deadline:
        for pipe in wait(list(waiting), timeout=max(0.0, deadline - time.monotonic())):
            assert isinstance(pipe, Connection)
            rank = waiting.pop(pipe)
            try:
                succeeded, value = pipe.recv()
            except EOFError:  # the process died, without a word of when
                succeeded, value = False, 0.0
            if succeeded:
                results[rank] = value
            else:
                failed[rank] = value
                deadline = min(deadline, time.monotonic() + GRACE_S)
    late = sorted(waiting.values())
    if failed or late:
        order = sorted(failed, key=failed.__getitem__)
        words = [f"rank {order[0]} failed"] if order else []
        words += [f"and then {_ranks(order[1:])}"] if order[1:] else []
        words += [f"{_ranks(late)} did not end within {places[0].timeout_s:.0f} s"] if late else []
        said = [(rank, places[rank].said()) for rank in (*order, *late)]
        raise RankError(
            ", ".join(words),
            where="\n".join(f"rank {rank}: {text}" for rank, text in said if text) or None,
        )
    return [results[rank] for rank in range(len(pipes))]


def _ranks(ranks: list[int]) -> str:
    return f"rank{'s' if len(ranks) > 1 else ''} {', '.join(map(str, ranks))}"


def _be_a_rank(
    pipe: Connection, place: _Place, function: Callable[..., T], args: tuple[object, ...]
) -> None:
    """The life of one process: join, call, answer. What it raises is in its log."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # an interrupt is for the notebook, which ends us
    threading.Thread(target=_end_with_the_notebook, daemon=True).start()
    with place.log.open("w") as log:
        for stream in (1, 2):  # gloo writes to them too
            os.dup2(log.fileno(), stream)
        try:
            pipe.send((True, _called(place, function, args)))
        except BaseException:
            log.write(traceback.format_exc())
            log.flush()
            pipe.send((False, time.monotonic()))  # one clock for all processes


def _called(place: _Place, function: Callable[..., T], args: tuple[object, ...]) -> T:
    # Processors are what every reader has, in any number; a card of this machine stays unused.
    os.environ |= {
        "CUDA_VISIBLE_DEVICES": "",
        "GLOO_SOCKET_IFNAME": "lo",
        "RANK": str(place.rank),
        "LOCAL_RANK": str(place.rank),
        "WORLD_SIZE": str(place.ranks),
        "LOCAL_WORLD_SIZE": str(place.ranks),
    }
    import torch
    import torch.distributed as dist

    torch.set_num_threads(max(1, machine_cores() // place.ranks))
    torch.manual_seed(0)
    dist.init_process_group(
        "gloo",
        init_method=f"file://{place.folder}/meeting",
        rank=place.rank,
        world_size=place.ranks,
        timeout=timedelta(seconds=WAITING_SHARE * place.timeout_s),
    )
    dist.barrier()
    result = function(*args)
    dist.barrier()  # nobody leaves while others still talk to him
    dist.destroy_process_group()  # one that fails stays until it has said so
    return result


def _end_with_the_notebook() -> None:
    """A kernel that is killed cannot end its ranks; one that waits for another would stay."""
    parent = multiprocessing.parent_process()
    assert parent is not None
    parent.join()
    os._exit(1)
