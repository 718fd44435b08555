"""The `advise` command: start-up, options, streams, exit codes."""

from __future__ import annotations

import html
import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import click
import pytest
from click.testing import CliRunner, Result

from advisor.cli import cli
from profiles.affine import Affine
from profiles.clusters import resolve_cluster
from profiles.flow import Call, Edge, Flow, Value
from profiles.model import ModelProfile
from profiles.provenance import Source
from tests.factories import chain, transformer
from tests.profiles.test_nccl_tests import log as nccl_log

# Every option there is. A new one has to earn its line here: about fifteen, all else is in files.
OPTIONS = {
    "--allow-lossy",
    "--allow-stale",
    "--bandwidth",
    "--batch",
    "--bench",
    "--cluster",
    "--critical-batch",
    "--debug",
    "--devices",
    "--disk",
    "--format",
    "--global-batch",
    "--host-overhead",
    "--imbalance",
    "--json",
    "--measure",
    "--microbatches",
    "--nccl-tests",
    "--no-bench",
    "--no-color",
    "--objective",
    "--optimizer",
    "--output",
    "--plan",
    "--png",
    "--precision",
    "--ranks",
    "--samples",
    "--seq",
    "--split-size",
    "--steps",
    "--time",
    "--timeout",
    "--version",
    "--why-not",
}
EIGHT = ("--cluster", "8xH100-SXM-80GB")
COMMANDS = ["demo", "explain", "plan", "probe", "profile", "show", "sweep", "tree"]

IMPORTED = """
import sys
import advisor.cli
print([name for name in ("torch", "networkx", "jinja2", "rich") if name in sys.modules])
"""


def advise(*args: str) -> Result:
    return CliRunner().invoke(cli, list(args))


def options() -> Iterator[str]:
    for command in (cli, *cli.commands.values()):
        for param in command.params:
            if isinstance(param, click.Option):
                yield from (name for name in param.opts if name.startswith("--"))


class TestStartUp:
    def test_importing_the_command_imports_nothing_heavy(self) -> None:
        run = subprocess.run(
            [sys.executable, "-c", IMPORTED], capture_output=True, text=True, check=True
        )
        assert run.stdout == "[]\n"

    def test_help_answers_at_once(self) -> None:
        code = (
            "import time; start = time.process_time()\n"
            "from advisor.cli import cli\n"
            "try: cli(['--help'])\n"
            "except SystemExit: pass\n"
            "import sys; sys.stderr.write(str(time.process_time() - start))"
        )
        run = subprocess.run(
            [sys.executable, "-c", code], capture_output=True, text=True, check=True
        )
        assert float(run.stderr) < 0.3  # 0.03 s on two shared cores


class TestHelp:
    def test_options_are_those_listed(self) -> None:
        assert set(options()) == OPTIONS

    def test_commands_are_those_listed(self) -> None:
        assert sorted(cli.commands) == COMMANDS

    def test_examples_come_before_the_options(self) -> None:
        text = advise("--help").stdout
        assert text.count("\n    advise ") == 2
        assert text.index("    advise ") < text.index("Options:")

    def test_no_arguments_is_the_help(self) -> None:
        assert (advise().exit_code, advise().stdout) == (0, advise("--help").stdout)

    def test_the_bundled_models_are_named(self) -> None:
        from advisor.demo.gpt import SHAPES

        text = advise("plan", "--help").stdout
        assert [name for name in SHAPES if name not in text] == []

    @pytest.mark.parametrize("command", COMMANDS)
    def test_every_command_and_option_has_a_sentence(self, command: str) -> None:
        found = cli.commands[command]
        assert found.help
        assert [p.name for p in found.params if isinstance(p, click.Option) and not p.help] == []

    def test_version(self) -> None:
        from importlib.metadata import version

        assert advise("--version").stdout == f"advise, version {version('parallel-advisor')}\n"


class TestDefaultCommand:
    def test_a_model_without_a_command_is_planned(self) -> None:
        short, long = advise("gtp-7b", *EIGHT), advise("plan", "gtp-7b", *EIGHT)
        assert (short.exit_code, short.stderr) == (long.exit_code, long.stderr)
        assert "did you mean `gpt-7b`" in short.stderr

    def test_options_may_come_before_the_model(self) -> None:
        assert advise(*EIGHT, "gtp-7b").stderr == advise("gtp-7b", *EIGHT).stderr

    def test_a_file_named_like_a_command_is_a_model(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.chdir(tmp_path)
        assert "unknown command" in advise("demo.json").stderr
        (tmp_path / "demo.json").write_text("{}")
        assert "neither a model profile" in advise("demo.json", *EIGHT).stderr


class TestColour:
    def stderr(self, *args: str, terminal: bool, **variables: str) -> bytes:
        """What a wrong call writes to stderr, which is a terminal or a pipe."""
        reader, writer = os.openpty() if terminal else os.pipe()
        environment = {k: v for k, v in os.environ.items() if k != "NO_COLOR"}
        environment |= {"TERM": "xterm", **variables}
        code = "from advisor.cli import main; main()"
        words = [sys.executable, "-c", code, "expalin", *args]
        subprocess.run(words, stderr=writer, env=environment, check=False)
        os.close(writer)
        written = os.read(reader, 4096)
        os.close(reader)
        return written

    def test_is_used_on_a_terminal(self) -> None:
        assert b"\x1b[" in self.stderr(terminal=True)

    def test_is_not_used_in_a_pipe(self) -> None:
        assert self.stderr(terminal=False).startswith(b"error: unknown command")

    @pytest.mark.parametrize("variables", [{"NO_COLOR": "1"}, {"TERM": "dumb"}])
    def test_is_not_used_where_the_environment_says_so(self, variables: dict[str, str]) -> None:
        assert self.stderr(terminal=True, **variables).startswith(b"error: unknown command")

    def test_is_not_used_when_told(self) -> None:
        assert self.stderr("--no-color", terminal=True).startswith(b"error: unknown command")


class TestProfile:
    """A saved profile is shown, so that nothing has to be looked at.

    Three linear units of 10^6 parameters, 512 tokens of width 1000: each 2 x 512 x 10^6 FLOP
    forward and twice that backward, 512 x 1000 x 4 bytes kept.
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

    def test_explains_what_is_no_module_of_the_model(self, saved: str, tmp_path: Path) -> None:
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
        calls = (Call(unit="wte", values=(value,)), Call(unit="head"))
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
        found = ModelProfile.load("model.json")
        assert [times.numerics for times in found.times] == list(found.numerics)
        blocks = {times.units["blocks.0"] for times in found.times}
        assert len(blocks) == len(found.times)
        assert f"measured on {found.times[0].device} (" in result.stdout
        rows = [line for line in result.stdout.splitlines() if " +-" in line]
        assert sum("blocks.0 ... blocks.5" in row for row in rows) == len(found.times)
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
        held = {}
        for name in ("adamw", "adafactor", "muon", "adamw-8bit"):
            found = json.loads(advise(*words, "--optimizer", name).stdout)["estimate"]["memory"]
            held[name] = found["optimizer"]
        # Rows and columns beside two moments; one moment in blocks; a byte for each, with scales.
        assert held["adafactor"] < 0.01 * held["adamw"]
        assert 0.5 * held["adamw"] < held["muon"] < held["adamw"]
        assert held["adamw-8bit"] == pytest.approx(held["adamw"] * (2 + 8 / 256) / 8, rel=0.01)

    def test_an_optimizer_of_shapes_asks_an_old_profile_for_them(self) -> None:
        chain().save("model.json")
        words = ("model.json", "--cluster", "H100-SXM-80GB", "--global-batch", "1")
        result = advise(*words, "--optimizer", "adafactor")
        assert result.exit_code == 2
        assert "follows the shapes of parameters" in result.stderr


class TestPlan:
    @pytest.fixture(autouse=True)
    def saved(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.chdir(tmp_path)
        transformer().save("model.json")

    def plan(self, *args: str, exit_code: int = 0) -> Result:
        batch = ("--global-batch", "256")
        result = advise("model.json", "--cluster", "4x8xH100-SXM-80GB", *batch, *args)
        assert result.exit_code == exit_code, result.stderr
        return result

    def test_prints_the_report_in_80_columns_without_escape_codes(self) -> None:
        text = self.plan().stdout
        assert text.startswith("advise: ")
        assert max(map(len, text.splitlines())) <= 80
        assert "\x1b" not in text

    def test_json_is_one_object_and_the_saved_file(self) -> None:
        result = self.plan("--json", "-o", "plan.json")
        assert json.loads(result.stdout)["plan"]
        assert result.stdout == Path("plan.json").read_text()
        assert result.stderr == "wrote plan.json\n"

    def test_does_not_import_torch_for_a_saved_profile(self) -> None:
        code = (
            "import sys; from advisor.cli import cli\n"
            "try: cli(['model.json', '--cluster', '8xH100-SXM-80GB', '--global-batch', '64'])\n"
            "except SystemExit as end: print(end.code, 'torch' in sys.modules)"
        )
        words = [sys.executable, "-c", code]
        run = subprocess.run(words, capture_output=True, text=True, check=True)
        assert run.stdout.splitlines()[-1] == "0 False"

    def test_what_was_not_typed_is_a_default(self) -> None:
        given = json.loads(self.plan("--json").stdout)["facts"]["workload"]["given"]
        assert given == ["global_batch_size"]
        typed = self.plan("--json", "--optimizer", "adamw", "--precision", "bf16").stdout
        found = json.loads(typed)["facts"]["workload"]["given"]
        assert found == ["global_batch_size", "optimizer", "precision"]

    def test_an_explanation_in_a_pipe_is_not_broken(self) -> None:
        plan = json.loads(self.plan("--json", "-o", "plan.json").stdout)
        shown = advise("explain", "plan.json").stdout.splitlines()
        for step in plan["trace"]["steps"]:
            assert f"  {step['because']}" in shown

    def test_pins_are_kept(self) -> None:
        plan = json.loads(self.plan("--json", "--plan", "dp_replicate=2 dp_shard=16").stdout)[
            "plan"
        ]
        assert (plan["dp_replicate"], plan["dp_shard"]) == (2, 16)

    def test_the_objective_is_followed(self) -> None:
        chosen = json.loads(self.plan("--json", "--objective", "memory").stdout)
        assert chosen["policy"]["objective"] == "memory"

    def test_the_optimizer_and_precision_reach_the_workload(self) -> None:
        given = ("--optimizer", "sgd", "--precision", "bf16")
        workload = json.loads(self.plan("--json", *given).stdout)["facts"]["workload"]
        assert (workload["optimizer"]["name"], workload["precision"]) == ("sgd", "bf16")

    def test_time_that_devices_wait_for_data_is_added_to_the_step_and_named(self) -> None:
        without = json.loads(self.plan("--json").stdout)["estimate"]
        waiting = self.plan("--host-overhead", "0.25", "--json").stdout
        estimate = json.loads(waiting)["estimate"]
        added = estimate["step_s"] - without["step_s"]
        assert added == pytest.approx(0.25, rel=1e-3)
        report = self.plan("--host-overhead", "0.25").stdout
        assert re.search(r"250 ms a step for data and host +you", report)

    @pytest.mark.parametrize("wrong", ["-1", "soon", "nan", "inf"])
    def test_a_waiting_time_is_seconds(self, wrong: str) -> None:
        result = self.plan("--host-overhead", wrong, exit_code=2)
        assert "`--host-overhead` wants seconds, zero or more" in result.stderr

    def test_ranks_that_scatter_are_waited_for_and_what_helps_needs_a_word(self) -> None:
        small = ("gpt-125m", *EIGHT, "--global-batch", "64", "--imbalance", "0.4")
        report = " ".join(advise(*small).stdout.split())
        assert "ranks' computing times scatter by 40% you" in report
        assert "waiting for the slowest rank" in report
        assert "only `--allow-stale`" in report
        taken = json.loads(advise(*small, "--allow-stale", "--json").stdout)
        assert taken["plan"]["updates"] == "diloco"
        result = self.plan("--imbalance", "-0.1", exit_code=2)
        assert "`--imbalance` wants a fraction, zero or more" in result.stderr

    def test_the_batch_is_one_sample_per_device_unless_given_and_said(self) -> None:
        result = advise("model.json", "--cluster", "4x8xH100-SXM-80GB", "--json")
        assert json.loads(result.stdout)["facts"]["workload"]["global_batch_size"] == 32
        assert result.stderr == "note: no `--global-batch`: 1 per device, 32 in all\n"

    def test_nothing_fits_is_an_answer_with_exit_code_1(self) -> None:
        one = ("--cluster", "H100-SXM-80GB", "--global-batch", "1", "--plan", "offload=none")
        result = advise("model.json", *one)
        assert (result.exit_code, result.stdout) == (1, "")
        assert result.stderr.startswith("error: ")

    def test_show_prints_the_same_report_again(self) -> None:
        report = self.plan("-o", "plan.json").stdout
        assert advise("show", "plan.json").stdout == report

    def test_show_gives_the_same_json_again(self) -> None:
        report = self.plan("--json", "-o", "plan.json").stdout
        assert advise("show", "plan.json", "--format", "json").stdout == report

    def test_show_writes_a_page(self) -> None:
        verdict = self.plan("-o", "plan.json").stdout.removeprefix("advise: ").split("   ")[0]
        result = advise("show", "plan.json", "--format", "html", "-o", "report.html")
        page = Path("report.html").read_text()
        assert (result.stdout, result.stderr) == ("", "wrote report.html\n")
        assert page.lower().startswith("<!doctype html>")
        assert verdict in html.unescape(page)

    def test_explain_shows_each_question_and_the_leaf(self) -> None:
        trace = json.loads(self.plan("--json", "-o", "plan.json").stdout)["trace"]
        text = " ".join(advise("explain", "plan.json").stdout.split())
        for step in trace["steps"]:
            assert f"{step['question']} {step['answer']} {step['because']}" in text
        assert f"-> {trace['advice']}" in text

    def test_explain_weighs_another_plan(self) -> None:
        self.plan("-o", "plan.json")
        text = advise("explain", "plan.json", "--why-not", "dp_replicate=32").stdout
        assert text.startswith("dp_replicate=32: ")

    def test_explain_names_a_misspelt_setting(self) -> None:
        self.plan("-o", "plan.json")
        result = advise("explain", "plan.json", "--why-not", "dp_shrad=32")
        assert result.exit_code == 2
        assert "did you mean `dp_shard`" in result.stderr


class TestTree:
    def test_ends_in_families(self) -> None:
        assert "[DDP, ZeRO (FSDP)]" in advise("tree").stdout

    def test_is_drawn_by_mermaid(self) -> None:
        assert advise("tree", "--format", "mermaid").stdout.startswith("flowchart TD\n")


class TestProbe:
    def test_what_is_printed_is_read_back_as_a_cluster(self, tmp_path: Path) -> None:
        path = tmp_path / "cluster.toml"
        result = advise("probe", "-o", str(path))
        assert (result.exit_code, result.stdout) == (0, "")
        assert resolve_cluster(str(path)).world_size >= 1
        assert advise("probe").stdout.startswith("#")

    def test_logs_of_nccl_tests_make_a_cluster_file(self, tmp_path: Path) -> None:
        path = tmp_path / "all_reduce_perf.log"
        path.write_text(nccl_log("all_reduce_perf"))
        made = tmp_path / "cluster.toml"
        result = advise("probe", "--nccl-tests", str(path), "-o", str(made))
        assert (result.exit_code, result.stdout) == (0, "")
        cluster = resolve_cluster(str(made))
        assert (cluster.world_size, cluster.device.name) == (8, "H100-SXM-80GB")
        assert cluster.sources["links in the node"] is Source.MEASURED

    def test_a_log_cut_in_half_leaves_no_file(self, tmp_path: Path) -> None:
        path = tmp_path / "all_reduce_perf.log"
        whole = nccl_log("all_reduce_perf")
        path.write_text(whole[: len(whole) * 3 // 4])
        made = tmp_path / "cluster.toml"
        result = advise("probe", "--nccl-tests", str(path), "-o", str(made))
        assert result.exit_code == 2
        assert "the log is cut" in result.stderr
        assert not made.exists()

    def test_timing_and_reading_exclude_each_other(self) -> None:
        result = advise("probe", "--bench", "--nccl-tests", "all_reduce_perf.log")
        assert result.exit_code == 2
        assert "take one" in result.stderr


class TestDemo:
    @pytest.fixture
    def calls(self, monkeypatch: pytest.MonkeyPatch) -> list[dict[str, object]]:
        seen: list[dict[str, object]] = []

        def run(**settings: object) -> int:
            seen.append(settings)
            return 3

        monkeypatch.setattr("advisor.demo.launch.run", run)
        return seen

    def test_starts_two_ranks_and_decides_itself(self, calls: list[dict[str, object]]) -> None:
        assert advise("demo").exit_code == 3  # what the job said
        assert calls == [{"ranks": 2, "plan": "", "steps": None}]

    def test_forces_a_plan(self, calls: list[dict[str, object]]) -> None:
        advise("demo", "--ranks", "4", "--plan", "dp_shard=4", "--steps", "5")
        assert calls == [{"ranks": 4, "plan": "dp_shard=4", "steps": 5}]
