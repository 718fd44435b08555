"""Nodes of a running job that are not alike."""

from __future__ import annotations

import pytest
import torch.distributed as dist

from profiles.errors import InputError
from profiles.machine.bench.job import joined
from profiles.machine.bench.nodes import of_all_nodes
from profiles.machine.cluster import ClusterProfile
from profiles.machine.clusters import cluster_from_name
from tests.factories import exact
from tests.workers import Pool


def _seen(*names: str) -> tuple[str, ClusterProfile | None]:
    """Cluster that two nodes of two ranks agree on, each with a job of its own kind of node."""
    mine = cluster_from_name(names[dist.get_rank() // 2])
    with joined(patience_s=20) as job:
        try:
            return "", of_all_nodes(job, mine)
        except InputError as error:
            return str(error), None


@pytest.mark.dist
def test_equal_nodes_are_described_by_rank_0(pool: Pool) -> None:
    name = "2x2xH100-SXM-80GB"
    assert pool.run(_seen, name, name, world_size=4) == [("", cluster_from_name(name))] * 4


@pytest.mark.dist
def test_the_slowest_of_different_nodes_counts_on_every_rank_with_a_note(pool: Pool) -> None:
    results = pool.run(_seen, "2x2xH100-SXM-80GB", "2x2xA100-SXM-80GB", world_size=4)
    assert len({profile.to_json() for _, profile in results if profile}) == 1
    profile = results[0][1]
    assert profile is not None
    slower = cluster_from_name("2x2xA100-SXM-80GB")
    assert profile.num_nodes == 2
    assert profile.device.flop_per_s["bfloat16"] == slower.device.flop_per_s["bfloat16"]
    assert any("A100" in note and "H100" in note for note in profile.notes)


@pytest.mark.dist
def test_devices_that_cannot_be_in_one_job_are_refused_on_every_rank(pool: Pool) -> None:
    results = pool.run(_seen, "2x2xH100-SXM-80GB", "2x2xcpu", world_size=4)
    assert all(profile is None and "kind of device" in text for text, profile in results)


def _known(memory: float) -> ClusterProfile:
    """Cluster that two nodes of one rank agree on; the second does not know its memory."""
    mine = cluster_from_name("2x1xH100-SXM-80GB")
    host = None if dist.get_rank() else exact(memory)
    with joined(patience_s=20) as job:
        return of_all_nodes(job, mine.model_copy(update={"host_memory_bytes": host}))


@pytest.mark.dist
def test_a_node_of_unknown_memory_is_another_kind_of_node(pool: Pool) -> None:
    agreed, same = pool.run(_known, 1e12, world_size=2)
    assert agreed == same
    assert agreed.notes != cluster_from_name("2x1xH100-SXM-80GB").notes


def _groups_left() -> int:
    """Process groups that a job leaves behind."""
    before = len(dist.distributed_c10d._world.pg_map)
    with joined(patience_s=20):
        pass
    return len(dist.distributed_c10d._world.pg_map) - before


@pytest.mark.dist
def test_a_job_ends_its_process_group(pool: Pool) -> None:
    assert pool.run(_groups_left, world_size=2) == [0, 0]
