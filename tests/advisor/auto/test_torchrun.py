"""The `advise` command started by torchrun: all ranks time the job, rank 0 answers."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import NamedTuple
from unittest import mock

import pytest
from click.testing import CliRunner

from advisor.cli.main import cli
from profiles.machine.bench import bench, collectives
from profiles.machine.cluster import ClusterProfile
from profiles.machine.clusters import resolve_cluster
from profiles.provenance import Source
from tests.workers import Pool

# One command; a shorter bench than a user's.
PROGRAM = """
import json, os, sys
from advisor.cli.main import cli
from profiles.machine.bench import bench, collectives

collectives.COMPUTED_EDGE = 64  # what is computed between messages takes most of a bench
bench.__kwdefaults__.update(budget_s=2.0, max_bytes=2**20)
folder, commands = sys.argv[1:]
rank = os.environ["RANK"]
with open(f"{folder}/{rank}.pid", "w") as pid:
    pid.write(str(os.getpid()))
for name, words in json.loads(commands).items():
    place = f"{folder}/{name}{rank}"
    with open(place + ".out", "w") as out, open(place + ".err", "w") as err:
        sys.stdout, sys.stderr = out, err
        try:
            cli(words)
        except SystemExit as end:
            print(end.code, file=err)
"""
PLAN = ["gpt-10m", "--cluster", "auto", "--global-batch", "4", "--json"]


class Said(NamedTuple):
    """Output of a rank: stdout, stderr, and the exit code."""

    out: str
    err: str


def said(folder: Path, name: str, rank: int = 0) -> Said:
    return Said(*((folder / f"{name}{rank}.{kind}").read_text() for kind in ("out", "err")))


def torchrun(folder: Path, commands: dict[str, list[str]]) -> None:
    """Run `advise WORDS` by name, one after the other, on two ranks; what they say is in files."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    command += [
        "--nproc-per-node",
        "2",
        str(folder / "program.py"),
        str(folder),
        json.dumps(commands),
    ]
    environment = os.environ | {
        "OMP_NUM_THREADS": "1",
        "PYTHONPATH": str(Path(__file__).parents[3]),
        "XDG_CACHE_HOME": str(folder / "cache"),
    }
    launcher = subprocess.Popen(
        command,
        env=environment,
        start_new_session=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    try:
        output, _ = launcher.communicate(timeout=180)
    finally:
        for rank in range(2) if launcher.poll() is None else ():
            if (pid := folder / f"{rank}.pid").exists():
                os.kill(int(pid.read_text()), signal.SIGKILL)
        launcher.kill()
        launcher.wait()
    assert launcher.returncode == 0, output


@pytest.fixture(scope="module")
def ran(pool: Pool, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("torchrun")
    (folder / "program.py").write_text(PROGRAM)
    torchrun(folder, {"bench": ["probe", "--bench"], "again": PLAN})
    pool.run(_advise, folder, "first", PLAN, world_size=2)
    return folder


def _advise(folder: Path, name: str, words: list[str]) -> None:
    """`advise WORDS` on a rank that was started before, without an earlier bench."""
    cache = mock.patch.dict(os.environ, XDG_CACHE_HOME=str(folder / "empty"))
    costs = mock.patch.multiple(collectives, COMPUTED_EDGE=64)
    shorter = mock.patch.dict(bench.__kwdefaults__, budget_s=1.0, max_bytes=2**20)
    with cache, costs, shorter:
        result = CliRunner().invoke(cli, words)
    place = f"{folder / name}{os.environ['RANK']}"
    Path(f"{place}.out").write_text(result.stdout)
    Path(f"{place}.err").write_text(f"{result.stderr}{result.exit_code}\n")


@pytest.fixture
def second(monkeypatch: pytest.MonkeyPatch) -> None:
    """The variables of a job's second rank."""
    for name in ("RANK", "LOCAL_RANK"):
        monkeypatch.setenv(name, "1")
    for name in ("WORLD_SIZE", "LOCAL_WORLD_SIZE"):
        monkeypatch.setenv(name, "2")


@pytest.mark.parametrize("name", ["bench", "first", "again"])
def test_only_rank_0_prints_and_all_ranks_exit_with_0(ran: Path, name: str) -> None:
    assert said(ran, name).out
    assert said(ran, name).err.endswith("0\n")
    assert said(ran, name, rank=1) == ("", "0\n")


def test_a_bench_is_a_cluster_file(ran: Path, tmp_path: Path) -> None:
    path = tmp_path / "cluster.toml"
    path.write_text(said(ran, "bench").out)
    cluster = resolve_cluster(str(path))
    assert set(cluster.sources.values()) == {Source.MEASURED}
    assert cluster.overlap is not None
    assert [axis.group_size for axis in cluster.axes] == [2]


def test_a_plan_times_the_job_and_reuses_cached_times(ran: Path, tmp_path: Path) -> None:
    first, again = (
        json.loads(said(ran, name).out)["facts"]["cluster"] for name in ("first", "again")
    )
    assert [axis["group_size"] for axis in first["axes"]] == [2]
    (tmp_path / "cluster.toml").write_text(said(ran, "bench").out)
    timed = resolve_cluster(str(tmp_path / "cluster.toml"))
    recalled = ClusterProfile.build(again)
    assert (recalled.axes, recalled.overlap, recalled.intra) == (
        timed.axes,
        timed.overlap,
        timed.intra,
    )
    assert "speeds as timed on" not in said(ran, "first").err
    assert "note: speeds as timed on 20" in said(ran, "again").err
    assert len(list((ran / "cache/parallel-advisor").iterdir())) == 1


def test_without_a_bench_links_are_assumed_and_no_rank_waits(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The variables of a job whose other rank never came."""
    for name, value in {"RANK": "0", "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2"}.items():
        monkeypatch.setenv(name, value)
    result = CliRunner().invoke(cli, [*PLAN, "--no-bench"])
    cluster = json.loads(result.stdout)["facts"]["cluster"]
    assert cluster["devices_per_node"] == 2
    assert cluster["axes"] == []
    assert cluster["intra"]["bandwidth_bytes_per_s"]["source"] == "assumed"
    monkeypatch.setenv("RANK", "1")
    silent = CliRunner().invoke(cli, [*PLAN, "--no-bench"])
    assert (silent.exit_code, silent.output) == (0, "")


@pytest.mark.parametrize(
    "words",
    [["tree"], ["show", "plan.json"], ["gpt-10m", "--cluster", "8xh200"]],
    ids=["tree", "show", "plan for other machines"],
)
def test_answers_that_are_equal_on_all_ranks_are_printed_once(
    words: list[str], second: None
) -> None:
    silent = CliRunner().invoke(cli, words)
    assert (silent.exit_code, silent.output) == (0, "")


def test_an_error_is_printed_once_and_ends_the_job(tmp_path: Path) -> None:
    """The model is looked for before the job is timed."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node"]
    command += ["2", "-m", "advisor", "gpt-10", "--cluster", "auto"]
    environment = os.environ | {
        "OMP_NUM_THREADS": "1",
        "PYTHONPATH": str(Path(__file__).parents[3]),
        "XDG_CACHE_HOME": str(tmp_path),
    }
    ended = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=180)
    assert ended.returncode == 1  # torchrun's own
    assert ended.stderr.count("error: unknown model `gpt-10`") == 1
    assert ended.stdout == ""
    assert list(tmp_path.iterdir()) == []


def test_a_slow_rank_does_not_repeat_the_error_of_another(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """torchrun may take longer to end a rank than that one needs to find the mistake too."""
    monkeypatch.setattr("advisor.cli.command.FIRST_WORD_S", 0.0)
    output = []
    for rank in ("1", "0"):  # the second is the slow one
        monkeypatch.setenv("LOCAL_RANK", rank)
        monkeypatch.setenv("TORCHELASTIC_ERROR_FILE", str(tmp_path / rank / "error.json"))
        result = CliRunner().invoke(cli, ["gpt-10"])
        assert result.exit_code == 2
        output.append(result.stderr)
    assert "error: unknown model `gpt-10`" in output[0]
    assert output[1] == ""


def test_an_error_of_one_rank_is_printed_by_that_rank(
    second: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("advisor.cli.command.FIRST_WORD_S", 0.01)
    result = CliRunner().invoke(cli, ["probe", "-o", "no/such/folder.toml"])
    assert result.exit_code == 2
    assert "error: cannot write `no/such/folder.toml`" in result.stderr
