"""The growth benchmark itself: exponents of known laws, points that are kept, marks that miss."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.benchmarks.growth.__main__ import main, measured, missed
from tests.benchmarks.growth.curves import CURVES
from tests.benchmarks.growth.picture import draw
from tests.benchmarks.growth.results import Point, Report, exponent


def report(curve: str, law: dict[float, float], **more: float) -> Report:
    points = tuple(Point(curve=curve, at=at, cpu_s=cpu_s, **more) for at, cpu_s in law.items())
    return Report(measured_at="2026-11-23", machine="test", torch="2.13", points=points)


def test_the_exponent_is_that_of_the_larger_half_of_the_sizes() -> None:
    """A second and a square: the second hides the square below a hundred."""
    law = {10.0**n: 1.0 + 1e-4 * 10.0 ** (2 * n) for n in range(6)}
    slope = exponent(report("x", law).points, "cpu_s")
    assert slope == pytest.approx(2.0, abs=0.01)


def test_two_sizes_have_no_exponent() -> None:
    assert exponent(report("x", {1.0: 1.0, 10.0: 9.0}).points, "cpu_s") is None


def test_a_mark_is_missed_by_the_exponent_and_by_the_size_that_is_marked() -> None:
    curve = next(curve for curve in CURVES if curve.key == "decide by devices")
    fast = report(curve.key, {1.0: 0.1, 64.0: 0.2, 1024.0: 0.4, 16_384.0: 0.9})
    slow = report(curve.key, {1.0: 0.1, 64.0: 0.1, 1024.0: 1.5, 16_384.0: 400.0})
    assert missed(fast) == []
    assert len(missed(slow)) == 2


def test_a_size_is_measured_where_it_is_asked_for() -> None:
    point = measured("count a profile by layers", "10")
    assert point.about.endswith("B parameters")
    assert point.cpu_s > 0


def test_a_run_that_was_stopped_goes_on_without_what_is_known(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """All sizes of one curve are known: nothing is measured, and the picture is drawn from them."""
    curve = next(curve for curve in CURVES if curve.key == "count a profile by layers")
    path = tmp_path / "growth.json"
    report(curve.key, dict.fromkeys(curve.sizes, 0.5)).save(path)
    before = path.read_text()
    assert main(["--only", curve.key, "--out", str(path)]) == 0
    assert path.read_text() == before
    assert "every mark is met" in capsys.readouterr().out


def test_the_same_report_is_the_same_picture(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    drawn = report("decide by layers", {10.0: 1.0, 100.0: 2.0, 1000.0: 4.0}, host_mib=3.0)
    for name in ("one.svg", "two.svg"):
        draw(drawn, tmp_path / name)
    assert (tmp_path / "one.svg").read_bytes() == (tmp_path / "two.svg").read_bytes()
