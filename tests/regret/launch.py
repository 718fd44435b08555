"""A case from start to end: its nodes, its ranks, and new ranks after a plan broke them."""

from __future__ import annotations

import sys
import tempfile
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from tests.launching import Launched
from tests.namespaces import torchrun, two_nodes
from tests.regret.cases import MACHINES, Case
from tests.regret.ranks import RESTART
from tests.regret.report import Result

STARTS = 12
"""Of one case: each leaves a plan out that broke the ranks before."""
BESIDES_S = 420.0
"""What a start may take besides the time for its plans: imports, bench, decision, the last plan."""


def run_case(case: Case, *, seconds: float, most: int) -> Result:
    """Run a case in about `seconds` for its plans.

    Raises:
        RuntimeError: its ranks did not end well; with the end of their output.
    """
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "case.json"
        with _followed(path.with_suffix(".log")):
            for _ in range(STARTS):
                output = _start(case, path, seconds=seconds, most=most)
                result = Result.load(path) if path.exists() else None
                if result is not None and result.measured_at:
                    return result
                if f"exitcode  : {RESTART}" not in output:
                    break
            errors = path.with_suffix(".error")
            output = errors.read_text() if errors.exists() else output
        raise RuntimeError(output[-3000:].strip() or "its ranks said nothing")


def _start(case: Case, path: Path, *, seconds: float, most: int) -> str:
    """Start the ranks, and wait for their end; what they said."""
    machines = MACHINES[case.machines]
    program = ["-m", "tests.regret.ranks", case.name, str(path), str(seconds), str(most)]
    limit = seconds + BESIDES_S
    if machines.nodes == 2:
        with two_nodes(rate_bytes_per_s=machines.rate_bytes_per_s) as nodes:
            exits = torchrun(
                nodes, program, ranks_per_node=machines.ranks_per_node, timeout_s=limit
            )
        return "\n".join(node.output for node in exits)
    words = ["--standalone", "--nproc-per-node", str(machines.ranks), *program]
    with Launched(words, log=path.with_suffix(".out")) as launched:
        try:
            launched.wait(limit)
        except TimeoutError as error:
            return str(error)
        return launched.tail(8000)


@contextmanager
def _followed(log: Path) -> Iterator[None]:
    """Print what ranks add to `log`."""
    is_over = threading.Event()

    def follow() -> None:
        seen = 0
        while True:
            ends = is_over.wait(1.0)
            text = log.read_text() if log.exists() else ""
            sys.stderr.write(text[seen:])
            sys.stderr.flush()
            seen = len(text)
            if ends:
                return

    thread = threading.Thread(target=follow, daemon=True)
    thread.start()
    try:
        yield
    finally:
        is_over.set()
        thread.join()
