"""`advise run` starts torchrun with what it needs, and says mistakes before it does."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest
from click.testing import CliRunner

from advisor.cli.main import cli
from advisor.cli.run import FLAGS, LOOPBACK, MEETING, VALUED, command_line
from tests.launching import Launched

CORES = 12


class Started:
    """Runs the command in a folder with a `train.py`; keeps what would be executed."""

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.chdir(folder)
        (folder / "train.py").write_text("")
        monkeypatch.setattr("advisor.cli.run.machine_cores", lambda: CORES)
        monkeypatch.setattr(os, "execv", self._keep)
        self.environment = {
            name: text
            for name, text in os.environ.items()
            if not name.startswith(("PET_", "TORCH_", "OMP_", "GLOO_"))
        }
        monkeypatch.setattr(os, "environ", self.environment)
        self.line: list[str] = []

    def _keep(self, program: str, line: Sequence[str]) -> None:
        assert program == line[0] == sys.executable
        self.line = list(line[1:])

    def words(self, *args: str) -> list[str]:
        """Arguments given to torchrun."""
        result = CliRunner().invoke(cli, ["run", *args])
        assert result.exit_code == 0, result.output
        assert self.line[:2] == ["-m", "torch.distributed.run"]
        return self.line[2:]


@pytest.fixture
def started(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Started:
    return Started(tmp_path, monkeypatch)


def test_ranks_of_one_node_meet_on_its_loopback_address(started: Started) -> None:
    given = ("--nproc-per-node", "4", "train.py", "--lr", "3e-4", "--help")
    assert started.words(*given) == [*LOOPBACK, *given]
    assert started.words("--nnodes=1", "train.py") == [*LOOPBACK, "--nnodes=1", "train.py"]


@pytest.mark.parametrize(
    "given",
    [
        ("--nnodes", "2", "--rdzv-endpoint", "node0:29400", "train.py"),
        ("--nnodes=1:4", "train.py"),
        ("--standalone", "train.py"),
        ("--master_port=29501", "train.py"),
        ("--rdzv_backend", "c10d", "train.py"),
    ],
)
def test_a_meeting_place_that_was_named_stays(started: Started, given: tuple[str, ...]) -> None:
    assert started.words(*given) == list(given)


def test_a_meeting_place_may_be_named_by_torchruns_variables(started: Started) -> None:
    started.environment["PET_RDZV_ENDPOINT"] = "node0:29400"
    assert started.words("train.py") == ["train.py"]


def test_what_torchrun_reads_from_its_environment_is_set(started: Started) -> None:
    started.words("--nproc-per-node", "4", "train.py")
    assert started.environment["TORCH_DISABLE_SHARE_RDZV_TCP_STORE"] == "1"
    assert started.environment["PET_SIGNALS_TO_HANDLE"].split(",")[-1] == "SIGUSR1"
    assert started.environment["OMP_NUM_THREADS"] == "3"  # of twelve cores
    assert started.environment["GLOO_SOCKET_IFNAME"] == "lo"


def test_ranks_of_several_nodes_listen_where_gloo_does(started: Started) -> None:
    started.environment.pop("GLOO_SOCKET_IFNAME", None)
    started.words("--nnodes", "2", "train.py")
    assert "GLOO_SOCKET_IFNAME" not in started.environment


def test_what_was_set_before_stays(started: Started) -> None:
    started.environment["OMP_NUM_THREADS"] = "7"
    started.environment["TORCH_DISABLE_SHARE_RDZV_TCP_STORE"] = "0"
    started.words("--nproc_per_node=4", "train.py")
    assert started.environment["OMP_NUM_THREADS"] == "7"
    assert started.environment["TORCH_DISABLE_SHARE_RDZV_TCP_STORE"] == "0"


def test_one_rank_has_as_many_threads_as_torch_takes(started: Started) -> None:
    started.words("train.py")
    assert "OMP_NUM_THREADS" not in started.environment
    started.words("--nproc-per-node", "cpu", "train.py")
    assert started.environment["OMP_NUM_THREADS"] == "1"


def test_modules_and_programs_are_no_files(started: Started) -> None:
    for given in (("-m", "pkg.train"), ("--no-python", "bash", "-c", "true")):
        assert started.words(*given) == [*LOOPBACK, *given]


def test_options_of_a_newer_torchrun_are_left_to_it(started: Started) -> None:
    given = ("--of-the-next-release", "7", "missing.py")
    assert started.words(*given) == [*LOOPBACK, *given]


def test_the_options_are_those_of_the_installed_torchrun() -> None:
    from torch.distributed.run import get_args_parser

    flags, valued = set(), set()
    for action in get_args_parser()._actions:
        names = {name for name in action.option_strings if "_" not in name}
        (flags if action.nargs == 0 else valued).update(names)
    assert flags - {"-h", "--help"} <= FLAGS
    assert valued <= VALUED
    assert MEETING <= FLAGS | VALUED


def test_help_answers_without_torch() -> None:
    code = (
        "import sys\n"
        "from advisor.cli.main import cli\n"
        "try: cli(['run', '--help'])\n"
        "except SystemExit: pass\n"
        "sys.stderr.write(str('torch' in sys.modules))"
    )
    ended = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert ended.stderr == "False"
    assert "advise run --nproc-per-node 8 --max-restarts 3 train.py" in ended.stdout


def test_every_node_of_a_slurm_job_starts_its_own(
    started: Started, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`srun advise run` runs the command once a node, the second of which is no rank of ours."""
    started.environment |= {
        "SLURM_STEP_NUM_TASKS": "2",
        "SLURM_STEP_NUM_NODES": "2",
        "SLURM_STEP_TASKS_PER_NODE": "1(x2)",
        "SLURM_PROCID": "1",
        "SLURM_NODEID": "1",
        "SLURM_LOCALID": "0",
    }
    assert started.words("--nnodes", "2", "train.py") == ["--nnodes", "2", "train.py"]


# Its own process group, as in a script that knows nothing of us.
PROGRAM = """
import os, signal, sys
import torch
import torch.distributed as dist

dist.init_process_group("gloo")
attempt, rank = int(os.environ["TORCHELASTIC_RESTART_COUNT"]), dist.get_rank()
values = torch.ones(4)
for step in range(6):
    if (attempt, rank, step) == (0, 1, 3):
        os.kill(os.getpid(), signal.SIGKILL)
    dist.all_reduce(values)
    values /= 2
with open(f"{sys.argv[1]}.{rank}", "w") as file:
    file.write(f"{attempt} {values.sum().item()} {os.environ['OMP_NUM_THREADS']}")
dist.destroy_process_group()
"""


@pytest.mark.slow
def test_a_script_of_ones_own_comes_back_when_a_rank_is_killed(tmp_path: Path) -> None:
    program = tmp_path / "train.py"
    program.write_text(PROGRAM)
    words = ["run", "--nproc-per-node", "2", "--max-restarts", "1", str(program)]
    log = tmp_path / "log"
    with Launched([*words, str(tmp_path / "done")], module="advisor", log=log) as launched:
        assert launched.wait(timeout_s=150) == 0, launched.tail()
    for rank in range(2):
        assert (tmp_path / f"done.{rank}").read_text() == "1 4.0 1"


def test_the_command_line_is_not_changed_where_nothing_is_missing(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text("")
    assert command_line(["--nnodes", "2", str(script)], {}) == ["--nnodes", "2", str(script)]


@pytest.mark.parametrize("count", ["0", "-2", "2.5", "9999999"])
def test_ranks_that_cannot_be_counted_are_refused_before_torchrun(
    started: Started, count: str
) -> None:
    result = CliRunner().invoke(cli, ["run", f"--nproc-per-node={count}", "train.py"])
    assert (result.exit_code, started.line) == (2, [])
    assert result.stderr.startswith("error: `--nproc-per-node` ")


@pytest.mark.parametrize(
    ("option", "said"),
    [
        ("--nnodes=0", "`--nnodes` wants a positive whole number, not `0`"),
        ("--nnodes=x", "`--nnodes` wants a positive whole number, not `x`"),
        ("--nnodes=4:2", "`--nnodes` wants a number, or the least and the most, not `4:2`"),
        ("--nnodes=1:2:3", "`--nnodes` wants a number, or the least and the most, not `1:2:3`"),
        ("--max-restarts=-1", "`--max-restarts` wants a whole number, not `-1`"),
        ("--node-rank=-1", "`--node-rank` wants a whole number, not `-1`"),
        ("--master_port=99999", "`--master-port` = 99999: 65,535 is the most"),
    ],
)
def test_numbers_that_torchrun_would_answer_with_a_traceback_are_refused(
    started: Started, option: str, said: str
) -> None:
    result = CliRunner().invoke(cli, ["run", option, "train.py"])
    assert (result.exit_code, started.line) == (2, [])
    assert result.stderr.startswith(f"error: {said}")


def test_ranges_of_nodes_and_no_restarts_are_torchruns(started: Started) -> None:
    given = ["--nnodes", "2:4", "--max-restarts", "0", "train.py"]
    assert started.words(*given) == given


def test_a_folder_is_no_script_and_no_near_miss(started: Started) -> None:
    os.mkdir("train")
    result = CliRunner().invoke(cli, ["run", "train"])
    assert (result.exit_code, started.line) == (2, [])
    assert "error: cannot read `train`: it is a folder" in result.stderr
    assert "hint: did you mean `train.py`?" in result.stderr


def test_a_link_to_itself_beside_the_script_is_no_near_miss(started: Started) -> None:
    os.symlink("trian.py", "trian.py")
    result = CliRunner().invoke(cli, ["run", "trian.py"])
    assert result.exit_code == 2
    assert "hint: did you mean `train.py`?" in result.stderr


@pytest.mark.parametrize(
    ("words", "kind"),
    [(["plan", "x" * 5000], "model"), (["plan", "gpt-10m", "--cluster", "x" * 300], "accelerator")],
)
def test_a_name_that_no_file_can_have_is_an_unknown_one(words: list[str], kind: str) -> None:
    result = CliRunner().invoke(cli, words)
    assert result.exit_code == 2
    assert f"unknown {kind} `xxx" in result.stderr
