"""Jobs whose rank 1 fails: their ranks are forked, watch each other quickly, and answer."""

from __future__ import annotations

import itertools
import multiprocessing
import os
import socket
import time
from collections.abc import Callable
from multiprocessing.connection import Connection
from typing import Any

from engines.runtime import activity, heartbeat
from engines.runtime.world import join_world
from profiles.errors import RankError
from tests.workers import IMPORTED

TIMEOUT_S = 500
"""Of a collective: no fault waits for it."""
LONGEST_S = 100


def ends() -> None:
    """As an interpreter ends."""
    heartbeat._end_with_process()
    os._exit(0)


def _rank(
    rank: int, ranks: int, port: int, body: Callable[..., str], words: Any, answer: Connection
) -> None:
    """A rank, of a process that is forked after torch was imported."""
    names = {"RANK": rank, "WORLD_SIZE": ranks, "LOCAL_RANK": rank, "MASTER_PORT": port}
    os.environ |= {name: str(value) for name, value in names.items()}
    os.environ["MASTER_ADDR"] = "127.0.0.1"
    heartbeat.EVERY_S, heartbeat.LOOK_EVERY_S = 0.1, 0.2
    heartbeat.ENDED_AFTER_S = activity.STACK_AFTER_S = 0.5
    join_world(timeout_s=TIMEOUT_S)
    try:
        answer.send(body(*words))
    except RankError as error:
        answer.send(error.what)
    ends()


def answers(
    body: Callable[..., str], *words: Any, ranks: int, without: tuple[int, ...] = ()
) -> list[str]:
    """Answers of `body(*words)` on the ranks, or their RankErrors, long before groups time out.

    Args:
        without: ranks that do not answer.
    """
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(list(IMPORTED))
    pipes = [context.Pipe(duplex=False) for _ in range(ranks)]
    jobs = [
        context.Process(target=_rank, args=(rank, ranks, port, body, words, theirs), daemon=True)
        for rank, (_, theirs) in enumerate(pipes)
    ]
    try:
        for each in jobs:
            each.start()
        waited = [rank for rank in range(ranks) if rank not in without]
        deadline = time.monotonic() + LONGEST_S
        assert all(pipes[rank][0].poll(deadline - time.monotonic()) for rank in waited)
        return [pipes[rank][0].recv() for rank in waited]
    finally:
        for each in jobs:
            each.kill()
            each.join(10)
        for pipe in itertools.chain(*pipes):
            pipe.close()
