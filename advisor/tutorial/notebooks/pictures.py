"""Plots of the notebook, from results of the lessons; nothing is computed here.

matplotlib is an extra (`pip install 'parallel-advisor[notebook]'`). Colors are those of Okabe and
Ito (2008), safe for color-blind readers; no information is in color alone.
"""

from __future__ import annotations

import io
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING

from advisor.cost.stages.orders import PassKind
from profiles.units import GIB, KIB, MIB, format_percent, format_seconds

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

    from advisor.decide.decision import Decision
    from advisor.tutorial.notebooks.pipelining import Drawn
    from advisor.tutorial.notebooks.splitting import Trained
    from advisor.tutorial.notebooks.summing import RoundState
    from advisor.tutorial.notebooks.updating import RankRun
    from advisor.whatif.sweep.points import Sweep
    from engines.plan import Schedule

BLACK, GREY = "#000000", "#BBBBBB"
BLUE, ORANGE, GREEN, RED, SKY = "#0072B2", "#E69F00", "#009E73", "#D55E00", "#56B4E9"
LINES = ((BLUE, "o", "-"), (RED, "s", "--"), (GREEN, "^", "-."), (ORANGE, "D", ":"))
MS = 1e3
BELOW = 0.25  # half the bar's width, so that error bars of a group do not overlap


class Picture:
    """A figure that a notebook displays with any matplotlib backend."""

    def __init__(self, figure: Figure) -> None:
        written = io.BytesIO()
        figure.savefig(written, format="png", dpi=110)
        self.png = written.getvalue()

    def _repr_png_(self) -> bytes:
        return self.png


def _panels(
    columns: int,
    *,
    height: float,
    rows: int = 1,
    sharex: bool = False,
    sharey: bool = False,
) -> tuple[Figure, list[Axes]]:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(10, height), layout="constrained")
    axes = list(figure.subplots(rows, columns, sharex=sharex, sharey=sharey, squeeze=False).flat)
    for each in axes:
        each.spines[["top", "right"]].set_visible(False)
    return figure, axes


def splitting(ways: Mapping[str, Sequence[Trained]]) -> Picture:
    """Plot step time, parameter bytes and sent bytes of a rank; `ways` has the results of all
    ranks."""
    figure, (time, memory, sent) = _panels(3, height=2.8, sharey=True)
    places = range(len(ways))
    first = [ranks[0] for ranks in ways.values()]
    time.barh(
        places,
        [each.predicted_s * MS for each in first],
        xerr=(
            [(each.predicted_s - each.low_s) * MS for each in first],
            [(each.high_s - each.predicted_s) * MS for each in first],
        ),
        color=SKY,
        capsize=5,
        label="predicted, with its range",
    )
    time.errorbar(
        [each.measured.median_s * MS for each in first],
        [place + BELOW for place in places],
        xerr=(
            [(each.measured.median_s - each.measured.low_s) * MS for each in first],
            [(each.measured.high_s - each.measured.median_s) * MS for each in first],
        ),
        linestyle="none",
        marker="D",
        color=RED,
        capsize=3,
        label="measured",
    )
    time.set_xlabel("a step (ms)")
    time.set_yticks(places, list(ways))
    time.invert_yaxis()
    figure.legend(loc="outside upper left", ncols=2, frameon=False)
    memory.barh(
        places, [max(r.parameter_bytes for r in ranks) / MIB for ranks in ways.values()], color=GREY
    )
    memory.set_xlabel("parameters on a rank (MiB)")
    sent.barh(places, [each.sent_bytes / MIB for each in first], color=GREY)
    sent.set_xlabel("sent by a rank in a step (MiB)")
    return Picture(figure)


def rounds(moments: Sequence[Sequence[RoundState]]) -> Picture:
    """Plot every rank's parts after each round; `moments` has the results of all ranks."""
    ranks = len(moments)
    steps = list(zip(*moments, strict=True))
    figure, axes = _panels(4, rows=-(-len(steps) // 4), height=4.6)
    for number, (at, panel) in enumerate(zip(steps, axes, strict=False)):
        messages = at[0].messages
        kind = "added" if any(m.adds for m in messages) else "copied"
        panel.set_title(f"round {number}: {kind}" if number else "before", fontsize="medium")
        panel.imshow([m.sums for m in at], cmap="Blues", vmin=0, vmax=2 * ranks, aspect="auto")
        for rank, moment in enumerate(at):
            for part, value in enumerate(moment.values):
                panel.text(part, rank, f"{value:.0f}", ha="center", va="center", fontsize=9)
        for message in messages:
            for part in message.parts:
                _frame(panel, part, message.target)
        panel.set_xticks(range(ranks), [f"part {part}" for part in range(ranks)], fontsize=8)
        panel.set_yticks(range(ranks), [f"rank {rank}" for rank in range(ranks)], fontsize=8)
        panel.tick_params(length=0)
        panel.spines[:].set_visible(False)
    for panel in axes[len(steps) :]:
        panel.axis("off")
        panel.text(
            0,
            0.5,
            "framed: what has just come\nfrom the rank above\n(to rank 0: from the last)\n\n"
            "darker: more ranks'\ngradients are in it",
            va="center",
            transform=panel.transAxes,
        )
    return Picture(figure)


def _frame(panel: Axes, column: int, row: int) -> None:
    from matplotlib.patches import Rectangle

    corner = (column - 0.46, row - 0.46)
    panel.add_patch(Rectangle(corner, 0.92, 0.92, fill=False, edgecolor=RED, linewidth=2))


def sums(
    carried: Mapping[str, Mapping[int, float]],
    formulas: Mapping[str, Sequence[float]],
    sizes: Sequence[int],
    seconds: Mapping[str, Sequence[float]],
) -> Picture:
    """Plot traffic of the busiest link by number of ranks, and sum time by size."""
    from matplotlib.ticker import LogLocator

    figure, (link, clock) = _panels(2, height=3.4)
    ranks = list(next(iter(carried.values())))
    for (name, line), (colour, _, style) in zip(formulas.items(), LINES, strict=False):
        link.plot(ranks, line, style, color=colour, label=name)
    for (name, points), (colour, marker, _) in zip(carried.items(), LINES, strict=False):
        link.plot(ranks, list(points.values()), marker, color=colour, label=f"{name}, counted")
    link.set_ylim(bottom=0)
    link.set_xlabel("ranks n")
    link.set_ylabel("busiest link carries (tensors)")
    link.legend(frameon=False)
    values = [size / MIB for size in sizes]
    for (name, times), (colour, marker, style) in zip(seconds.items(), LINES, strict=False):
        clock.plot(values, [s * MS for s in times], style, marker=marker, color=colour, label=name)
    clock.set_xscale("log", base=2)
    clock.set_yscale("log")
    clock.set_xticks(values, [f"{value:g}" for value in values])
    clock.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
    clock.yaxis.set_major_formatter("{x:g}")
    clock.yaxis.set_minor_formatter("")
    clock.set_xlabel("tensor (MiB)")
    clock.set_ylabel("a sum over four ranks (ms)")
    clock.legend(frameon=False)
    return Picture(figure)


# Color, hatch and name of each action; the halves of a split backward differ.
_LOOKS = {
    PassKind.FORWARD: (SKY, "", "forward"),
    PassKind.BACKWARD: (ORANGE, "", "backward"),
    PassKind.INPUT: (ORANGE, "//", "backward: input"),
    PassKind.WEIGHT: (GREEN, "..", "backward: weights"),
}


def schedules(played: Mapping[Schedule, Drawn]) -> Picture:
    """Plot each schedule: a row per rank, a number per microbatch."""
    from matplotlib.patches import Patch

    figure, axes = _panels(1, rows=len(played), height=6.4, sharex=True)
    longest = max(drawn.wall_s for drawn in played.values())
    for panel, (schedule, drawn) in zip(axes, played.items(), strict=True):
        for span in drawn.spans:
            colour, hatch, _ = _LOOKS[span.action.kind]
            start, width = span.start_s * MS, (span.end_s - span.start_s) * MS
            panel.barh(
                span.rank, width, 0.86, start, color=colour, hatch=hatch, edgecolor="white", lw=0.6
            )
            if span.end_s - span.start_s > longest / 90:
                at = start + width / 2
                panel.text(
                    at, span.rank, str(span.action.microbatch), ha="center", va="center", fontsize=6
                )
        title = f"{schedule}: {format_percent(drawn.bubble)} idle, {format_seconds(drawn.wall_s)}"
        panel.set_title(title, fontsize="medium", loc="left")
        ranks = sorted({span.rank for span in drawn.spans})
        panel.set_yticks(ranks, [f"stage {rank}" for rank in ranks])
        panel.invert_yaxis()
    axes[-1].set_xlabel("ms since the round began")
    patches = [
        Patch(facecolor=colour, hatch=hatch, edgecolor="white", label=name)
        for colour, hatch, name in _LOOKS.values()
    ]
    figure.legend(handles=patches, loc="outside upper center", ncols=4, frameon=False)
    return Picture(figure)


def split_sizes(sweep: Sweep) -> Picture:
    """Plot step time by microbatch size, predicted and measured with their ranges."""
    figure, (panel,) = _panels(1, height=3.4)
    points = sweep.points
    values = [point.value or 0.0 for point in points]
    panel.plot(values, [p.step_s * MS for p in points], "-o", color=BLUE, label="predicted")
    low, high = ([getattr(p, name) * MS for p in points] for name in ("low_s", "high_s"))
    panel.fill_between(values, low, high, color=BLUE, alpha=0.15, label="range of the prediction")
    timings = [point.measured for point in points if point.measured]
    panel.errorbar(
        [point.value or 0.0 for point in points if point.measured],
        [t.median_s * MS for t in timings],
        yerr=(
            [(t.median_s - t.low_s) * MS for t in timings],
            [(t.high_s - t.median_s) * MS for t in timings],
        ),
        fmt="--s",
        color=RED,
        capsize=4,
        label="measured",
    )
    panel.set_xscale("log", base=2)
    panel.set_xticks(values, [f"{value:g}" for value in values])
    panel.set_ylim(bottom=0)
    panel.set_xlabel(f"split size (samples of {sweep.global_batch_size})")
    panel.set_ylabel("a step (ms)")
    panel.legend(frameon=False)
    return Picture(figure)


def staleness(
    rate: float, curves: Mapping[int, Sequence[float]], limits: Mapping[int, tuple[float, float]]
) -> Picture:
    """Plot loss by update at several staleness values, and the largest rate by staleness, (formula,
    tried)."""
    figure, (descent, border) = _panels(2, height=3.4)
    for (age, losses), (colour, _, style) in zip(curves.items(), LINES, strict=False):
        descent.plot(losses, style, color=colour, label=f"{age} updates old")
    descent.set_yscale("log")
    descent.set_ylim(bottom=1e-8)
    descent.set_xlabel("updates")
    descent.set_ylabel(f"loss above the optimum, rate {rate:g}")
    descent.legend(frameon=False, title="gradients are")
    ages = list(limits)
    border.plot(ages, [formula for formula, _ in limits.values()], "-", color=BLUE, label="formula")
    border.plot(ages, [tried for _, tried in limits.values()], "s", color=RED, label="tried")
    border.axhline(rate, color=BLACK, linewidth=0.8, linestyle=":")
    border.text(ages[-1], rate, f"rate {rate:g}", ha="right", va="bottom")
    border.set_ylim(bottom=0)
    border.set_xlabel("age of gradients (updates)")
    border.set_ylabel("largest rate that descends")
    border.legend(frameon=False)
    return Picture(figure)


def updating(
    synchronous: Sequence[RankRun],
    asynchronous: Sequence[RankRun],
    local: Mapping[int, Sequence[RankRun]],
) -> Picture:
    """Plot loss over the first worker's time, updates by staleness on the server, and bytes of
    local SGD by its period; runs are those of all ranks, in order."""
    figure, (clock, age, sent) = _panels(3, height=3.2)
    both = {"synchronous": synchronous, "asynchronous": asynchronous}
    for number, ((name, runs), (colour, _, style)) in enumerate(
        zip(both.items(), LINES, strict=False)
    ):
        server, worker, *_ = runs
        clock.plot(worker.seconds, worker.losses, style, color=colour, label=name)
        counted = server.report.staleness
        offsets = [old + (number - 0.5) * 0.4 for old in counted]
        age.bar(offsets, list(counted.values()), 0.4, color=colour, label=name)
    clock.set_title("beside a slow rank", fontsize="medium")
    clock.set_yscale("log")
    clock.set_xlabel("seconds")
    clock.set_ylabel("loss above the optimum")
    clock.legend(frameon=False)
    age.set_title("how old gradients were", fontsize="medium")
    age.set_xlabel("age of a gradient (updates)")
    age.set_ylabel("gradients")
    age.legend(frameon=False)
    places = range(len(local))
    first = [runs[0] for runs in local.values()]
    sent.bar(places, [run.report.sent_bytes / KIB for run in first], color=GREY)
    for place, run in enumerate(first):
        label = f"ends\n{run.losses[-1]:.2g}\nabove"
        sent.text(place, run.report.sent_bytes / KIB, label, ha="center", va="bottom", fontsize=8)
    sent.margins(y=0.3)
    sent.set_title("local SGD", fontsize="medium")
    sent.set_xticks(places, [str(every) for every in local])
    sent.set_xlabel("steps between meetings")
    sent.set_ylabel("sent by a rank (KiB)")
    return Picture(figure)


def noise(measured: Sequence[float], truth: float, falls: Mapping[int, Sequence[float]]) -> Picture:
    """Plot the critical batch by step, and loss by steps and by samples at several batch sizes."""
    figure, (meter, by_step, by_sample) = _panels(3, height=3.2)
    meter.plot(range(1, len(measured) + 1), measured, color=RED, label="measured")
    meter.axhline(truth, color=BLACK, linestyle=":", label="true")
    meter.set_ylim(0, 2 * truth)
    meter.set_xlabel("steps looked at")
    meter.set_ylabel("critical batch (samples)")
    meter.legend(frameon=False)
    for (size, losses), (colour, _, style) in zip(falls.items(), LINES, strict=False):
        steps = range(len(losses))
        by_step.plot(steps, losses, style, color=colour, label=f"batch {size}")
        by_sample.plot([step * size for step in steps], losses, style, color=colour)
    for panel, name in ((by_step, "steps"), (by_sample, "samples")):
        panel.set_ylim(bottom=0)
        panel.set_xlabel(name)
        panel.set_ylabel("loss")
    by_step.legend(frameon=False)
    return Picture(figure)


def plans(decision: Decision) -> Picture:
    """Plot the chosen plan and alternatives: step time, and memory against usable memory."""
    figure, (time, memory) = _panels(2, height=3.0, sharey=True)
    rows = list(_rows(decision))
    places = range(len(rows))
    colours = [SKY if fits else GREY for *_, fits in rows]
    time.barh(places, [step_s or 0.0 for _, step_s, _, _, _ in rows], color=colours)
    for place, (_, step_s, *_) in enumerate(rows):
        time.text(
            step_s or 0.0,
            place,
            f" {format_seconds(step_s)}" if step_s else " does not fit",
            va="center",
        )
    time.margins(x=0.2)
    time.set_xlabel("a step (s)")
    time.set_yticks(places, [name for name, *_ in rows])
    time.invert_yaxis()
    peaks = [peak / GIB for _, _, peak, _, _ in rows]
    upper = [(high - peak) / GIB for _, _, peak, high, _ in rows]
    memory.barh(places, peaks, xerr=([0.0] * len(rows), upper), color=colours, capsize=4)
    usable = decision.policy.usable_bytes(decision.facts.cluster.device) / GIB
    memory.axvline(usable, color=RED, linestyle="--", label=f"usable: {usable:.1f} GiB")
    memory.set_xlabel("peak of a device (GiB)")
    figure.legend(loc="outside upper right", frameon=False)
    return Picture(figure)


def _rows(decision: Decision) -> Iterator[tuple[str, float | None, float, float, bool]]:
    from advisor.decide.comparison import title

    taken = decision.estimate
    name = f"{title(decision.plan)} (taken)"
    yield name, taken.step_s, taken.peak_bytes, taken.peak_high_bytes, True
    for other in decision.alternatives:
        fits = other.step_s is not None
        yield other.title, other.step_s, other.peak_bytes, other.peak_high_bytes, fits
