"""Peaks of hand-written histories."""

from __future__ import annotations

from profiles.trace.timeline import Timeline


def test_a_window_has_the_highest_moment_above_its_beginning() -> None:
    line = Timeline()
    before = line.make(1000)
    line.open("a")
    first = line.make(30)
    line.release(first)
    line.make(20)
    line.release(before)
    line.close("a")
    assert line.peaks() == {"a": 30}
    assert line.highest() == 1030


def test_nested_windows_report_their_highest_moment() -> None:
    line = Timeline()
    line.open("outer")
    block = line.make(5)
    for size in (10, 40, 20):
        line.open("inner")
        line.release(line.make(size))
        line.close("inner")
    line.release(block)
    line.close("outer")
    assert line.peaks() == {"inner": 40, "outer": 45}


def test_ignored_allocations_count_nowhere() -> None:
    line = Timeline()
    line.open("a")
    gradient = line.make(100)
    line.make(7)
    line.close("a")
    assert line.peaks(ignored={gradient}) == {"a": 7}
    assert line.highest(ignored={gradient}) == 7


def test_allocations_come_in_order_without_windows() -> None:
    line = Timeline()
    line.open("a")
    first, second = line.make(5), line.make(7)
    line.release(first)
    line.close("a")
    assert list(line.allocations()) == [(first, 5), (second, 7), (first, None)]


def test_a_workspace_counts_while_its_operation_runs() -> None:
    line = Timeline()
    line.open("forward")
    first = line.make(100)
    line.pass_by(50)
    line.make(20)
    line.release(first)
    line.close("forward")
    line.pass_by(1000)  # in no window
    assert line.peaks() == {"forward": 150}
    assert line.highest() == 1020
    assert line.live_bytes == 20
