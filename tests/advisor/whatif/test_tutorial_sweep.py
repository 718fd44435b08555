"""Sweeps of PyTorch's tutorial on model parallelism.

Its figures (ResNet-50, 120 images of 128 x 128, two devices, plain SGD): 3.75 s on one, 4.02 s in
turn, 2.51 s as a pipeline of 20 images at a time, best at 12. Its devices are not named; ratios are
compared, on two V100 joined by PCIe.

    in turn over one device         tutorial +7.2 %        predicted +8.2 %
    one device over the pipeline    tutorial 1.49          predicted 1.43
    in turn over the pipeline       tutorial 1.60          predicted 1.55
    best size of a split            tutorial 12            predicted 12 on two T4 and on two P40

All lie within the stated ranges, which are +-30 % of a step. The tutorial's devices are slower (it
times three batches, so a step on one takes 1.25 s; 0.13 on a V100, where launches of an unknown
host count ten times as much and 20 is predicted best, and 0.26 on a T4).
"""

from __future__ import annotations

import csv
from itertools import pairwise
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from advisor.cli.main import cli

ONE_S, IN_TURN_S, PIPELINED_S = 3.75, 4.02, 2.51
STEP = ("sweep", "resnet50-128px", "--global-batch", "120", "--optimizer", "sgd")
TUTORIAL = (*STEP, "--cluster", "2xV100-PCIe-32GB")
SIZES = "1,3,5,8,10,12,20,40,60"
CUT = "pp=2 schedule=gpipe stages=layer3.0"
IN_TURN = "pp=2 schedule=naive stages=layer3.0"
PNG = b"\x89PNG\r\n\x1a\n"


def advise(*words: str) -> Result:
    return CliRunner().invoke(cli, list(words))


def rows(path: Path) -> list[dict[str, str]]:
    with path.open() as file:
        return list(csv.DictReader(file))


class TestTheTutorial:
    @pytest.mark.parametrize(
        ("device", "best", "equally"),
        [
            ("T4-16GB", 12, "8, 10, 20"),
            ("P40-24GB", 12, "10, 20"),
            ("V100-PCIe-32GB", 20, ""),
        ],
    )
    def test_step_time_over_the_split_size_is_u_shaped_with_its_minimum_near_12(
        self, device: str, best: int, equally: str, tmp_path: Path
    ) -> None:
        table, drawn = tmp_path / "u.csv", tmp_path / "u.png"
        asked = ("--plan", CUT, "--split-size", SIZES, "-o", str(table), "--png", str(drawn))
        result = advise(*STEP, "--cluster", f"2x{device}", *asked)
        assert result.exit_code == 0, result.stderr
        step_s = {int(row["value"]): float(row["predicted_s"]) for row in rows(table)}
        assert ",".join(map(str, step_s)) == SIZES
        curve = list(step_s.values())
        lowest = curve.index(min(curve))
        assert all(a > b for a, b in pairwise(curve[: lowest + 1]))
        assert all(a < b for a, b in pairwise(curve[lowest:]))
        assert f"Fastest, as predicted: split size {best};" in result.stdout
        assert (f"Equally fast, within 5.0%: {equally}\n" in result.stdout) == bool(equally)
        assert drawn.read_bytes().startswith(PNG)

    def test_bars_of_one_device_naive_stages_and_a_pipeline_match_the_tutorial(
        self, tmp_path: Path
    ) -> None:
        table, drawn = tmp_path / "bars.csv", tmp_path / "bars.png"
        plans = ("dp_replicate=1", IN_TURN, f"{CUT} microbatch_size=20")
        words = [word for plan in plans for word in ("--plan", plan)]
        result = advise(*TUTORIAL, *words, "-o", str(table), "--png", str(drawn))
        assert result.exit_code == 0, result.stderr
        one, in_turn, pipelined = (float(row["predicted_s"]) for row in rows(table))
        assert [row["devices"] for row in rows(table)] == ["1", "2", "2"]
        # The tolerances of `test_documents`; the table at the top has two digits.
        assert in_turn / one - 1 == pytest.approx(IN_TURN_S / ONE_S - 1, abs=0.04)
        assert one / pipelined - 1 == pytest.approx(ONE_S / PIPELINED_S - 1, abs=0.12)
        said = (round(in_turn / one, 3), round(one / pipelined, 2), round(in_turn / pipelined, 2))
        assert said == (1.082, 1.43, 1.55)
        for row, published in zip(rows(table), (ONE_S, IN_TURN_S, PIPELINED_S), strict=True):
            # The tutorial's devices are slower: scale by the step of one device.
            here = published / ONE_S * one
            assert float(row["predicted_low_s"]) <= here <= float(row["predicted_high_s"])
        assert "2: pp=2 schedule=naive stages=layer3.0" in result.stdout
        assert "Fastest, as predicted: plan 3; 2 takes" in result.stdout
        assert drawn.read_bytes().startswith(PNG)
