"""The bench on two real nodes (network namespaces) whose link has a known rate."""

from __future__ import annotations

import signal
import subprocess
import time

import pytest

from tests.namespaces import star, torchrun, two_nodes, why_not
from tests.validation.command import NO_FACTS
from tests.validation.shaped_links import Report, Row, measure, repriced, table

# From the formula's upper bound of what ZeRO-3 needs to its lower one (see `needed_by_formula`).
LOWER = 3.0
# Of the line, to ZeRO-3 over both nodes: two gathers at the line's rate, and a reduction at half of
# it (gloo's is an all-reduce): 3 / (2 + 2).
OF_LINE = 0.75


@pytest.fixture(scope="module")
def _namespaces() -> None:
    missing = why_not()
    if missing:
        pytest.skip(missing)


@pytest.fixture(scope="module")
def report() -> Report:
    return repriced()


def require_rates(rows: tuple[Row, ...]) -> None:
    """Assertions on the bench of the committed report and of a new one."""
    slow, fast, free = rows
    for row in (slow, fast):
        assert row.line_bytes_per_s is not None
        payload_bytes_per_s = row.line_bytes_per_s * 1448 / 1514  # of TCP in Ethernet frames
        assert row.inter_bytes_per_s == pytest.approx(payload_bytes_per_s, rel=0.1)
    assert free.inter_bytes_per_s > 1.5 * fast.inter_bytes_per_s
    for row in (slow, fast):  # inside a node nothing changed
        assert free.intra_low_bytes_per_s <= row.intra_high_bytes_per_s
        assert row.intra_low_bytes_per_s <= free.intra_high_bytes_per_s
        assert row.intra_bytes_per_s > 2 * row.inter_bytes_per_s


def require_verdicts(rows: tuple[Row, ...]) -> None:
    """Assertions on the decisions of today's code on these benches."""
    slow, fast, free = rows
    for row in rows:
        assert row.verdict == (
            "fast" if row.needed_bytes_per_s <= row.given_bytes_per_s else "slow"
        )
        assert row.needed_bytes_per_s <= row.formula_needed_bytes_per_s
        assert row.needed_bytes_per_s >= row.formula_needed_bytes_per_s / LOWER
    # The formula is certain at both rates, so the verdict has to flip between them.
    assert slow.formula_needed_bytes_per_s / LOWER > OF_LINE * 12.5e6
    assert fast.formula_needed_bytes_per_s < OF_LINE * 125e6
    assert (slow.verdict, fast.verdict, free.verdict) == ("slow", "fast", "fast")


def test_the_committed_bench_found_the_rates_of_the_lines(report: Report) -> None:
    require_rates(report.rows)
    assert table(report).count("\n") == 1 + len(report.rows) + (not report.is_priced)


def test_the_verdict_on_the_committed_bench_flips_between_the_rates(report: Report) -> None:
    if not report.is_priced:
        pytest.skip(NO_FACTS)
    require_verdicts(report.rows)


@pytest.mark.timed
@pytest.mark.usefixtures("_namespaces")
def test_a_new_bench_finds_the_rates_and_the_verdict_follows() -> None:
    rows = measure().rows
    require_rates(rows)
    require_verdicts(rows)


@pytest.mark.usefixtures("_namespaces")
def test_namespaces_and_their_processes_are_removed_after_a_failure() -> None:
    started: list[subprocess.Popen[bytes]] = []
    names: list[str] = []

    def fail() -> None:
        with two_nodes(rate_bytes_per_s=12.5e6) as nodes:
            names.extend(node.name for node in nodes)
            started.append(subprocess.Popen(nodes[0].command("sleep", "600")))
            program = ["-m", "tests.no_such_module"]
            exits = torchrun(nodes[:1], program, ranks_per_node=1, timeout_s=60)
            assert exits[0].code != 0
            assert "no_such_module" in exits[0].output
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        fail()
    assert started[0].wait(timeout=5) == -signal.SIGKILL
    left = subprocess.run(["ip", "netns", "list"], capture_output=True, text=True, check=True)
    assert len(names) == 2
    assert all(name not in left.stdout for name in names)


@pytest.mark.usefixtures("_namespaces")
def test_nodes_around_a_switch_reach_each_other_and_are_removed_afterwards() -> None:
    with star(3, rate_bytes_per_s=12.5e6) as nodes:
        knock = nodes[0].command("bash", "-c", f"echo > /dev/tcp/{nodes[2].address}/9")
        reached = subprocess.run(knock, capture_output=True, text=True, check=False, timeout=10)
    assert "Connection refused" in reached.stderr  # nobody listens, but somebody answers
    left = subprocess.run(["ip", "netns", "list"], capture_output=True, text=True, check=True)
    assert all(node.name not in left.stdout for node in nodes)
    assert nodes[0].name.replace("node0", "hub") not in left.stdout


@pytest.mark.usefixtures("_namespaces")
def test_a_node_that_hangs_is_ended_in_time() -> None:
    began = time.monotonic()
    with two_nodes(rate_bytes_per_s=None) as nodes:
        alone = torchrun(nodes[:1], ["-m", "timeit"], ranks_per_node=1, timeout_s=0.5)
    assert alone[0].code == -signal.SIGKILL
    assert time.monotonic() - began < 20
