"""Ranks that disagree, are late or go away are named, and no rank waits for ever."""

from __future__ import annotations

import time
from datetime import timedelta
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from torch import nn

from engines.plan import Plan
from engines.runtime import world as world_module
from engines.runtime.world import (
    World,
    join_world,
    rank_error_context,
    require_own_gpu,
    require_same_plan,
)
from profiles.errors import InputError, PlanError, RankError
from profiles.torch_compat import bound_waits
from tests.engines.parity import HSDP, KINDS, local_rows, parallelize
from tests.golden import check
from tests.nightly import nightly
from tests.workers import Pool

BOUND_S = 6.0  # of a wait; ranks of a machine with other work are late by seconds


def _disagree() -> str:
    plan = Plan.parse("dp_shard=3" if dist.get_rank() == 1 else "dp_replicate=3")
    try:
        require_same_plan(plan, join_world())
    except PlanError as error:
        return str(error)
    return "no error"


@pytest.mark.dist
def test_different_plans_on_ranks_are_refused_before_the_first_collective(pool: Pool) -> None:
    texts = pool.run(_disagree, world_size=3)
    assert len(set(texts)) == 1
    check("error_plans_differ.txt", f"error: {texts[0]}\n")


def _late() -> str:
    if dist.get_rank() == 2:
        time.sleep(3)
        return "late"
    world = World(rank=dist.get_rank(), size=3, device=torch.device("cpu"), timeout_s=1.0)
    try:
        require_same_plan(Plan(), world)
    except RankError as error:
        return error.what
    return "no error"


@pytest.mark.dist
def test_an_unresponsive_rank_is_named(pool: Pool) -> None:
    texts = pool.run(_late, world_size=3)
    assert texts[:2] == ["rank 2 did not answer within 1 s"] * 2


def _one_rank_raises(plan: str) -> tuple[str, str, str]:
    """The error of each rank when rank 1's forward raises, and its cause."""
    assert dist.group.WORLD is not None
    bound_waits(dist.group.WORLD, timedelta(seconds=BOUND_S))
    size = Plan.parse(plan).world_size
    world = World(rank=dist.get_rank(), size=size, device=torch.device("cpu"), timeout_s=BOUND_S)
    case, _, parallel = parallelize("gpt", plan, world=world)
    batch = local_rows(parallel, case.batch(8), 8)
    parallel.train_step(batch)
    if dist.get_rank() == 1:

        def fail(module: nn.Module, args: object) -> None:
            raise KeyError("user's own")

        parallel.module.get_submodule("norm").register_forward_pre_hook(fail)
    try:
        parallel.train_step(batch)
    except Exception as error:
        return type(error).__name__, str(error), str(error.__cause__)
    return "no error", "", ""


@pytest.mark.dist
@pytest.mark.parametrize("plan", [HSDP, *nightly(*KINDS)])
def test_a_failure_reaches_the_other_ranks_with_its_name_in_bounded_time(
    pool: Pool, plan: str
) -> None:
    size = Plan.parse(plan).world_size
    results = pool.run(_one_rank_raises, plan, world_size=size, timeout_s=30)
    for rank, (kind, text, cause) in enumerate(results):
        if rank == 1:
            assert (kind, text) == ("KeyError", '"user\'s own"')
            continue
        assert kind == "RankError"
        assert text.startswith('rank 1 failed: KeyError: "user\'s own"')
        assert f"rank {rank} of {size}, in step 2" in text
        assert "gloo" in cause


def test_errors_of_other_kinds_are_raised_unchanged() -> None:
    with pytest.raises(RuntimeError, match=r"^(mm: )?mat1 and mat2"), rank_error_context("trying"):
        torch.ones(2, 3) @ torch.ones(2, 3)


def test_a_rank_takes_its_gpu_before_it_joins(monkeypatch: pytest.MonkeyPatch) -> None:
    done: list[object] = []
    launched = {"RANK": 5, "WORLD_SIZE": 8, "LOCAL_RANK": 1, "MASTER_ADDR": "x", "MASTER_PORT": 1}
    for name, value in launched.items():
        monkeypatch.setenv(name, str(value))
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 4)
    monkeypatch.setattr(torch.cuda, "set_device", done.append)
    monkeypatch.setattr(world_module, "attempt_store", lambda **_: (None, 5, 8))
    monkeypatch.setattr(world_module, "require_own_gpu", lambda store, rank: done.append("own"))
    monkeypatch.setattr(dist, "init_process_group", lambda backend, **_: done.append(backend))
    join_world()
    assert done[:3] == [torch.device("cuda", 1), "own", "cpu:gloo,cuda:nccl"]


@pytest.mark.parametrize("ids", [("a", "b"), ("a", "a")])
def test_ranks_that_share_a_gpu_are_refused_when_they_join(
    ids: tuple[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each may see one GPU, and call it 0."""
    store = dist.HashStore()
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)

    def join(rank: int) -> None:
        properties = SimpleNamespace(uuid=ids[rank])
        monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: properties)
        require_own_gpu(store, rank)

    join(0)
    join(0)  # the rank that has it
    if ids[0] != ids[1]:
        join(1)
        return
    with pytest.raises(InputError, match="rank 1 and rank 0 have the same GPU") as error:
        join(1)
    assert error.value.where == "2 ranks on this node, 1 GPU"
    assert "--nproc-per-node 1" in str(error.value)
