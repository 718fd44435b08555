"""Ranks that are stopped, late or at their end are named, long before a collective's timeout."""

from __future__ import annotations

import itertools
import multiprocessing
import os
import signal
import socket
import sys
import time
from collections.abc import Callable
from multiprocessing.connection import Connection

import pytest
import torch
import torch.distributed as dist

from engines.runtime import heartbeat
from engines.runtime.activity import activity
from engines.runtime.failures import has_store
from engines.runtime.world import join_world, rank_error_context, require_same
from profiles.errors import RankError
from tests.nightly import nightly
from tests.workers import IMPORTED


def stop() -> None:
    os.kill(os.getpid(), signal.SIGSTOP)


def endless_loop() -> None:
    while True:
        time.sleep(0.1)


def raises() -> None:
    """As an interpreter ends that has an error."""
    try:
        raise ValueError("of the user")
    except ValueError:
        sys.excepthook(*sys.exc_info())
    ends()


def saves() -> None:
    """In place of the step that the others are in, as after a shorter loader."""
    activity._step = None
    world = join_world(timeout_s=500)
    with rank_error_context("saving"):
        require_same("checkpoint folder", "x x", world)


def ends() -> None:
    heartbeat._end_with_process()
    os._exit(0)


OF_RANK_1: dict[str, Callable[[], None]] = {
    "collective": stop,
    "store": stop,
    "late": lambda: time.sleep(4),
    "loops": endless_loop,
    "raises": raises,
    "ends": ends,
    "saves": saves,
    "last": lambda: None,
}


def job(rank: int, ranks: int, port: int, mode: str, answer: Connection) -> None:
    """A rank, of a process that is forked after torch was imported."""
    names = {"RANK": rank, "WORLD_SIZE": ranks, "LOCAL_RANK": rank, "MASTER_PORT": port}
    os.environ |= {name: str(value) for name, value in names.items()}
    os.environ["MASTER_ADDR"] = "127.0.0.1"
    heartbeat.EVERY_S, heartbeat.SILENT_S, heartbeat.LOOK_EVERY_S = 0.1, 1.5, 0.2
    world = join_world(timeout_s=500)
    heartbeat.start_heartbeat()
    dist.all_reduce(torch.ones(1))
    try:
        with activity.in_step(5, bound_s=1.0 if mode in ("loops", "saves") else 500):
            if rank == 1:
                OF_RANK_1[mode]()
            if mode in ("store", "raises", "ends"):
                require_same("thing", "one one", world)
            else:
                with rank_error_context("adding"):
                    dist.all_reduce(torch.ones(1))
        if mode == "last" and rank == 2:
            time.sleep(1)  # the others end meanwhile, rank 0 with the store among them
        answer.send("done" if has_store() else "the store is gone")
    except RankError as error:
        answer.send(error.what)
    ends()


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
        waited = [rank for rank in range(ranks) if rank != 1 or mode in ("late", "last")]
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
def test_a_rank_that_loops_in_a_step_is_named_with_its_step_and_the_place_in_its_code() -> None:
    for text in answers("loops"):
        assert "rank 1 is late: ranks 0, 2 wait in step 5, adding (gloo:all_reduce), for" in text
        assert "rank 1 is in step 5" in text
        assert "in endless_loop: time.sleep(0.1)" in text


@pytest.mark.dist
def test_ranks_that_wait_for_each_other_in_different_places_are_named() -> None:
    for text in answers("saves"):
        assert "rank 1 is late: ranks 0, 2 wait in step 5, adding (gloo:all_reduce), for" in text
        assert "rank 1 is between two steps, saving" in text


@pytest.mark.dist
@pytest.mark.parametrize(
    ("mode", "said"),
    [("ends", "rank 1 has ended"), ("raises", "rank 1 failed: ValueError: of the user")],
)
def test_a_rank_that_ends_is_named_to_those_that_wait_for_a_word_of_it(
    mode: str, said: str
) -> None:
    began = time.monotonic()
    assert answers(mode) == [said] * 2
    assert time.monotonic() - began < 30


@pytest.mark.dist
def test_a_late_rank_is_waited_for() -> None:
    assert answers("late") == ["done"] * 3


@pytest.mark.dist
def test_the_rank_that_runs_the_store_ends_last() -> None:
    assert answers("last") == ["done"] * 3
