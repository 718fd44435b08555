"""Two nodes on one machine: network namespaces joined by a pair of virtual cards with a set rate.

Needs root, Linux, `ip` and `tc`; `why_not` says what is missing. Traffic inside a node stays on its
loopback; between the nodes it goes through the cards, whose senders are shaped (`tc tbf`) in both
directions. Delays cannot be set (netem is not in every kernel).

Everything is bounded, started by pid, ended by pid, and the namespaces go with the context.
"""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
COMMAND_S = 20.0
PORT = 29401  # each pair of nodes is alone in its network
# A bucket that the shaper may empty at once: a millisecond of the rate, and no less than what a
# card hands over in one piece. A larger one would let small messages through at full speed.
BURST_S, SMALLEST_BURST_BYTES = 0.001, 16 * 1024


@dataclass(frozen=True, slots=True)
class Node:
    """A namespace with its card and address."""

    name: str
    card: str
    address: str

    def command(self, *words: str) -> list[str]:
        """`words`, to be run inside."""
        return ["ip", "netns", "exec", self.name, *words]


@dataclass(frozen=True, slots=True)
class Exit:
    """Exit of a node's launcher."""

    code: int
    output: str


def why_not() -> str | None:
    """Missing requirement for building nodes here; None if there is none."""
    if sys.platform != "linux":
        return f"network namespaces are Linux's, this is {sys.platform}"
    if os.geteuid() != 0:
        return "network namespaces need root"
    missing = [name for name in ("ip", "tc") if shutil.which(name) is None]
    if missing:
        return f"`{'` and `'.join(missing)}` of iproute2 not found"
    try:
        with two_nodes(rate_bytes_per_s=12.5e6):
            return None
    except RuntimeError as error:  # a container that may not
        return f"no shaped network can be built here: {error}"


@contextmanager
def two_nodes(*, rate_bytes_per_s: float | None) -> Iterator[tuple[Node, Node]]:
    """Two nodes whose link sends `rate_bytes_per_s` each way; None: as fast as the machine can.

    Raises:
        RuntimeError: the system refuses; what was built is removed.
    """
    mine = os.getpid()
    net = f"10.{77 + mine // 254 % 100}.{1 + mine % 254}"
    nodes = tuple(
        Node(name=f"node{i}-{mine}", card=f"v{i}-{mine}", address=f"{net}.{i + 1}")
        for i in range(2)
    )
    first, second = nodes
    try:
        for node in nodes:
            _run("ip", "netns", "add", node.name)
        _run("ip", "link", "add", first.card, "type", "veth", "peer", "name", second.card)
        for node in nodes:
            _run("ip", "link", "set", node.card, "netns", node.name)
            inside = ("ip", "-n", node.name)
            _run(*inside, "addr", "add", f"{node.address}/24", "dev", node.card)
            _run(*inside, "link", "set", "lo", "up")
            _run(*inside, "link", "set", node.card, "up")
            if rate_bytes_per_s is not None:
                _shape(node, rate_bytes_per_s)
        yield first, second
    finally:
        for node in nodes:
            _end_processes_of(node)
            for words in (("link", "del", node.card), ("netns", "del", node.name)):
                with suppress(RuntimeError):  # the card goes with its namespace
                    _run("ip", *words)


@contextmanager
def star(count: int, *, rate_bytes_per_s: float) -> Iterator[tuple[Node, ...]]:
    """So many nodes around a switch: the card of each sends and receives at this rate.

    Raises:
        RuntimeError: the system refuses; what was built is removed.
    """
    mine = os.getpid()
    net, hub = f"10.{77 + mine // 254 % 100}.{1 + mine % 254}", f"hub-{mine}"
    nodes = tuple(
        Node(name=f"node{i}-{mine}", card=f"v{i}-{mine}", address=f"{net}.{i + 1}")
        for i in range(count)
    )
    try:
        _run("ip", "netns", "add", hub)
        _run("ip", "-n", hub, "link", "add", "switch", "type", "bridge")
        _run("ip", "-n", hub, "link", "set", "switch", "up")
        for i, node in enumerate(nodes):
            port = Node(name=hub, card=f"p{i}-{mine}", address="")
            _run("ip", "netns", "add", node.name)
            _run("ip", "link", "add", node.card, "type", "veth", "peer", "name", port.card)
            _run("ip", "link", "set", node.card, "netns", node.name)
            _run("ip", "link", "set", port.card, "netns", hub)
            _run("ip", "-n", hub, "link", "set", port.card, "master", "switch", "up")
            inside = ("ip", "-n", node.name)
            _run(*inside, "addr", "add", f"{node.address}/24", "dev", node.card)
            _run(*inside, "link", "set", "lo", "up")
            _run(*inside, "link", "set", node.card, "up")
            for end in (node, port):
                _shape(end, rate_bytes_per_s)
        yield nodes
    finally:
        for node in nodes:
            with suppress(RuntimeError):  # what was not built has no processes
                _end_processes_of(node)
        for name in (*(node.name for node in nodes), hub):
            with suppress(RuntimeError):
                _run("ip", "netns", "del", name)


def _shape(node: Node, rate_bytes_per_s: float) -> None:
    burst = max(SMALLEST_BURST_BYTES, int(rate_bytes_per_s * BURST_S))
    bits = f"{rate_bytes_per_s * 8:.0f}bit"
    # A queue that drops nothing: every lost packet may cost TCP's 200 ms, which is another test.
    shape = ("tbf", "rate", bits, "burst", str(burst), "latency", "2s")
    _run("tc", "-n", node.name, "qdisc", "add", "dev", node.card, "root", *shape)


def _end_processes_of(node: Node) -> None:
    """End processes that still run inside: ranks whose launcher was killed."""
    with suppress(RuntimeError):
        for pid in _run("ip", "netns", "pids", node.name).split():
            with suppress(ProcessLookupError):
                os.kill(int(pid), signal.SIGKILL)


def _run(*words: str) -> str:
    done = subprocess.run(words, capture_output=True, text=True, timeout=COMMAND_S, check=False)
    if done.returncode:
        raise RuntimeError(f"`{' '.join(words)}`: {done.stderr.strip() or done.returncode}")
    return done.stdout


def torchrun(
    nodes: Sequence[Node], program: Sequence[str], *, ranks_per_node: int, timeout_s: float
) -> list[Exit]:
    """Run `program` (torchrun's words: a script or `-m module`, and its own) on all nodes.

    One launcher a node, gloo on the node's card. When the time is up or a node fails, every process
    in the nodes is killed.
    """
    with tempfile.TemporaryDirectory() as folder:
        launchers: list[subprocess.Popen[str]] = []
        try:
            for rank, node in enumerate(nodes):
                words = node.command(sys.executable, "-m", "torch.distributed.run")
                words += ["--nnodes", str(len(nodes)), "--node-rank", str(rank)]
                words += ["--nproc-per-node", str(ranks_per_node)]
                words += ["--master-addr", nodes[0].address, "--master-port", str(PORT)]
                with (Path(folder) / f"{rank}.txt").open("w") as output:
                    launchers.append(
                        subprocess.Popen(
                            [*words, *program],
                            env=_environment(node, folder),
                            stdout=output,
                            stderr=subprocess.STDOUT,
                            start_new_session=True,
                            text=True,
                        )
                    )
            codes = [_wait(launcher, timeout_s) for launcher in launchers]
        finally:
            for launcher in launchers:
                with suppress(ProcessLookupError):
                    os.killpg(launcher.pid, signal.SIGKILL)
                launcher.wait()
            for node in nodes:
                _end_processes_of(node)
        outputs = [(Path(folder) / f"{rank}.txt").read_text() for rank in range(len(nodes))]
    return [Exit(code, output) for code, output in zip(codes, outputs, strict=True)]


def _environment(node: Node, folder: str) -> dict[str, str]:
    return os.environ | {
        "GLOO_SOCKET_IFNAME": node.card,
        "OMP_NUM_THREADS": "1",
        "PYTHONPATH": str(ROOT),
        "TMPDIR": folder,  # where torchrun leaves its logs
    }


def _wait(launcher: subprocess.Popen[str], timeout_s: float) -> int:
    """Its exit code; -SIGKILL where the time was up."""
    try:
        return launcher.wait(timeout=timeout_s)
    except subprocess.TimeoutExpired:
        os.killpg(launcher.pid, signal.SIGKILL)
        return launcher.wait()
