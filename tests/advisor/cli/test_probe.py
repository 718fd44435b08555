"""`advise probe`: machines as a cluster file, probed or read from logs."""

from __future__ import annotations

from pathlib import Path

from click.testing import CliRunner, Result

from advisor.cli.main import cli
from profiles.machine.clusters import resolve_cluster
from profiles.provenance import Source
from tests.profiles.machine.test_nccl_tests import log as nccl_log


def advise(*args: str) -> Result:
    return CliRunner().invoke(cli, list(args))


def test_the_printed_file_is_read_back_as_a_cluster(tmp_path: Path) -> None:
    path = tmp_path / "cluster.toml"
    result = advise("probe", "-o", str(path))
    assert (result.exit_code, result.stdout) == (0, "")
    assert resolve_cluster(str(path)).world_size >= 1
    assert advise("probe").stdout.startswith("#")


def test_logs_of_nccl_tests_make_a_cluster_file(tmp_path: Path) -> None:
    path = tmp_path / "all_reduce_perf.log"
    path.write_text(nccl_log("all_reduce_perf"))
    made = tmp_path / "cluster.toml"
    result = advise("probe", "--nccl-tests", str(path), "-o", str(made))
    assert (result.exit_code, result.stdout) == (0, "")
    cluster = resolve_cluster(str(made))
    assert (cluster.world_size, cluster.device.name) == (8, "H100-SXM-80GB")
    assert cluster.sources["links in the node"] is Source.MEASURED


def test_a_log_cut_in_half_leaves_no_file(tmp_path: Path) -> None:
    path = tmp_path / "all_reduce_perf.log"
    whole = nccl_log("all_reduce_perf")
    path.write_text(whole[: len(whole) * 3 // 4])
    made = tmp_path / "cluster.toml"
    result = advise("probe", "--nccl-tests", str(path), "-o", str(made))
    assert result.exit_code == 2
    assert "the log is cut" in result.stderr
    assert not made.exists()


def test_bench_and_nccl_tests_exclude_each_other() -> None:
    result = advise("probe", "--bench", "--nccl-tests", "all_reduce_perf.log")
    assert result.exit_code == 2
    assert "take one" in result.stderr
