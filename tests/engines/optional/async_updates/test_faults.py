"""A rank is lost, or comes too late: who goes on, and what the others are told."""

from __future__ import annotations

import os
import signal
import socket
import time

import pytest
import torch
import torch.distributed as dist
from torch import nn

from engines.optional.async_updates.report import UpdateReport
from engines.parallel import ParallelModel
from engines.plan import Plan
from profiles.errors import RankError
from tests.engines.optional.async_updates.ranks import patience
from tests.engines.optional.async_updates.test_servers import QUADRATIC, _targets, plain
from tests.engines.optional.async_updates.wire import die
from tests.engines.parity import local_rows, spread
from tests.nightly import nightly
from tests.workers import Pool

Told = tuple[int, str, tuple[int, ...], int]
"""Steps that were made, the error that ended them, ranks that were lost, updates."""


def _lose(plan: str, lost: int, steps: int = 5, seconds: float = 20.0) -> Told:
    """Train; after two steps one rank's connections are shut down, as a dead one's are."""
    size = dist.get_world_size()
    world = patience(seconds, size=size)
    _, parallel = spread(QUADRATIC, plan, optimizer=plain, world=world)
    batch = local_rows(parallel, _targets(6), 6)
    made, said = 0, ""
    try:
        for step in range(steps):
            if dist.get_rank() == lost and step == 2:
                die()
                break
            parallel.train_step(batch)
            made += 1
    except RankError as error:
        said = str(error)
    # A worker whose gradients came late is past the steps that others made meanwhile: its end may
    # come after their last step, and the server hears of it a little later.
    until = time.monotonic() + (10.0 if dist.get_rank() == 0 and made == steps else 0.0)
    while not (report := _report(parallel)).gone and time.monotonic() < until:
        time.sleep(0.05)
    return made, said, report.gone, report.updates


def _report(parallel: ParallelModel) -> UpdateReport:
    assert parallel.update_report is not None
    return parallel.update_report


@pytest.mark.dist
@pytest.mark.parametrize(
    "plan",
    [
        "dp_replicate=3 servers=1 updates=asynchronous",
        "dp_replicate=3 servers=1 updates=asynchronous max_staleness=0",
        "dp_replicate=2 servers=1 backup_workers=1",
        "dp_replicate=1 servers=2 backup_workers=1",
    ],
)
def test_workers_continue_after_one_dies(pool: Pool, plan: str) -> None:
    server, *others = pool.run(_lose, plan, 3, world_size=4)
    lost = others.pop()
    assert lost[0] == 2
    for made, said, _, _ in (server, *others):
        assert (made, said) == (5, "")
    assert 3 in server[2]


@pytest.mark.dist
def test_a_step_that_needs_a_dead_worker_names_it(pool: Pool) -> None:
    server, _, *others = pool.run(_lose, "dp_replicate=3 servers=1", 1, world_size=4)
    for made, said, _, _ in (server, *others):
        assert made == 2
        assert said.startswith("rank 1 is gone")
    assert "2 of 3 workers are left, too few for a step" in server[1]
    assert "`backup_workers` replace slow and lost ones" in others[0][1]
    assert "rank 2 of 4, at step 3 of the server on rank 0" in others[0][1]


@pytest.mark.dist
@pytest.mark.parametrize(
    "plan",
    [
        "dp_replicate=2 servers=2",
        "dp_replicate=1 servers=2 backup_workers=1",
        *nightly("dp_replicate=2 servers=2 updates=asynchronous"),
    ],
)
def test_workers_name_a_dead_server(pool: Pool, plan: str) -> None:
    results = pool.run(_lose, plan, 1, 5000, 6.0, world_size=4)
    who = f"rank 1 (a server, on {socket.gethostname()})"
    said = [text for _, text, _, _ in results[2:]]
    # A step takes as many workers as there are replicas: one that is late may be past it.
    made = sorted(made for made, _, _, _ in results[2:])
    assert made[-Plan.parse(plan).dp_replicate] >= 2
    # Gone, as the worker or the other server saw; or, where the message was under way, it was not
    # taken in time. The other server leaves when its workers do, so who looks late may miss that
    # one first.
    ways = (f"{who} is gone", f"{who} did not take a message within 6 s")
    assert any(text.startswith(ways) for text in said)
    assert all("(a server, on " in text for text in said)
    assert all("look at the output of rank" in text for text in said)
    assert not any("backup_workers" in text for text in said)  # they replace workers alone


def _sleep(plan: str) -> tuple[str, float]:
    """The last worker comes to its second step long after the others have lost their patience."""
    world = patience(1.0, size=dist.get_world_size())
    _, parallel = spread(QUADRATIC, plan, optimizer=plain, world=world)
    batch = local_rows(parallel, _targets(6), 6)
    parallel.train_step(batch)
    if dist.get_rank() == 3:

        def sleep(module: nn.Module, args: object) -> None:
            time.sleep(3.0)

        parallel.module.register_forward_pre_hook(sleep)
    began = time.perf_counter()
    try:
        parallel.train_step(batch)
    except RankError as error:
        return str(error), time.perf_counter() - began
    return "", time.perf_counter() - began


@pytest.mark.dist
def test_waits_are_bounded_and_name_the_late_rank(pool: Pool) -> None:
    server, *workers = pool.run(_sleep, "dp_replicate=3 servers=1", world_size=4)
    for said, seconds in (server, *workers[:2]):
        assert said.startswith("rank 3 ")
        assert seconds < 2.5
    plan = "dp_replicate=3 servers=1 updates=asynchronous"
    *others, (late, _) = pool.run(_sleep, plan, world_size=4)
    assert [said for said, _ in others] == [""] * 3
    assert late.startswith("this rank was dropped: its gradient arrived after the step finished")


def _stand_still() -> tuple[str, float]:
    """The server's process is stopped, with its connections open, as behind a cut line. One worker
    has gradients for it, the other asks for parameters."""
    world = patience(3.0, size=dist.get_world_size())
    _, parallel = spread(
        QUADRATIC, "dp_replicate=2 servers=1 updates=asynchronous", optimizer=plain, world=world
    )
    batch = local_rows(parallel, _targets(6), 6)
    parallel.train_step(batch)
    server = torch.tensor(os.getpid())
    dist.broadcast(server, 0)
    workers = dist.new_group([1, 2])
    rank = dist.get_rank()
    if rank == 1:
        os.kill(int(server), signal.SIGSTOP)
    if rank > 0:
        dist.barrier(workers)
    began, said = time.perf_counter(), ""
    try:
        if rank == 2:
            parallel.synchronise()
        else:
            parallel.train_step(batch)
    except RankError as error:
        said = str(error)
    seconds = time.perf_counter() - began
    if rank > 0:
        dist.barrier(workers)
    if rank == 1:
        os.kill(int(server), signal.SIGCONT)
    return said, seconds


@pytest.mark.dist
def test_a_stalled_server_is_named_in_time(pool: Pool) -> None:
    _, giving, asking = pool.run(_stand_still, world_size=3)
    who = f"rank 0 (a server, on {socket.gethostname()})"
    assert giving[0].startswith(f"{who} did not take a message within 3 s")
    assert asking[0].startswith(f"{who} did not answer within 3 s")
    assert max(giving[1], asking[1]) < 5.0
