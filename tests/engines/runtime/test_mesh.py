"""Coordinates and groups of the ranks, and what the ranks of the tp axis draw."""

from __future__ import annotations

import random
import time

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import nn

from engines.plan import Plan
from engines.runtime.mesh import Axis, Mesh
from engines.runtime.shared_rng import SharedRng
from engines.runtime.world import World, join_world
from tests.workers import Pool


def places(plan: str) -> dict[str, tuple[int, tuple[int, ...], float]]:
    """On each axis: the coordinate, the ranks, and the sum of global ranks over its group."""
    mesh = Mesh(Plan.parse(plan), join_world())
    results = {}
    for name, axis in (("pp", mesh.pp), ("data", mesh.data), ("tp", mesh.tp)):
        total = torch.tensor(float(dist.get_rank()))
        if axis.group is not None:
            dist.all_reduce(total, group=axis.group)
        results[name] = (axis.position, axis.ranks, total.item())
    return results


@pytest.mark.dist
def test_pp_is_the_slowest_axis_and_tp_the_fastest(pool: Pool) -> None:
    staged = pool.run(places, "pp=2 dp_replicate=2 schedule=gpipe stages=a", world_size=4)
    assert staged[2] == {"pp": (1, (0, 2), 2.0), "data": (0, (2, 3), 5.0), "tp": (0, (2,), 2.0)}
    split = pool.run(places, "dp_shard=2 tp=2", world_size=4)
    assert split[1] == {"pp": (0, (1,), 1.0), "data": (0, (1, 3), 4.0), "tp": (1, (0, 1), 1.0)}
    both = pool.run(places, "pp=2 tp=2 schedule=gpipe stages=a", world_size=4)
    assert both[3] == {"pp": (1, (1, 3), 4.0), "data": (0, (3,), 3.0), "tp": (1, (2, 3), 5.0)}


def between() -> float:
    """The sum of ranks over the group of the first and last of three stages."""
    mesh = Mesh(Plan.parse("pp=4 schedule=gpipe"), join_world())
    group = mesh.between_stages([0, 3])
    total = torch.tensor(float(dist.get_rank()))
    if group is not None:
        dist.all_reduce(total, group=group)
    return total.item()


@pytest.mark.dist
def test_owners_of_a_tied_weight_have_a_group_and_the_stages_between_do_not(pool: Pool) -> None:
    assert pool.run(between, world_size=4) == [3.0, 1.0, 2.0, 3.0]


def in_vain() -> float:
    """Seconds that a rank waits for another one of its axis."""
    world = join_world()
    mesh = Mesh(Plan.parse("dp_replicate=2 tp=2"), World(world.rank, 4, world.device, 1.0))
    began = time.monotonic()
    if world.rank == 0:
        with pytest.raises(RuntimeError, match="Timed out waiting 1000ms"):
            dist.all_reduce(torch.ones(1), group=mesh.tp.group)
    took_s = time.monotonic() - began
    dist.barrier()
    return took_s


@pytest.mark.dist
def test_waits_on_an_axis_are_bounded(pool: Pool) -> None:
    assert 0.9 < pool.run(in_vain, world_size=4, timeout_s=30)[0] < 10


def dropped() -> tuple[list[int], list[int], int]:
    """Elements of 64 that dropout leaves in two steps; and a random number drawn after them."""
    mesh = Mesh(Plan.parse("dp_replicate=2 tp=2"), join_world())
    draws = SharedRng(mesh.tp, torch.device("cpu"))
    surviving = []
    for _ in range(2):
        with draws.shared():
            first = nn.functional.dropout(torch.ones(64), 0.5)
            with draws.shared():  # already shared: it goes on where it was
                second = nn.functional.dropout(torch.ones(64), 0.5)
        assert not torch.equal(first, second)
        surviving.append([int(n) for n in (first * second).nonzero()])
    return surviving[0], surviving[1], int(torch.randint(1000, ()))


@pytest.mark.dist
def test_tp_ranks_share_dropout_masks_and_replicas_do_not(pool: Pool) -> None:
    results = pool.run(dropped, world_size=4)
    steps = [rank[:2] for rank in results]
    assert steps[0] == steps[1] != steps[2] == steps[3]
    assert steps[0][0] != steps[0][1]


def drawn_elsewhere() -> tuple[list[float], list[float]]:
    """Numbers of Python and numpy that a rank draws in two steps and after them, seeded apart."""
    mesh = Mesh(Plan.parse("tp=2"), join_world())
    draws = SharedRng(mesh.tp, torch.device("cpu"))
    random.seed(mesh.tp.position)
    np.random.seed(mesh.tp.position)
    shared: list[float] = []
    for _ in range(2):
        with draws.shared():
            shared += [random.random(), np.random.rand()]
    return shared, [random.random(), np.random.rand()]


@pytest.mark.dist
def test_tp_ranks_share_numbers_of_python_and_numpy_in_a_step_and_not_after_it(pool: Pool) -> None:
    (first, after_first), (second, after_second) = pool.run(drawn_elsewhere, world_size=2)
    assert first == second
    assert len(set(first)) == 4
    random.seed(0)
    np.random.seed(0)
    assert after_first == [random.random(), np.random.rand()]
    assert set(after_first).isdisjoint(after_second)


def test_one_rank_draws_no_shared_random_numbers() -> None:
    torch.manual_seed(5)
    wanted = torch.rand(1)
    torch.manual_seed(5)
    with SharedRng(Axis((0,), 0, None), torch.device("cpu")).shared():
        assert torch.equal(torch.rand(1), wanted)
