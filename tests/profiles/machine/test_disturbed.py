"""Notes of a bench on other processes that had the cores."""

from __future__ import annotations

import pytest

from profiles.machine.bench import disturbed
from profiles.machine.bench.disturbed import Disturbance
from profiles.machine.bench.job import joined


def noted(
    monkeypatch: pytest.MonkeyPatch, *, waiting_s: float, ranks_per_node: int = 1, cores: int = 64
) -> str:
    """The note of a bench in which a process ran for 3 s."""
    clock = iter([(10.0, 2.0), (13.0, 2.0 + waiting_s)])
    monkeypatch.setattr(disturbed, "scheduled_s", lambda: next(clock))
    monkeypatch.setattr(disturbed, "machine_cores", lambda: cores)
    disturbance = Disturbance(ranks_per_node=ranks_per_node)
    with joined(patience_s=5) as job:
        return disturbance.note(job)


def test_says_which_part_of_the_time_they_took(monkeypatch: pytest.MonkeyPatch) -> None:
    said = noted(monkeypatch, waiting_s=1.0)
    assert said.startswith("other processes took the cores for 25% of the time")


def test_is_silent_of_a_tenth(monkeypatch: pytest.MonkeyPatch) -> None:
    assert noted(monkeypatch, waiting_s=0.3) == ""


def test_is_silent_where_ranks_wait_for_each_other(monkeypatch: pytest.MonkeyPatch) -> None:
    assert noted(monkeypatch, waiting_s=3.0, ranks_per_node=128) == ""


def test_is_silent_where_the_kernel_does_not_count(monkeypatch: pytest.MonkeyPatch) -> None:
    assert noted(monkeypatch, waiting_s=0.0) == ""
