"""A folder's disk is timed by a file of its own, and nothing of it stays."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import pytest

from profiles.errors import InputError
from profiles.machine.bench.disk import with_disk
from profiles.machine.clusters import resolve_cluster, to_toml
from profiles.provenance import Source
from profiles.units import MIB

H100 = "8xH100-SXM-80GB"


def test_a_folder_gets_rates_and_keeps_no_file(tmp_path: Path) -> None:
    cluster = with_disk(resolve_cluster(H100), tmp_path, size_bytes=8 * MIB)
    for rate in (cluster.disk_write_bytes_per_s, cluster.disk_read_bytes_per_s):
        assert rate is not None
        assert rate.source is Source.MEASURED
        assert 1e6 < rate.value < 1e12
    assert os.listdir(tmp_path) == []
    usage = shutil.disk_usage(tmp_path)
    assert cluster.disk_free_bytes is not None
    assert 0 < cluster.disk_free_bytes.value <= usage.total


def test_disk_rates_are_bytes_over_measured_seconds(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    intervals = iter([(1.0, 0.5), (2.0, 0.5), (4.0, 0.5)])
    monkeypatch.setattr("profiles.machine.bench.disk._lap", lambda *_: next(intervals))
    cluster = with_disk(resolve_cluster(H100), tmp_path, size_bytes=100_000_000)
    written, read = cluster.disk_write_bytes_per_s, cluster.disk_read_bytes_per_s
    assert written is not None
    assert read is not None
    assert (written.value, written.relative_error) == (5e7, 0.6)  # 1 to 4 s: (4 - 1) / (4 + 1)
    assert (read.value, read.relative_error) == (2e8, 0.0)


def test_a_cluster_file_keeps_rates_of_disk_host_link_and_new_memory(tmp_path: Path) -> None:
    timed = with_disk(resolve_cluster(H100), tmp_path, size_bytes=MIB)
    rate = timed.disk_read_bytes_per_s
    device = timed.device.model_copy(
        update={"host_link_bytes_per_s": rate, "new_memory_bytes_per_s": rate}
    )
    path = tmp_path / "cluster.toml"
    path.write_text(to_toml(timed.model_copy(update={"device": device})))
    again = resolve_cluster(str(path))
    assert again.disk_write_bytes_per_s == timed.disk_write_bytes_per_s
    assert again.disk_read_bytes_per_s == rate
    assert again.disk_free_bytes == timed.disk_free_bytes
    assert again.device.host_link_bytes_per_s == again.device.new_memory_bytes_per_s == rate


def test_a_missing_folder_is_refused(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"no file of 256 MiB can be written in .*missing"):
        with_disk(resolve_cluster(H100), tmp_path / "missing")
