"""`advise profile`: a model unit by unit, saved or captured, and the times of its blocks."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from advisor.cli.main import cli
from profiles.model.affine import Affine
from profiles.model.flow import Edge, Flow, UnitCall, Value
from profiles.model.profile import ModelProfile
from profiles.model.times import BlockTimes, UnitTiming
from profiles.provenance import Timing
from tests.factories import chain


def advise(*args: str) -> Result:
    return CliRunner().invoke(cli, list(args))


class TestProfile:
    """`advise profile` shows a saved profile without a capture.

    Three linear units of 10^6 parameters, 512 tokens of width 1000: each 2 x 512 x 10^6 FLOP
    forward and twice that backward, 512 x 1000 x 4 bytes saved.
    """

    PROFILE = chain(units=3, parameters=1_000_000, tokens=512, width=1000)

    @pytest.fixture
    def saved(self, tmp_path: Path) -> str:
        self.PROFILE.save(tmp_path / "model.json")
        return str(tmp_path / "model.json")

    def test_shows_equal_units_on_one_line_and_the_totals(self, saved: str) -> None:
        lines = advise("profile", saved).stdout.splitlines()
        assert lines[0] == "chain: 3.00 M parameters in float32 (11.4 MiB)"
        numbers = ["3.00", "M", "9.22", "B", "5.86", "MiB"]
        assert lines[-4].split() == ["layers.0", "...", "layers.2", "3", "x", "Linear", *numbers]
        assert lines[-3].split() == ["all", *numbers]

    def test_of_a_thousand_different_units_the_rest_is_counted(self, tmp_path: Path) -> None:
        unit = self.PROFILE.units[0]
        units = [unit.model_copy(update={"parameters": n}) for n in range(1, 1001)]
        path = tmp_path / "model.json"
        self.PROFILE.model_copy(update={"units": tuple(units)}).save(path)
        lines = advise("profile", str(path)).stdout.splitlines()
        assert sum("layers.0" in line for line in lines) == 500
        assert "500 more lines: `--json` has all of them" in lines
        total = next(line for line in lines if line.startswith("all"))
        assert total.split()[1:3] == ["500", "k"]  # 1 + 2 + ... + 1000

    def test_several_tables_of_times_share_the_lines(self, tmp_path: Path) -> None:
        names = [f"layers.{n}" for n in range(1000)]
        units = [self.PROFILE.units[0].model_copy(update={"name": name}) for name in names]
        times = [
            BlockTimes(
                device="cpu",
                processor="one",
                threads=1,
                numerics=numerics,
                samples=1,
                torch="2.13.0",
                units={
                    name: UnitTiming(
                        forward=Timing.of([n + 1]),
                        backward=Timing.of([1]),
                    )
                    for n, name in enumerate(names)
                },
            )
            for numerics in ("float32", "bfloat16")
        ]
        path = tmp_path / "model.json"
        known = {"units": tuple(units), "times": tuple(times)}
        self.PROFILE.model_copy(update=known).save(path)
        lines = advise("profile", str(path)).stdout.splitlines()
        assert lines.count("750 more lines: `--json` has all of them") == 2
        assert sum(" +-" in line for line in lines) == 500

    def test_explains_units_that_are_no_modules(self, saved: str, tmp_path: Path) -> None:
        assert "(glue)" not in advise("profile", saved).stdout
        first, *rest = self.PROFILE.units
        glue = first.model_copy(update={"name": "(glue)", "is_block": False})
        self.PROFILE.model_copy(update={"units": (glue, *rest)}).save(tmp_path / "glue.json")
        shown = advise("profile", str(tmp_path / "glue.json")).stdout
        assert "(glue): operations of the model outside all units" in shown

    def test_names_are_not_markup(self, tmp_path: Path) -> None:
        units = [unit.model_copy(update={"name": "[bold]wte"}) for unit in self.PROFILE.units]
        path = tmp_path / "model.json"
        self.PROFILE.model_copy(update={"units": tuple(units)}).save(path)
        assert "[bold]wte" in advise("profile", str(path)).stdout

    def test_json_is_the_profile_and_nothing_else(self, saved: str) -> None:
        assert ModelProfile.from_json(advise("profile", saved, "--json").stdout) == self.PROFILE

    def test_mermaid_draws_which_unit_feeds_which(self, tmp_path: Path) -> None:
        value = Value(shape=(1, 8), dtype="float32", bytes=Affine(per_sample=32))
        calls = (UnitCall(unit="wte", values=(value,)), UnitCall(unit="head"))
        flow = Flow(calls=calls, edges=(Edge(source=0, value=0, target=1),))
        self.PROFILE.model_copy(update={"flow": flow}).save(tmp_path / "wired.json")
        shown = advise("profile", str(tmp_path / "wired.json"), "--format", "mermaid").stdout
        assert shown.splitlines()[1:] == [
            '    u0["wte"]',
            '    u1["head"]',
            '    u0 -->|"32 B"| u1',
        ]

    def test_two_forms_at_once_are_refused(self, saved: str) -> None:
        result = advise("profile", saved, "--json", "--format", "mermaid")
        assert (result.exit_code, result.stdout) == (2, "")
        assert "both want stdout" in result.stderr

    def test_is_written_where_asked_and_said_on_stderr(self, saved: str, tmp_path: Path) -> None:
        result = advise("profile", saved, "--json", "-o", str(tmp_path / "copy.json"))
        assert ModelProfile.load(tmp_path / "copy.json") == self.PROFILE
        assert result.stderr == f"wrote {tmp_path / 'copy.json'}\n"


class TestTimedProfile:
    @pytest.fixture(autouse=True)
    def place(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.chdir(tmp_path)
        monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))

    def test_blocks_are_timed_shown_and_saved_with_the_profile(self) -> None:
        result = advise("profile", "gpt-10m", "--seq", "16", "--time", "-o", "model.json")
        assert result.exit_code == 0, result.stderr
        assert "timing the blocks of gpt-10m on" in result.stderr
        profile = ModelProfile.load("model.json")
        assert [times.numerics for times in profile.times] == list(profile.numerics)
        blocks = {times.units["blocks.0"] for times in profile.times}
        assert len(blocks) == len(profile.times)
        assert f"measured on {profile.times[0].device} (" in result.stdout
        rows = [line for line in result.stdout.splitlines() if " +-" in line]
        assert sum("blocks.0 ... blocks.5" in row for row in rows) == len(profile.times)
        assert max(map(len, result.stdout.splitlines())) <= 80
        (times, *_) = (Path("cache") / "parallel-advisor").iterdir()
        assert times.name.startswith("times-")

    def test_a_saved_profile_cannot_be_timed(self) -> None:
        chain().save("model.json")
        result = advise("profile", "model.json", "--time")
        assert result.exit_code == 2
        assert "a saved profile has no code to run" in result.stderr
        assert "advise profile MODEL --time -o model.json" in result.stderr

    def test_an_optimizer_of_shapes_works_on_a_saved_profile(self) -> None:
        advise("profile", "gpt-125m", "--seq", "64", "-o", "model.json")
        words = ("model.json", "--cluster", "H100-SXM-80GB", "--global-batch", "1", "--json")
        nbytes = {}
        for name in ("adamw", "adafactor", "muon", "adamw-8bit"):
            memory = json.loads(advise(*words, "--optimizer", name).stdout)["estimate"]["memory"]
            nbytes[name] = memory["optimizer"]
        # Rows and columns for two moments; one moment in blocks; a byte for each, with scales.
        assert nbytes["adafactor"] < 0.01 * nbytes["adamw"]
        assert 0.5 * nbytes["adamw"] < nbytes["muon"] < nbytes["adamw"]
        assert nbytes["adamw-8bit"] == pytest.approx(nbytes["adamw"] * (2 + 8 / 256) / 8, rel=0.01)

    def test_an_optimizer_of_shapes_asks_an_old_profile_for_them(self) -> None:
        chain().save("model.json")
        words = ("model.json", "--cluster", "H100-SXM-80GB", "--global-batch", "1")
        result = advise(*words, "--optimizer", "adafactor")
        assert result.exit_code == 2
        assert "follows the shapes of parameters" in result.stderr


@pytest.mark.parametrize(
    ("on_processor", "cluster", "words"),
    [
        (False, "1xcpu", "counts operators as accelerators run them; on processors memory differs"),
        (True, "1xH100-SXM-80GB", "as processors run them; on accelerators memory differs"),
        (False, "1xH100-SXM-80GB", ""),
        (True, "1xcpu", ""),
        (None, "1xcpu", ""),
    ],
)
def test_a_profile_saved_for_other_devices_says_so_where_it_is_used(
    on_processor: bool | None, cluster: str, words: str, tmp_path: Path
) -> None:
    profile = chain(units=3, parameters=1_000_000, tokens=512, width=1000)
    path = tmp_path / "model.json"
    profile.model_copy(update={"on_processor": on_processor}).save(path)
    result = advise("plan", str(path), "--cluster", cluster)
    assert result.exit_code == 0, result.stderr
    noted = [line for line in result.stderr.splitlines() if "saved profile counts" in line]
    assert len(noted) == bool(words)
    assert not words or words in noted[0]
