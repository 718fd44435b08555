"""A rank that is stopped ends the job by name, long before a collective's own timeout."""

from __future__ import annotations

import itertools
import multiprocessing
import os
import signal
import socket
import time
from multiprocessing.connection import Connection

import pytest
import torch
import torch.distributed as dist

from engines.runtime import heartbeat
from engines.runtime.world import join_world, leave_world, rank_error_context, require_same
from profiles.errors import RankError
from tests.nightly import nightly
from tests.workers import IMPORTED


def job(rank: int, ranks: int, port: int, mode: str, answer: Connection) -> None:
    """A rank, of a process that is forked after torch was imported."""
    names = {"RANK": rank, "WORLD_SIZE": ranks, "LOCAL_RANK": rank, "MASTER_PORT": port}
    os.environ |= {name: str(value) for name, value in names.items()}
    os.environ["MASTER_ADDR"] = "127.0.0.1"
    heartbeat.EVERY_S, heartbeat.SILENT_S = 0.1, 1.5
    world = join_world(timeout_s=500)
    heartbeat.start_heartbeat()
    dist.all_reduce(torch.ones(1))
    if rank == 1 and mode != "late":
        os.kill(os.getpid(), signal.SIGSTOP)
    if rank == 1:
        time.sleep(4)  # late, and alive
    try:
        if mode == "store":
            require_same("thing", "one one", world)
        else:
            with rank_error_context("adding"):
                dist.all_reduce(torch.ones(1))
        answer.send("done")
    except RankError as error:
        answer.send(error.what)
    if rank == 0:
        time.sleep(2)  # it runs the store, which the others ask
    leave_world()


def answers(mode: str, ranks: int = 3) -> list[str]:
    """Answers of all ranks but the stopped one, long before their groups' timeout."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(list(IMPORTED))
    pipes = [context.Pipe(duplex=False) for _ in range(ranks)]
    jobs = [
        context.Process(target=job, args=(rank, ranks, port, mode, theirs), daemon=True)
        for rank, (_, theirs) in enumerate(pipes)
    ]
    try:
        for each in jobs:
            each.start()
        waited = [rank for rank in range(ranks) if rank != 1 or mode == "late"]
        assert all(pipes[rank][0].poll(100) for rank in waited)
        return [pipes[rank][0].recv() for rank in waited]
    finally:
        for each in jobs:
            each.kill()
            each.join(10)
        for pipe in itertools.chain(*pipes):
            pipe.close()


@pytest.mark.dist
@pytest.mark.parametrize("mode", ["collective", *nightly("store")])
def test_a_stopped_rank_is_named_on_all_others(mode: str) -> None:
    texts = answers(mode)
    assert all("rank 1 shows no sign of life: it is stopped" in text for text in texts), texts


@pytest.mark.dist
def test_a_late_rank_is_waited_for() -> None:
    assert answers("late") == ["done"] * 3
