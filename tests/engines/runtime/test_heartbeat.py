"""Ranks that are stopped, late or at their end are named, long before a collective's timeout."""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
from collections.abc import Callable

import pytest
import torch
import torch.distributed as dist

from engines.runtime import heartbeat
from engines.runtime.activity import activity
from engines.runtime.failures import has_store
from engines.runtime.world import World, join_world, rank_error_context, require_same
from tests.engines.runtime import fault_jobs
from tests.engines.runtime.fault_jobs import TIMEOUT_S, ends
from tests.nightly import nightly


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
    world = World(dist.get_rank(), dist.get_world_size(), torch.device("cpu"), TIMEOUT_S)
    with rank_error_context("saving"):
        require_same("checkpoint folder", "x x", world)


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


def job(mode: str) -> str:
    world = World(dist.get_rank(), dist.get_world_size(), torch.device("cpu"), TIMEOUT_S)
    heartbeat.SILENT_S = 1.5
    dist.all_reduce(torch.ones(1))
    with activity.in_step(5, bound_s=1.0 if mode in ("loops", "saves") else TIMEOUT_S):
        if world.rank == 1:
            OF_RANK_1[mode]()
        if mode in ("store", "raises", "ends"):
            require_same("thing", "one one", world)
        else:
            with rank_error_context("adding"):
                dist.all_reduce(torch.ones(1))
    if mode == "last" and world.rank == 2:
        time.sleep(1)  # the others end meanwhile, rank 0 with the store among them
    return "done" if has_store() else "the store is gone"


def beating() -> list[str]:
    """Threads of the heartbeat."""
    names = ("heartbeat", "store watch")
    return sorted(thread.name for thread in threading.enumerate() if thread.name in names)


def threads_of_two_groups() -> str:
    """Threads in a group, and after the end of the next one's heartbeat."""
    first = beating()
    dist.destroy_process_group()
    os.environ["MASTER_PORT"] = str(int(os.environ["MASTER_PORT"]) + 1)
    join_world(timeout_s=TIMEOUT_S)
    second = beating()
    dist.barrier()
    heartbeat.end_heartbeat()
    return f"{first} {second} {beating()}"


def test_no_thread_outlives_the_end_of_its_heartbeat() -> None:
    """The process aborts if it ends while one holds the group, or is in a call of the store."""
    one = ["heartbeat", "store watch"]
    assert fault_jobs.answers(threads_of_two_groups, ranks=2) == [f"{one} {one} []"] * 2


def answers(mode: str) -> list[str]:
    """Of all ranks but the one that fails."""
    without = () if mode in ("late", "last") else (1,)
    return fault_jobs.answers(job, mode, ranks=3, without=without)


@pytest.mark.dist
@pytest.mark.parametrize("mode", ["collective", *nightly("store")])
def test_a_stopped_rank_is_named_on_all_others(mode: str) -> None:
    texts = answers(mode)
    assert all("rank 1 shows no sign of life: it is stopped" in text for text in texts), texts


def _without_rank_0(is_in_collective: bool) -> str:
    """The first rank runs the store of the job, and is stopped with it."""
    world = World(dist.get_rank(), dist.get_world_size(), torch.device("cpu"), TIMEOUT_S)
    heartbeat.SILENT_S = 1.5
    dist.all_reduce(torch.ones(1))
    if world.rank == 0:
        stop()
    with rank_error_context("adding"):
        if not is_in_collective:
            require_same("thing", "one one", world)
        dist.all_reduce(torch.ones(1))
    return "done"


@pytest.mark.dist
@pytest.mark.parametrize("is_in_collective", [True, False])
def test_no_rank_waits_for_a_store_whose_process_is_stopped(is_in_collective: bool) -> None:
    """torch would: its limits are of what the store does, not of the store."""
    texts = fault_jobs.answers(_without_rank_0, is_in_collective, ranks=2, without=(0,))
    assert all("rank 0" in text and "store" in text for text in texts), texts


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
