"""Conditions of a machine that end a training: without the warning they really do."""

from __future__ import annotations

import gc
import itertools
import logging
import os
import resource
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from engines.runtime.preflight import (
    FILES_OF_A_GROUP,
    job_risks,
    open_files,
    peer_to_peer,
    shared_memory,
)
from tests.engines.parity import alone
from tests.workers import Pool

MIB = 2**20
OPEN_PCIE = {"devices": 2, "over_pcie": True, "iommu_groups": 30, "environment": {}}


def test_direct_copies_between_gpus_under_an_iommu_are_warned_of() -> None:
    (risk,) = peer_to_peer(**OPEN_PCIE)  # type: ignore[arg-type]
    assert "2 GPUs copy to each other over PCIe, and the IOMMU is on (30 groups)" in str(risk)
    assert "set NCCL_P2P_DISABLE=1" in str(risk)


@pytest.mark.parametrize(
    "change",
    [
        {"devices": 1},
        {"over_pcie": False},
        {"iommu_groups": 0},
        {"environment": {"NCCL_P2P_DISABLE": "1"}},
    ],
)
def test_without_one_of_the_conditions_they_are_not(change: dict[str, object]) -> None:
    assert not list(peer_to_peer(**{**OPEN_PCIE, **change}))  # type: ignore[arg-type]


def test_the_groups_of_the_iommu_are_counted(tmp_path: Path) -> None:
    for number in range(3):
        (tmp_path / f"sys/kernel/iommu_groups/{number}").mkdir(parents=True)
    risks = job_risks(ranks=2, groups=1, devices=2, over_pcie=True, root=tmp_path)
    assert any("(3 groups)" in str(risk) for risk in risks)


def _groups_under_a_limit(extra: int) -> str:
    """The error of three more groups where so many more files may be open."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    gc.collect()
    used = {int(name) for name in os.listdir("/proc/self/fd")}
    free = (number for number in itertools.count() if number not in used)
    # The limit is on the numbers of files, which may have gaps.
    resource.setrlimit(resource.RLIMIT_NOFILE, (next(itertools.islice(free, extra, None)), hard))
    try:
        for _ in range(3):
            dist.new_group([0, 1])
    except RuntimeError as error:
        return str(error)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    return "connected"


@pytest.mark.dist
def test_groups_that_have_no_files_left_fail_and_the_rule_is_on_the_safe_side(pool: Pool) -> None:
    # The rule leaves a process files of its own; connecting anew takes one of them for a moment.
    needed = 3 * (1 + FILES_OF_A_GROUP)
    assert pool.run(_groups_under_a_limit, needed + 8, world_size=2) == ["connected"] * 2
    for text in pool.run(_groups_under_a_limit, 2, world_size=2):
        assert "Too many open files" in text
    assert list(open_files(limit=1024, ranks=512, groups=3))
    assert not list(open_files(limit=65536, ranks=512, groups=3))


LOADING = """
import torch
from torch.utils.data import DataLoader, TensorDataset
data = TensorDataset(torch.zeros(64, 2**18))
print(sum(len(x) for (x,) in DataLoader(data, batch_size=8, num_workers=2, prefetch_factor=2)))
"""


@pytest.mark.parametrize(("size_mib", "is_enough"), [(4, False), (96, True)])
def test_workers_die_where_shared_memory_is_full(size_mib: int, is_enough: bool) -> None:
    """Batches of 8 MiB, two workers that load two ahead: 32 MiB. In a /dev/shm of its own."""
    mount = f"mount -t tmpfs -o size={size_mib}m tmpfs /dev/shm"
    if subprocess.run(["unshare", "-m", "sh", "-c", mount], capture_output=True).returncode:
        pytest.skip("this user may not mount a /dev/shm")
    script = [f"{mount} && exec {sys.executable} -c '{LOADING}'"]
    ended = subprocess.run(
        ["unshare", "-m", "sh", "-c", *script], capture_output=True, text=True, timeout=120
    )
    assert (ended.returncode == 0) is is_enough
    if not is_enough:
        assert "shared memory" in ended.stderr or "No space left" in ended.stderr
    risks = shared_memory(
        free_bytes=size_mib * MIB, workers=2, prefetch=2, batch_bytes=8 * MIB, ranks=1
    )
    assert bool(list(risks)) is not is_enough


def test_a_loader_that_wants_more_shared_memory_than_there_is_is_warned_of(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    from engines.data import loader as loaders

    _, parallel = alone("gpt")
    monkeypatch.setattr(loaders, "shm_free_bytes", lambda: 100)
    dataset = torch.utils.data.TensorDataset(*2 * [torch.zeros(64, 12, dtype=torch.long)])
    with caplog.at_level(logging.WARNING):
        parallel.shard(torch.utils.data.DataLoader(dataset, batch_size=8))
        assert not caplog.records
        parallel.shard(torch.utils.data.DataLoader(dataset, batch_size=8, num_workers=2))
    (record,) = caplog.records
    # 8 rows of 2 x 12 ids of 8 bytes are 1.5 KiB; two workers load two batches ahead.
    assert "1 x 2 loading workers keep 2 batches of 1.50 KiB" in record.getMessage()
    assert "6.00 KiB in all, and 100 B are free" in record.getMessage()


def test_of_a_loader_split_over_two_replicas_each_keeps_half_of_the_rows_in_shared_memory(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    from engines.data import loader as loaders

    _, parallel = alone("gpt")
    monkeypatch.setattr(loaders, "shm_free_bytes", lambda: 100)
    dataset = torch.utils.data.TensorDataset(*2 * [torch.zeros(64, 12, dtype=torch.long)])
    whole = torch.utils.data.DataLoader(dataset, batch_size=7, num_workers=2)
    with caplog.at_level(logging.WARNING):
        loaders.ShardedLoader(whole, replica=0, replicas=2, seed=0).warn_of_shared_memory(
            parallel._profile
        )
    (record,) = caplog.records
    assert "2 batches of 768 B" in record.getMessage()  # 4 rows of 2 x 12 ids of 8 bytes
