"""`advise run`: torchrun, with what it needs so that a job comes back after a rank was lost."""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Mapping, MutableMapping, Sequence
from dataclasses import dataclass, field

import click

from advisor.cli.command import common_options
from profiles.errors import FileError, InputError, near_misses
from profiles.machine.host import machine_cores
from profiles.machine.launcher import LOOPBACK, loopback_environment
from profiles.record.bounds import MOST_COUNT, MOST_DEVICES, MOST_PER_NODE, whole_number

FLAGS = {
    "--standalone",
    "--module",
    "-m",
    "--no-python",
    "--run-path",
    "--virtual-local-rank",
}
"""torchrun's options without a value."""
VALUED = {
    "--duplicate-stderr-filters",
    "--duplicate-stdout-filters",
    "--event-log-handler",
    "--local-addr",
    "--local-ranks-filter",
    "--log-dir",
    "--logs-specs",
    "--master-addr",
    "--master-port",
    "--max-restarts",
    "--monitor-interval",
    "--nnodes",
    "--node-rank",
    "--nproc-per-node",
    "--numa-binding",
    "--rdzv-backend",
    "--rdzv-conf",
    "--rdzv-endpoint",
    "--rdzv-id",
    "--redirects",
    "-r",
    "--role",
    "--shutdown-timeout",
    "--signals-to-handle",
    "--start-method",
    "--tee",
    "-t",
}
"""Those with one, `--name value` or `--name=value`."""
MEETING = {
    "--standalone",
    "--local-addr",
    "--master-addr",
    "--master-port",
    "--node-rank",
    "--rdzv-backend",
    "--rdzv-conf",
    "--rdzv-endpoint",
    "--rdzv-id",
}
"""Options that say where ranks meet."""
MOST_OF = {"--max-restarts": MOST_COUNT, "--node-rank": MOST_DEVICES, "--master-port": 65_535}
"""Options that are whole numbers from zero."""
SIGNALS = "SIGTERM,SIGINT,SIGHUP,SIGQUIT,SIGUSR1"
EXAMPLE = "`advise run --nproc-per-node 8 --max-restarts 3 train.py`"


@dataclass
class Words:
    """torchrun's command line: its options, and the script, None where it cannot be told."""

    options: dict[str, str] = field(default_factory=dict)
    script: str | None = None
    is_known: bool = True

    @classmethod
    def read(cls, words: Sequence[str]) -> Words:
        """Options end at the script; an option that is not known may have a value or not."""
        read, rest = cls(), list(words)
        while rest and rest[0].startswith("-"):
            name, has_value, value = rest.pop(0).partition("=")
            name = name.replace("_", "-")
            if name not in FLAGS | VALUED:
                return cls(read.options, None, is_known=False)
            if name in VALUED and not has_value:
                value = rest.pop(0) if rest else ""
            read.options[name] = value
        read.script = rest[0] if rest else None
        return read


def command_line(words: Sequence[str], environment: Mapping[str, str]) -> list[str]:
    """The arguments of `python -m torch.distributed.run`: one node meets on its loopback address.

    Raises:
        InputError: there is no script, no rank to run it, or a number is none. FileError: it is no
            file.
    """
    read = Words.read(words)
    if read.is_known:
        _require_ranks(read.options.get("--nproc-per-node"))
        _require_numbers(read.options)
        _require_script(read)
    nodes = read.options.get("--nnodes", environment.get("PET_NNODES", "1"))
    asked = {f"PET_{name.strip('-').replace('-', '_').upper()}" for name in MEETING}
    if nodes in ("1", "1:1") and MEETING.isdisjoint(read.options) and asked.isdisjoint(environment):
        return [*LOOPBACK, *words]
    return list(words)


def prepare(environment: MutableMapping[str, str], line: Sequence[str]) -> None:
    """Set what torchrun and its ranks read from their environment, for the arguments `line`; what
    is set already stays."""
    # Its own store outlives an attempt, and scripts that start process groups themselves would
    # read there what dead ranks left.
    environment.setdefault("TORCH_DISABLE_SHARE_RDZV_TCP_STORE", "1")
    environment.setdefault("PET_SIGNALS_TO_HANDLE", SIGNALS)
    options = Words.read(line).options
    if options.get("--local-addr") == LOOPBACK[-1]:
        for name, value in loopback_environment().items():
            environment.setdefault(name, value)
    ranks = options.get("--nproc-per-node", environment.get("PET_NPROC_PER_NODE", "1"))
    count = machine_cores() if ranks == "cpu" else int(ranks[:9]) if ranks.isdecimal() else 1
    if count > 1:
        environment.setdefault("OMP_NUM_THREADS", str(max(1, machine_cores() // count)))


def _require_ranks(count: str | None) -> None:
    """Refuse a count below one; a word (gpu, cpu, auto) is torchrun's to know."""
    if count is not None and not count.isidentifier():
        whole_number(count, "--nproc-per-node", most=MOST_PER_NODE)


def _require_numbers(options: Mapping[str, str]) -> None:
    """Refuse what torchrun answers with a traceback: counts below their least, and no range of
    nodes."""
    for name, most in MOST_OF.items():
        if name in options:
            whole_number(options[name], name, least=0, most=most)
    nodes = options.get("--nnodes", "1")
    counts = [whole_number(each, "--nnodes", most=MOST_DEVICES) for each in nodes.split(":")]
    if len(counts) > 2 or counts != sorted(counts):
        raise InputError(
            f"`--nnodes` wants a number, or the least and the most, not `{nodes}`",
            hints=["for example `--nnodes 4`, or `--nnodes 2:4`"],
        )


def _require_script(read: Words) -> None:
    if read.script is None:
        raise InputError("the script is missing", where="advise run", hints=[f"write {EXAMPLE}"])
    is_file = not {"-m", "--module", "--no-python"} & set(read.options)
    if is_file and not os.path.isfile(read.script):
        folder = os.path.dirname(read.script) or "."
        there: list[str] = []
        with contextlib.suppress(OSError):  # no folder, or none that may be read
            there = [n for n in os.listdir(folder) if os.path.isfile(os.path.join(folder, n))]
        near = near_misses(os.path.basename(read.script), there, limit=1)
        what = "it is a folder" if os.path.isdir(read.script) else "no such file"
        raise FileError(
            f"cannot read `{read.script}`: {what}",
            where=f"advise run, in {os.getcwd()}",
            hints=[f"did you mean `{os.path.join(os.path.dirname(read.script), near[0])}`?"]
            if near
            else ["name the training script; a module is `-m pkg.train`"],
        )


@click.command(
    context_settings={"ignore_unknown_options": True, "allow_interspersed_args": False},
    options_metavar="[TORCHRUN OPTIONS]",
)
@click.argument("words", nargs=-1, type=click.UNPROCESSED, metavar="SCRIPT [ARGS]")
@common_options
def run(words: tuple[str, ...], no_color: bool) -> None:
    """Start SCRIPT on every rank with torchrun, so that it survives the loss of one.

    \b
      advise run --nproc-per-node 8 --max-restarts 3 train.py --lr 3e-4
      advise run --nnodes 4 --nproc-per-node 8 --rdzv-backend c10d --rdzv-endpoint node0 train.py

    All options are torchrun's (`torchrun --help`). Beside them: ranks of one node meet on its
    loopback address, so that jobs do not share a port; each attempt meets in a store of its own;
    SIGUSR1 reaches the ranks like SIGTERM; and each rank gets its share of the cores
    (OMP_NUM_THREADS). What you set stays.
    """
    line = command_line(words, os.environ)
    prepare(os.environ, line)
    sys.stdout.flush()
    sys.stderr.flush()
    os.execv(sys.executable, [sys.executable, "-m", "torch.distributed.run", *line])
