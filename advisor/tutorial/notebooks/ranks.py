"""Run a function on several local gloo processes, and return each one's result.

The function has to be importable by name: a fresh process does not have the notebook's cells.
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
# Time for other ranks to end after one has failed: their logs often contain the cause.
GRACE_S = 2.0
WAITING_SHARE = 0.8  # of the limit, so that a rank that waits in vain has time to report for whom
REAP_S = 10.0  # for the kernel to release a killed process's resources
LOG_CHARACTERS = 4000  # of a failed rank: a traceback and its context
# Imported by the fork server, since torch alone takes seconds. These imports start no thread, which
# a fork would not inherit.
_IMPORTED = ["advisor.auto.parallelize", "torch.distributed.pipelining"]


@dataclass(frozen=True, slots=True)
class _RankConfig:
    """Rank, ports and files of a process in the job."""

    rank: int
    ranks: int
    folder: Path
    timeout_s: float

    @property
    def log(self) -> Path:
        """Log file: output, and the traceback if it fails."""
        return self.folder / f"rank-{self.rank}"

    def tail(self) -> str:
        """Tail of the log."""
        return (
            self.log.read_text(errors="replace")[-LOG_CHARACTERS:].strip()
            if self.log.exists()
            else ""
        )


def on_ranks(
    function: Callable[..., T], *args: object, ranks: int, timeout_s: float = TIME_LIMIT_S
) -> list[T]:
    """Call `function(*args)` on each of `ranks` fresh processes; return results in rank order.

        losses = on_ranks(train, "dp_replicate=2", ranks=2)

    Ranks run on CPU, share its cores, and form a gloo group. They have ended when this returns or
    raises, including on an interrupt.

    Args:
        function: importable by name; arguments and result can be pickled.
        timeout_s: bound of the whole call; waits between ranks time out sooner.

    Raises:
        RankError: names the rank that failed first, or those that did not end, with their logs.
    """
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(_IMPORTED)
    processes: list[BaseProcess] = []
    pipes: list[Connection] = []
    with tempfile.TemporaryDirectory() as folder:
        places = [_RankConfig(rank, ranks, Path(folder), timeout_s) for rank in range(ranks)]
        try:
            for place in places:
                ours, theirs = context.Pipe(duplex=False)
                job = (theirs, place, function, args)
                process: BaseProcess = context.Process(target=_run_rank, args=job, daemon=True)
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


def _collected(pipes: Sequence[Connection], places: Sequence[_RankConfig]) -> list[T]:
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
            except EOFError:  # the process died without reporting a time
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
        logs = [(rank, places[rank].tail()) for rank in (*order, *late)]
        raise RankError(
            ", ".join(words),
            where="\n".join(f"rank {rank}: {text}" for rank, text in logs if text) or None,
        )
    return [results[rank] for rank in range(len(pipes))]


def _ranks(ranks: list[int]) -> str:
    return f"rank{'s' if len(ranks) > 1 else ''} {', '.join(map(str, ranks))}"


def _run_rank(
    pipe: Connection, place: _RankConfig, function: Callable[..., T], args: tuple[object, ...]
) -> None:
    """Body of a process: join the group, call the function, send the result. Errors go to its
    log."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the notebook handles it
    threading.Thread(target=_end_with_the_notebook, daemon=True).start()
    with place.log.open("w") as log:
        for stream in (1, 2):  # gloo writes to them too
            os.dup2(log.fileno(), stream)
        try:
            pipe.send((True, _called(place, function, args)))
        except BaseException:
            log.write(traceback.format_exc())
            log.flush()
            pipe.send((False, time.monotonic()))  # a clock common to all processes


def _called(place: _RankConfig, function: Callable[..., T], args: tuple[object, ...]) -> T:
    # Every reader has CPUs, in any number; an accelerator of this machine stays unused.
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
    dist.barrier()  # no rank leaves while others still communicate with it
    dist.destroy_process_group()  # a failing rank reports before it leaves
    return result


def _end_with_the_notebook() -> None:
    """Exit with the parent: a killed kernel cannot end its ranks, which could wait forever."""
    parent = multiprocessing.parent_process()
    assert parent is not None
    parent.join()
    os._exit(1)
