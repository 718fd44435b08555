"""Sweeps: one quantity against the time of a step."""

from __future__ import annotations

import csv
import io
import sys
import time
from pathlib import Path

import pytest
import torch
from click.testing import CliRunner, Result
from matplotlib.axes import Axes
from matplotlib.container import BarContainer, ErrorbarContainer
from matplotlib.figure import Figure
from rich.console import Console, RenderableType
from torch import Tensor, nn

from advisor.auto.measure import measured_sweep
from advisor.cli.main import cli
from advisor.inputs.facts import Facts
from advisor.inputs.models import load_model, profile_model
from advisor.whatif.sweep.picture import picture
from advisor.whatif.sweep.points import Point, Sweep, Swept, sweep
from advisor.whatif.sweep.table import sweep_csv, sweep_table
from engines.plan import PartialPlan
from profiles.capture.capture import capture
from profiles.errors import InputError, PlanError, RankError
from profiles.machine.clusters import cluster_from_name
from profiles.provenance import Timing
from profiles.workload.workload import Workload
from tests.workers import Pool

RESNET_50 = ("sweep", "resnet50-128px", "--global-batch", "120", "--optimizer", "sgd")
ON_TWO = (*RESNET_50, "--cluster", "2xV100-PCIe-32GB")
PNG = b"\x89PNG\r\n\x1a\n"


def advise(*words: str) -> Result:
    return CliRunner().invoke(cli, list(words))


def rows(path: Path) -> list[dict[str, str]]:
    with path.open() as file:
        return list(csv.DictReader(file))


def images(cluster: str = "8xV100-PCIe-32GB", batch: int = 64) -> Facts:
    return Facts(
        model=profile_model("resnet50-128px", samples=1, sequence_length=None),
        cluster=cluster_from_name(cluster),
        workload=Workload(global_batch_size=batch),
    )


def seconds(swept: Sweep) -> list[float]:
    return [point.step_s for point in swept.points]


class TestTheBundledNetwork:
    def test_it_has_the_published_parameters_and_the_flop_of_the_closed_form(self) -> None:
        loaded = load_model("resnet50-64px", samples=2, sequence_length=None)
        captured = capture(loaded.module, loaded.sample, loss_fn=loaded.loss_fn)
        counted = profile_model("resnet50-64px", samples=1, sequence_length=None)
        # As in torchvision's table of weights.
        assert captured.parameters == counted.parameters == 25_557_032
        assert captured.flop(1) == counted.flop(1)
        assert "layer3.0" in {unit.name for unit in captured.units}  # where the tutorial cuts

    def test_networks_without_code_are_not_loaded(self) -> None:
        with pytest.raises(InputError, match="no code of it to run"):
            load_model("vgg16", samples=2, sequence_length=None)

    def test_images_have_no_sequence_length(self) -> None:
        with pytest.raises(InputError, match="takes images"):
            profile_model("vgg16", samples=2, sequence_length=128)


class TestQuantities:
    def test_each_halving_of_the_bandwidth_adds_twice_as_much_time(self) -> None:
        """Step = computing + bytes / rate - what is hidden: 1/r - 1/2r is twice 1/2r - 1/4r."""
        rates = ["0.25 GB/s", "0.5 GB/s", "1 GB/s"]
        swept = sweep(
            images(), Swept.BANDWIDTH, rates, settings=PartialPlan.parse("dp_replicate=8")
        )
        slow, twice, fourfold = seconds(swept)
        assert (slow - twice) / (twice - fourfold) == pytest.approx(2, rel=0.02)
        assert [point.value for point in swept.points] == [0.25e9, 0.5e9, 1e9]

    def test_more_devices_take_less_time_for_the_same_batch(self) -> None:
        asked = ["1", "2", "4", "8"]
        swept = sweep(images(batch=512), Swept.DEVICES, asked, settings=PartialPlan())
        assert [point.devices for point in swept.points] == [1, 2, 4, 8]
        assert seconds(swept) == sorted(seconds(swept), reverse=True)

    def test_a_larger_batch_takes_longer(self) -> None:
        swept = sweep(images(), Swept.BATCH, ["8", "64"], settings=PartialPlan())
        assert {p.label: p.plan.global_batch_size for p in swept.points} == {"8": 8, "64": 64}
        assert seconds(swept)[0] < seconds(swept)[1]

    def test_microbatches_shorten_the_bubble(self) -> None:
        partial = PartialPlan.parse("pp=2 dp_replicate=1 schedule=gpipe")
        facts = images("2xV100-PCIe-32GB")
        swept = sweep(facts, Swept.MICROBATCHES, ["1", "2", "4"], settings=partial)
        assert [point.plan.microbatches for point in swept.points] == [1, 2, 4]
        assert seconds(swept) == sorted(seconds(swept), reverse=True)

    def test_a_point_that_does_not_fit_is_shown_and_never_the_best(self) -> None:
        partial = PartialPlan.parse("dp_replicate=8 recompute=none")
        swept = sweep(images(batch=65_536), Swept.SPLIT_SIZE, ["8192", "8"], settings=partial)
        large, small = swept.points
        assert not large.fits
        assert small.fits
        assert swept.best is small
        assert [row.endswith("True") for row in sweep_csv(swept).splitlines()[1:]] == [False, True]

    def test_plans_are_shown_with_the_devices_that_they_take(self) -> None:
        """Three devices of eight take longer than eight, and are not said to be eight."""
        plans = ["dp_replicate=8", "pp=3", "microbatch_size=8"]
        shown = text_of(sweep_table(sweep(images(), Swept.PLAN, plans, settings=PartialPlan())))
        for line in (
            "1: dp_replicate=8 (on 8 devices)",
            "2: pp=3 (on 3 devices)",
            "3: microbatch_size=8 (on 8 devices)",
        ):
            assert line in shown

    def test_a_split_that_does_not_divide_the_batch_is_refused(self) -> None:
        with pytest.raises(PlanError, match="microbatch_size=7"):
            sweep(images(), Swept.SPLIT_SIZE, ["7"], settings=PartialPlan())


MEASURED_S = (0.9, 0.5, 0.7)
RANGES_S = (0.81, 1.08, 0.45, 0.6, 0.63, 0.84)


def text_of(table: RenderableType) -> str:
    console = Console(width=120, file=io.StringIO())
    with console.capture() as shown:
        console.print(table)
    return shown.get()


def measured(point: Point, median_s: float) -> Point:
    """Return `point` as measured in a run, with a range from a tenth less to a fifth more."""
    low_s, high_s = 0.9 * median_s, 1.2 * median_s
    timing = Timing(median_s=median_s, low_s=low_s, high_s=high_s, repeats=10)
    return point.model_copy(update={"measured": timing})


class TestWhatIsShown:
    """Of three points the last is predicted fastest, the middle one is measured fastest."""

    @pytest.fixture
    def predicted(self) -> Sweep:
        return sweep(
            images("1xV100-PCIe-32GB"), Swept.SPLIT_SIZE, ["1", "8", "64"], settings=PartialPlan()
        )

    @pytest.fixture
    def timed(self, predicted: Sweep) -> Sweep:
        points = zip(predicted.points, MEASURED_S, strict=True)
        return predicted.model_copy(update={"points": tuple(measured(*each) for each in points)})

    def test_measured_steps_decide_where_all_points_are_measured(
        self, predicted: Sweep, timed: Sweep
    ) -> None:
        assert predicted.best is predicted.points[2]
        assert timed.best is timed.points[1]
        partly = (*timed.points[:2], predicted.points[2])
        assert predicted.model_copy(update={"points": partly}).best is predicted.points[2]

    def test_the_table_has_a_measured_column_where_something_was_measured(
        self, predicted: Sweep, timed: Sweep
    ) -> None:
        partly = timed.model_copy(update={"points": (*timed.points[:2], predicted.points[2])})
        before, after = (text_of(sweep_table(each)) for each in (predicted, partly))
        assert "measured" not in before
        assert "measured" in after
        first, second, third = (
            line.split() for line in after.splitlines() if line.rstrip().endswith(("yes", "no"))
        )
        assert " ".join(first[3:10]) == "900 ms 810 ms to 1.08 s"
        assert " ".join(second[3:10]) == "500 ms 450 ms to 600 ms"
        assert len(third) == len(second) - 2  # nothing was measured

    def test_the_csv_file_has_predicted_and_measured_ranges(self, timed: Sweep) -> None:
        written = csv.DictReader(sweep_csv(timed).splitlines())
        for row, point in zip(written, timed.points, strict=True):
            assert point.measured is not None
            wanted = {
                "predicted_s": point.step_s,
                "predicted_low_s": point.low_s,
                "predicted_high_s": point.high_s,
                "measured_s": point.measured.median_s,
                "measured_low_s": point.measured.low_s,
                "measured_high_s": point.measured.high_s,
                "measured_steps": 10,
            }
            assert {name: float(row[name]) for name in wanted} == wanted

    def test_a_curve_shows_its_points_with_measured_ranges_as_error_bars(
        self, timed: Sweep, drawn: list[Axes]
    ) -> None:
        picture(timed)
        (axes,) = drawn
        line = axes.get_lines()[0]
        assert list(line.get_xdata()) == [1, 8, 64]
        assert list(line.get_ydata()) == [point.step_s for point in timed.points]
        assert axes.get_xscale() == "log"
        (errors,) = axes.containers
        assert reaches(errors) == pytest.approx(RANGES_S)

    def test_bars_of_plans_have_their_ranges(self, timed: Sweep, drawn: list[Axes]) -> None:
        plans = timed.model_copy(update={"swept": Swept.PLAN})
        picture(plans)
        (axes,) = drawn
        bars = [container for container in axes.containers if isinstance(container, BarContainer)]
        heights = [[bar.get_height() for bar in group] for group in bars]
        assert heights == [[point.step_s for point in plans.points], list(MEASURED_S)]
        predicted = [end for point in plans.points for end in (point.low_s, point.high_s)]
        assert reaches(bars[0].errorbar) == pytest.approx(predicted)
        assert reaches(bars[1].errorbar) == pytest.approx(RANGES_S)


@pytest.fixture
def drawn(monkeypatch: pytest.MonkeyPatch) -> list[Axes]:
    """The axes of every picture that is written."""
    axes: list[Axes] = []
    monkeypatch.setattr(Figure, "savefig", lambda figure, *_, **__: axes.extend(figure.axes))
    return axes


def reaches(errors: ErrorbarContainer) -> list[float]:
    """Return the lower and upper ends of all error bars."""
    (lines,) = errors.lines[2]
    return [end for (_, low), (_, high) in lines.get_segments() for end in (low, high)]


class TestTheCommand:
    @pytest.mark.parametrize(
        ("words", "said"),
        [
            ((), "no quantity to sweep over"),
            (("--batch", "8", "--devices", "2"), "one quantity is swept at a time"),
            (("--split-size", "1,,3"), "no list of values"),
            (("--split-size", "1,x"), "`split size` wants a positive whole number, not `x`"),
            (("--split-size", "1", "--measure"), "`--measure` runs on this job's devices"),
            (("--plan", "pp=2", "--plan", "tp=2", "--batch", "8"), "over several plans"),
            (("--split-size", "12", "--steps", "5"), "`--steps 5` is about runs"),
            (("--devices", "3"), "3 devices are no whole nodes of 2"),
            (("--bandwidth", "10"), "`10` has no unit"),
            (("--split-size", "7", "--plan", "pp=2"), "`microbatch_size` may be 1, 2, 3, 4, 5"),
        ],
    )
    def test_impossible_sweeps_are_refused(self, words: tuple[str, ...], said: str) -> None:
        result = advise(*ON_TWO, *words)
        assert result.exit_code == 2
        assert said in result.stderr

    @pytest.mark.parametrize("option", ["--devices", "--batch", "--microbatches", "--split-size"])
    def test_an_error_in_a_value_names_its_option(self, option: str) -> None:
        result = advise(*ON_TWO, option, "0")
        assert result.exit_code == 2
        assert f"\n  {option}\n" in result.stderr
        assert "hint: write 1 or more" in result.stderr

    def test_bandwidth_of_one_device_is_refused(self) -> None:
        asked = ("--cluster", "T4", "--bandwidth", "10 GB/s")
        result = advise("sweep", "resnet50-64px", "--global-batch", "8", *asked)
        assert result.exit_code == 2
        assert "is one device, and has no links to vary" in result.stderr
        assert "name two devices or more" in result.stderr

    @pytest.mark.parametrize(
        ("words", "said"),
        [
            (("--bandwidth", "1 GB/s"), "a job has the bandwidth that it has"),
            (("--split-size", "1", "--optimizer", "muon"), "unknown optimizer `muon`"),
        ],
    )
    def test_sweeps_that_cannot_be_measured_are_refused_before_anything_runs(
        self, words: tuple[str, ...], said: str
    ) -> None:
        asked = ("sweep", "resnet50-64px", "--global-batch", "8", "--measure")
        result = advise(*asked, *words)
        assert result.exit_code == 2
        assert said in result.stderr
        assert "leave `--measure` out" in result.stderr

    def test_batches_are_compared_per_sample(self, tmp_path: Path) -> None:
        table = tmp_path / "batches.csv"
        result = advise(*ON_TWO, "--batch", "8,256", "-o", str(table))
        assert result.exit_code == 0, result.stderr
        small, large = (float(row["predicted_s"]) for row in rows(table))
        assert small < large
        assert small / 8 > large / 256
        assert "Fastest a sample, as predicted: global batch 256" in result.stdout

    def test_a_picture_without_matplotlib_names_the_extra(
        self, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
    ) -> None:
        monkeypatch.setitem(sys.modules, "matplotlib", None)
        monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
        result = advise(*ON_TWO, "--split-size", "12", "--png", str(tmp_path / "u.png"))
        assert result.exit_code == 2
        assert "pip install 'parallel-advisor[plots]'" in result.stderr
        assert list(tmp_path.iterdir()) == []


NAP_S = 0.03
LATE_S = 4.0


class Napping(nn.Module):
    """Takes NAP_S a forward, however many rows there are."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        time.sleep(NAP_S)
        out: Tensor = self.layer(x)
        return out


def napping() -> tuple[nn.Module, tuple[Tensor, Tensor], object]:
    return Napping(), (torch.zeros(2, 4), torch.zeros(2, 4)), nn.functional.mse_loss


def on_ranks(
    values: list[str], swept: Swept, plan: str, late: int = 0, timeout_s: float = 60.0
) -> Sweep | str:
    """Sweep on all ranks; rank `late` arrives after the time limit, if there is one."""
    if timeout_s < LATE_S and torch.distributed.get_rank() == late:
        time.sleep(LATE_S)
    cluster = cluster_from_name("2xA100-SXM-80GB")  # its predictions do not matter here
    try:
        return measured_sweep(
            f"{__name__}:napping",
            swept,
            values,
            settings=PartialPlan.parse(plan),
            global_batch_size=8,
            optimizer="sgd",
            steps=3,
            timeout_s=timeout_s,
            cluster=cluster,
        )
    except RankError as error:
        return error.what


@pytest.mark.dist
class TestMeasured:
    def test_measured_steps_take_one_nap_per_microbatch(self, pool: Pool) -> None:
        swept = pool.run(on_ranks, ["1", "4"], Swept.SPLIT_SIZE, "dp_replicate=2", world_size=2)[0]
        for point, naps in zip(swept.points, (4, 1), strict=True):
            assert point.measured.repeats == 3
            assert naps * NAP_S <= point.measured.median_s < (naps + 3) * NAP_S
        assert swept.best.label == "4"
        assert picture(swept).startswith(PNG)

    def test_a_plan_of_one_device_runs_while_the_other_rank_idles(self, pool: Pool) -> None:
        plans = ["dp_replicate=1 microbatch_size=2", "dp_replicate=2 microbatch_size=4"]
        swept, other = pool.run(on_ranks, plans, Swept.PLAN, "", world_size=2)
        assert swept.points[0] == other.points[0]
        assert [point.devices for point in swept.points] == [1, 2]
        one, two = (point.measured.median_s for point in swept.points)
        assert one >= 4 * NAP_S
        assert NAP_S <= two < one
        assert picture(swept).startswith(PNG)

    def test_the_same_batch_is_measured_on_one_device_and_on_two(self, pool: Pool) -> None:
        swept = pool.run(on_ranks, ["1", "2"], Swept.DEVICES, "microbatch_size=2", world_size=2)[0]
        assert [point.devices for point in swept.points] == [1, 2]
        for point, naps in zip(swept.points, (4, 2), strict=True):
            assert naps * NAP_S <= point.measured.median_s < (naps + 2) * NAP_S

    def test_a_late_rank_is_named_after_the_timeout(self, pool: Pool) -> None:
        asked = (["1"], Swept.SPLIT_SIZE, "dp_replicate=2", 1, 1.0)
        first, _ = pool.run(on_ranks, *asked, world_size=2)
        assert first == "rank 1 did not answer within 1 s"

    def test_a_late_rank_that_others_idle_for_is_named_after_the_timeout(self, pool: Pool) -> None:
        _, second = pool.run(on_ranks, ["1"], Swept.DEVICES, "", 0, 1.0, world_size=2)
        assert second == "rank 0 did not answer within 1 s"


@pytest.mark.skipif(torch.cuda.is_available(), reason="torch would use the GPUs")
def test_one_process_times_plans_of_one_device_and_of_threads(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Without GPUs nn.DataParallel calls the module itself, on the whole batch."""
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    swept = measured_sweep(
        f"{__name__}:napping",
        Swept.PLAN,
        ["dp_replicate=1 microbatch_size=2", "data_parallel=threads dp_replicate=2"],
        settings=PartialPlan(),
        global_batch_size=8,
        steps=3,
        cluster=cluster_from_name("2xA100-SXM-80GB"),
    )
    assert [point.devices for point in swept.points] == [1, 2]
    for point, naps in zip(swept.points, (4, 1), strict=True):
        assert point.measured is not None
        assert naps * NAP_S <= point.measured.median_s < (naps + 2) * NAP_S
