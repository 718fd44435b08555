"""Jobs of the comparison: one a link, whose ranks do what is asked and leave a file for each.

A job that ends before its work is done is started again without the script that it was at.
"""

from __future__ import annotations

import json
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

from profiles.machine.cluster import ClusterProfile
from profiles.record import Document
from tests.launching import Launched
from tests.namespaces import torchrun, two_nodes
from tests.peers.results import Capacity, Race

START_S = 150.0
"""Of ranks that import every package, on two cores."""
BENCH_S = 20.0
RANK_TIMEOUT_S = 120.0
"""Of a collective: a script that leaves ranks waiting ends its job."""
SCRIPT_TIMEOUT_S = 180.0
"""Of a turn, or of setting one up: a hook of DDP that waits in gloo's own threads has no bound."""


@dataclass(frozen=True)
class Link:
    """Ranks and the network between them.

    Attributes:
        rate_bytes_per_s: between two nodes of two ranks; None: one node of two ranks.
        rounds, steps: turns of each script, and steps of a turn.
    """

    rate_bytes_per_s: float | None
    rounds: int
    steps: int

    @property
    def nodes(self) -> int:
        return 1 if self.rate_bytes_per_s is None else 2

    @property
    def ranks(self) -> int:
        return 2 * self.nodes


LINKS = {
    "local": Link(None, rounds=7, steps=3),
    "1 Gbit/s": Link(125e6, rounds=5, steps=2),
    "100 Mbit/s": Link(12.5e6, rounds=4, steps=1),
}


class Task(Document):
    """A race (`subject`) or a capacity (`script`) to measure.

    Attributes:
        without: scripts that are left out.
    """

    subject: str = ""
    script: str = ""
    without: tuple[str, ...] = ()


class Request(Document):
    """Orders of a job's ranks.

    Attributes:
        cluster: None: bench first.
        ends_at: of `time.time`: no task is begun after it.
    """

    link: str
    folder: str
    tasks: tuple[Task, ...]
    cluster: ClusterProfile | None = None
    ends_at: float


Done = ClusterProfile | Race | Capacity


def measure(
    link: str,
    tasks: Iterable[Task],
    cluster: ClusterProfile | None,
    *,
    ends_at: float,
    say: Callable[[str], None],
) -> Iterator[Done]:
    """Yield what a job measured; jobs that fail are started again without what stopped them.

    Raises:
        RuntimeError: a job failed before its first task; with the end of its output.
    """
    left = list(tasks)
    while left and time.time() < ends_at:
        with tempfile.TemporaryDirectory() as text:
            folder = Path(text)
            request = Request(
                link=link, folder=text, tasks=tuple(left), cluster=cluster, ends_at=ends_at
            )
            request.save(folder / "request.json")
            output = _start(LINKS[link], folder, timeout_s=ends_at - time.time() + START_S)
            if cluster is None and (folder / "cluster.json").exists():
                cluster = ClusterProfile.load(folder / "cluster.json")
                yield cluster
            done = 0
            for path in sorted(folder.glob("done-*.json")):
                kind = Race if "turns_s" in path.read_text() else Capacity
                yield kind.build(json.loads(path.read_text()))
                done += 1
            left = left[done:]
            if not left or time.time() >= ends_at:
                return
            now = folder / "now.txt"
            stuck = now.read_text() if now.exists() else ""
        if not stuck or stuck in left[0].without:
            raise RuntimeError(f"the job of {link} ended before its work was done:\n{output}")
        say(f"{link}: `{stuck}` stopped the job, which goes on without it")
        say(output[-600:])
        first = left[0]
        if first.script:
            left = left[1:]
            yield Capacity(
                subject=first.subject, script=stuck, limit_bytes=0, left_out="it stopped the job"
            )
        else:
            # Three minutes went by: it is not given another model to stop.
            left = [
                task if task.script else task.model_copy(update={"without": (*task.without, stuck)})
                for task in left
            ]


def _start(link: Link, folder: Path, *, timeout_s: float) -> str:
    """Run a job until it ends or its time is up; the end of what it said."""
    program = ["-m", "tests.peers.ranks", str(folder / "request.json")]
    if link.rate_bytes_per_s is None:
        words = ["--standalone", "--nproc-per-node", str(link.ranks), *program]
        with Launched(words, log=folder / "log.txt") as job:
            try:
                job.wait(timeout_s)
            except TimeoutError as error:
                return str(error)
            return job.tail()
    with two_nodes(rate_bytes_per_s=link.rate_bytes_per_s) as nodes:
        exits = torchrun(nodes, program, ranks_per_node=2, timeout_s=timeout_s)
    return "\n".join(node.output[-4000:] for node in exits)


def show(text: str) -> None:
    """Say it, now."""
    sys.stdout.write(f"{text}\n")
    sys.stdout.flush()
