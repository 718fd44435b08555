"""Plot of a sweep: a curve over a number, or bars over plans. matplotlib is an extra."""

from __future__ import annotations

import io
from typing import TYPE_CHECKING

from advisor.whatif.sweep.points import Point, Sweep, Swept
from profiles.errors import InputError

if TYPE_CHECKING:
    from matplotlib.axes import Axes

# Curves with a wider span use a logarithmic axis: 1 to 60 images a split, say.
_WIDE = 20.0
_LABELS = {
    Swept.SPLIT_SIZE: "split size (samples)",
    Swept.MICROBATCHES: "microbatches",
    Swept.BANDWIDTH: "bandwidth (GB/s)",
    Swept.DEVICES: "devices",
    Swept.BATCH: "global batch (samples)",
}
_GB = 1e9


def require_matplotlib() -> None:
    """Fail before the work, not after it, if matplotlib is missing.

    Raises:
        InputError: it is not installed.
    """
    try:
        import matplotlib.figure  # noqa: F401
    except ImportError:
        raise InputError(
            "a picture is drawn by matplotlib, which is not installed",
            where="--png",
            hints=["pip install 'parallel-advisor[plots]'", "or write a table: `-o sweep.csv`"],
        ) from None


def picture(sweep: Sweep) -> bytes:
    """Plot seconds per step as PNG, predicted and measured, with ranges as error bars.

    Raises:
        InputError: matplotlib is not installed.
    """
    require_matplotlib()
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7, 4.5), layout="constrained")
    axes = figure.add_subplot()
    if sweep.swept.is_number:
        _curve(axes, sweep)
    else:
        _bars(axes, sweep)
    axes.set_ylabel("seconds per step")
    axes.set_ylim(bottom=0)
    axes.set_title(f"{sweep.model} on {sweep.cluster}", fontsize="medium")
    if axes.get_legend_handles_labels()[0]:
        axes.legend(frameon=False)
    axes.spines[["top", "right"]].set_visible(False)
    written = io.BytesIO()
    figure.savefig(written, format="png", dpi=120)
    return written.getvalue()


def _curve(axes: Axes, sweep: Sweep) -> None:
    unit = _GB if sweep.swept is Swept.BANDWIDTH else 1.0
    points = sorted(sweep.points, key=_value)
    values = [_value(point) / unit for point in points]
    axes.plot(values, [p.step_s for p in points], marker="o", label="predicted")
    axes.fill_between(values, [p.low_s for p in points], [p.high_s for p in points], alpha=0.15)
    timed = [point for point in points if point.measured]
    if timed:
        axes.errorbar(
            [_value(point) / unit for point in timed],
            [point.measured.median_s for point in timed if point.measured],
            yerr=_measured_bars(timed),
            marker="s",
            capsize=4,
            label="measured",
        )
    unfit = [point for point in points if not point.fits]
    if unfit:
        axes.plot(
            [_value(point) / unit for point in unfit],
            [point.step_s for point in unfit],
            linestyle="none",
            marker="x",
            color="black",
            label="does not fit",
        )
    if values[-1] > _WIDE * values[0]:
        axes.set_xscale("log")
    axes.set_xticks(values, [f"{value:g}" for value in values], minor=False)
    axes.set_xticks([], minor=True)
    axes.set_xlabel(_LABELS[sweep.swept])


def _bars(axes: Axes, sweep: Sweep) -> None:
    points = list(sweep.points)
    timed = [point for point in points if point.measured]
    width = 0.4 if timed else 0.6
    places = [float(number) for number in range(len(points))]
    bars = ([p.step_s - p.low_s for p in points], [p.high_s - p.step_s for p in points])
    shift = width / 2 if timed else 0.0
    axes.bar(
        [place - shift for place in places],
        [point.step_s for point in points],
        width,
        yerr=bars,
        capsize=6,
        label="predicted",
    )
    if timed:
        axes.bar(
            [place + shift for place, point in zip(places, points, strict=True) if point.measured],
            [point.measured.median_s for point in timed if point.measured],
            width,
            yerr=_measured_bars(timed),
            capsize=6,
            label="measured",
        )
    axes.set_xticks(places, [_folded(point.label) for point in points], fontsize="small")


def _measured_bars(points: list[Point]) -> tuple[list[float], list[float]]:
    """Distance of the range's ends below and above the median."""
    timings = [point.measured for point in points if point.measured]
    return (
        [timing.median_s - timing.low_s for timing in timings],
        [timing.high_s - timing.median_s for timing in timings],
    )


def _value(point: Point) -> float:
    assert point.value is not None
    return point.value


def _folded(label: str) -> str:
    """Label with one setting per line."""
    return "\n".join(label.split())
