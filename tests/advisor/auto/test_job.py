"""Single processes and jobs: the cluster that is planned for, and how many devices they drive."""

from __future__ import annotations

import os
from types import SimpleNamespace
from unittest.mock import patch

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from advisor import auto_parallelize
from advisor.auto.job import machines_of, require_ranks
from engines.plan import PartialPlan
from engines.runtime.world import World, join_world
from profiles.errors import PlanError
from profiles.machine.clusters import cluster_from_name
from tests.placed import put
from tests.workers import Pool

ALONE = World(rank=0, size=1, device=torch.device("cpu"), timeout_s=1.0)
NO_GPU = pytest.mark.skipif(torch.cuda.is_available(), reason="torch would use the GPUs")


def batch() -> tuple[Tensor, Tensor]:
    draw = torch.Generator().manual_seed(1)
    return torch.randn(8, 4, generator=draw), torch.randn(8, 2, generator=draw)


def sgd(parameters: object) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.1)  # type: ignore[arg-type]


@pytest.fixture
def four_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    shown = SimpleNamespace(name="NVIDIA H100 80GB HBM3", total_memory=84_929_347_584)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 4)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: shown)
    monkeypatch.setattr("profiles.machine.gpus.launch_time", lambda _: 5e-5)


@pytest.mark.usefixtures("four_gpus")
@pytest.mark.parametrize(
    ("plan", "devices"),
    [
        ("", 1),
        ("accumulation=2", 1),
        ("data_parallel=threads", 4),
        ("data_parallel=threads dp_replicate=2", 2),
    ],
)
def test_a_single_process_drives_one_device_but_threads_drive_several(
    plan: str, devices: int
) -> None:
    cluster = machines_of(nn.Linear(2, 2), PartialPlan.parse(plan), ALONE)
    assert (cluster.num_nodes, cluster.devices_per_node) == (1, devices)
    assert (cluster.intra is None) == (devices == 1)


@pytest.mark.usefixtures("four_gpus")
def test_the_parts_of_a_module_split_by_hand_are_driven_by_one_process() -> None:
    model = nn.Sequential(put(nn.Linear(2, 2), "cuda:0"), put(nn.Linear(2, 2), "cuda:1"))
    assert machines_of(model, PartialPlan(), ALONE).devices_per_node == 2


@NO_GPU
@pytest.mark.parametrize("plan", ["data_parallel=threads", "data_parallel=threads dp_replicate=2"])
def test_threads_in_one_process_train_as_one_device_does(
    plan: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without GPUs nn.DataParallel calls the module itself, on the whole batch."""
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    torch.manual_seed(0)
    model, plain = nn.Linear(4, 2), nn.Linear(4, 2)
    plain.load_state_dict(model.state_dict())
    x, y = batch()
    parallel = auto_parallelize(
        model,
        sample=(x[:4], y[:4]),
        loss_fn=F.mse_loss,
        optimizer=sgd,
        plan=plan,
        cluster=cluster_from_name("2xA100-SXM-80GB"),
        learns=False,
    )
    assert isinstance(parallel._runner, nn.DataParallel)
    assert parallel.plan.dp_replicate == 2
    assert parallel.plan.global_batch_size == 8
    optimizer = sgd(plain.parameters())
    for _ in range(3):
        parallel.train_step((x, y))
        F.mse_loss(plain(x), y).backward()
        optimizer.step()
        optimizer.zero_grad()
    torch.testing.assert_close(list(model.parameters()), list(plain.parameters()))


@pytest.mark.parametrize(
    ("seen", "plan", "said", "hint"),
    [
        (0, "data_parallel=threads", "drives 2 accelerators: this process sees 0", "DDP"),
        (2, "data_parallel=threads dp_replicate=4", "4 accelerators: this process sees 2", "=2"),
    ],
)
def test_threads_without_devices_are_refused_with_the_numbers(
    seen: int, plan: str, said: str, hint: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: seen)
    with pytest.raises(PlanError, match=said) as caught:
        auto_parallelize(nn.Linear(4, 2), sample=batch(), loss_fn=F.mse_loss, plan=plan)
    assert hint in caught.value.hints[0]


def test_threads_in_a_job_of_several_processes_are_refused() -> None:
    job = World(rank=0, size=2, device=torch.device("cpu"), timeout_s=1.0)
    with pytest.raises(PlanError, match="drives 2 accelerators: this job has 2 processes"):
        require_ranks(PartialPlan.parse("data_parallel=threads dp_replicate=2"), job)


def _without_launcher() -> tuple[int, int]:
    """Nodes and ranks that a script sees which made its process group itself."""
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE"):
        del os.environ[name]
    with patch("advisor.auto.job.recall_or_bench", lambda cluster: cluster):
        cluster = machines_of(nn.Linear(2, 2), PartialPlan(), join_world(timeout_s=20))
    return cluster.num_nodes, cluster.devices_per_node


@pytest.mark.dist
def test_a_process_group_of_the_users_own_is_a_job(pool: Pool) -> None:
    assert pool.run(_without_launcher, world_size=2) == [(1, 2), (1, 2)]
