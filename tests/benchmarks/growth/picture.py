"""The picture of a report: seconds and memory of every curve over its sizes, on log axes."""

from __future__ import annotations

from pathlib import Path

from tests.benchmarks.growth.curves import CURVES
from tests.benchmarks.growth.results import Report, exponent

_COLUMNS = 4


def draw(report: Report, path: Path) -> None:
    """Write an SVG, the same bytes for the same report; nothing without matplotlib."""
    try:
        from matplotlib import rc_context
        from matplotlib.figure import Figure
    except ImportError:
        return
    curves = [c for c in CURVES if c.against and len(report.of(c.key)) > 1]
    if not curves:
        return
    rows = -(-len(curves) // _COLUMNS)
    # Text as text keeps the file small; without a salt its names are random.
    with rc_context({"svg.fonttype": "none", "svg.hashsalt": "growth", "font.size": 8}):
        figure = Figure(figsize=(3 * _COLUMNS, 2.4 * rows), layout="constrained")
        for place, curve in enumerate(curves, 1):
            axes = figure.add_subplot(rows, _COLUMNS, place)
            points = [point for point in report.of(curve.key) if not point.left_out]
            sizes = [point.at for point in points]
            for name, label, style in (("cpu_s", "s", "o-"), ("host_mib", "MiB", "s--")):
                slope = exponent(points, name)
                grows = "" if slope is None else f", power {slope:.2f}"
                values = [getattr(point, name) for point in points]
                axes.loglog(sizes, values, style, markersize=3, label=f"{label}{grows}")
            axes.set_title(curve.name)
            axes.set_xlabel(curve.against)
            axes.legend(frameon=False)
        figure.savefig(path, format="svg", metadata={"Date": None})
