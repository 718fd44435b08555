"""The bar of a bench: on rank 0's terminal, and nowhere else."""

from __future__ import annotations

import io
import sys

import pytest

from profiles.machine.bench import progress


class Screen(io.StringIO):
    """A terminal that remembers."""

    def isatty(self) -> bool:
        return True


def shown(rank: int, screen: io.StringIO, monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.setattr(sys, "stderr", screen)
    monkeypatch.setenv("TERM", "xterm")
    with progress(rank=rank, budget_s=10.0) as tell:
        tell("groups of 2 ranks, 64 KiB")
    return screen.getvalue()


def test_a_terminal_shows_what_is_timed(monkeypatch: pytest.MonkeyPatch) -> None:
    assert "groups of 2 ranks, 64 KiB" in shown(0, Screen(), monkeypatch)


def test_other_ranks_and_pipes_stay_silent(monkeypatch: pytest.MonkeyPatch) -> None:
    assert shown(1, Screen(), monkeypatch) == ""
    assert shown(0, io.StringIO(), monkeypatch) == ""
