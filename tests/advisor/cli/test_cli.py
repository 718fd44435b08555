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

from advisor.cli.command import report_error
from advisor.cli.main import cli
from profiles.errors import InputError
from tests.factories import transformer

# Every option there is. A new one has to earn its line here: about fifteen, all else is in files.
OPTIONS = {
    "--allow-lossy",
    "--allow-stale",
    "--anchor",
    "--bandwidth",
    "--batch",
    "--bench",
    "--cluster",
    "--critical-batch",
    "--debug",
    "--devices",
    "--disk",
    "--exit-code",
    "--format",
    "--global-batch",
    "--host-overhead",
    "--imbalance",
    "--json",
    "--measure",
    "--microbatches",
    "--nccl-tests",
    "--no-anchor",
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
    "--stack",
    "--steps",
    "--time",
    "--timeout",
    "--version",
    "--why-not",
}
EIGHT = ("--cluster", "8xH100-SXM-80GB")
COMMANDS = [
    "check",
    "demo",
    "explain",
    "plan",
    "probe",
    "profile",
    "run",
    "show",
    "sweep",
    "tree",
    "verify",
]

IMPORTED = """
import sys
import advisor.cli.main
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

    @pytest.mark.timed
    def test_help_answers_at_once(self) -> None:
        code = (
            "import time; start = time.process_time()\n"
            "from advisor.cli.main import cli\n"
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
        from advisor.inputs.bundled.gpt_shapes import SHAPES

        text = advise("plan", "--help").stdout
        assert [name for name in SHAPES if name not in text] == []

    @pytest.mark.parametrize("command", COMMANDS)
    def test_every_command_and_option_has_a_sentence(self, command: str) -> None:
        entry = cli.commands[command]
        assert entry.help
        assert [p.name for p in entry.params if isinstance(p, click.Option) and not p.help] == []

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
        """Stderr of a wrong call, to a terminal or a pipe."""
        reader, writer = os.openpty() if terminal else os.pipe()
        environment = {k: v for k, v in os.environ.items() if k != "NO_COLOR"}
        environment |= {"TERM": "xterm", **variables}
        code = "from advisor.cli.main import main; main()"
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

    def test_is_not_used_with_no_color(self) -> None:
        assert self.stderr("--no-color", terminal=True).startswith(b"error: unknown command")


@pytest.mark.parametrize(
    ("rank", "said"), [(None, "interrupted\n"), ("0", "interrupted\n"), ("1", "")]
)
def test_an_interruption_is_said_once_a_node(
    rank: str | None,
    said: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    def interrupt(*args: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(click.Group, "invoke", interrupt)
    if rank is not None:
        monkeypatch.setenv("LOCAL_RANK", rank)
    with pytest.raises(SystemExit) as exited:
        cli.main(["tree"])
    assert exited.value.code == 130
    assert capsys.readouterr().err.strip() == said.strip()


def test_errors_are_wrapped_on_a_terminal_and_whole_in_a_pipe(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    error = InputError("what " * 30 + "`/a/" + "long" * 30 + "`", hints=["do this " * 20])
    report_error(error, colour=False, is_said=True)
    assert capsys.readouterr().err == f"error: {error}\n"
    monkeypatch.setattr("sys.stderr.isatty", lambda: True)
    report_error(error, colour=False, is_said=True)
    lines = capsys.readouterr().err.splitlines()
    assert [len(line) > 80 for line in lines] == ["long" in line for line in lines]
    assert " ".join(" ".join(lines).split()) == " ".join(f"error: {error}".split())
    assert [line[:6] for line in lines[-3:]] == ["hint: ", *["      "] * 2]


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
            "import sys; from advisor.cli.main import cli\n"
            "try: cli(['model.json', '--cluster', '8xH100-SXM-80GB', '--global-batch', '64'])\n"
            "except SystemExit as end: print(end.code, 'torch' in sys.modules)"
        )
        words = [sys.executable, "-c", code]
        run = subprocess.run(words, capture_output=True, text=True, check=True)
        assert run.stdout.splitlines()[-1] == "0 False"

    def test_settings_that_were_not_typed_are_defaults(self) -> None:
        given = json.loads(self.plan("--json").stdout)["facts"]["workload"]["given"]
        assert given == ["global_batch_size"]
        typed = self.plan("--json", "--optimizer", "adamw", "--precision", "bf16").stdout
        named = json.loads(typed)["facts"]["workload"]["given"]
        assert named == ["global_batch_size", "optimizer", "precision"]

    def test_an_explanation_in_a_pipe_is_not_wrapped(self) -> None:
        plan = json.loads(self.plan("--json", "-o", "plan.json").stdout)
        shown = advise("explain", "plan.json").stdout.splitlines()
        for step in plan["trace"]["steps"]:
            assert f"  {step['because']}" in shown

    def test_pins_are_kept(self) -> None:
        plan = json.loads(self.plan("--json", "--plan", "dp_replicate=2 dp_shard=16").stdout)[
            "plan"
        ]
        assert (plan["dp_replicate"], plan["dp_shard"]) == (2, 16)

    def test_a_saved_plan_fixes_every_setting_as_its_words_do(self) -> None:
        words = "dp_replicate=4 dp_shard=8 microbatch_size=1"
        saved = json.loads(self.plan("--json", "--plan", words, "-o", "plan.json").stdout)
        again = json.loads(self.plan("--json", "--plan", "plan.json", "--allow-lossy").stdout)
        assert again["plan"] == saved["plan"]
        assert again["weighed"] == 1
        verdict = advise("explain", "plan.json", "--why-not", "plan.json").stdout
        assert "it is the chosen plan" in verdict

    def test_the_objective_is_followed(self) -> None:
        chosen = json.loads(self.plan("--json", "--objective", "memory").stdout)
        assert chosen["policy"]["objective"] == "memory"

    def test_the_optimizer_and_precision_reach_the_workload(self) -> None:
        given = ("--optimizer", "sgd", "--precision", "bf16")
        workload = json.loads(self.plan("--json", *given).stdout)["facts"]["workload"]
        assert (workload["optimizer"]["name"], workload["precision"]) == ("sgd", "bf16")

    def test_host_overhead_is_added_to_the_step_and_reported(self) -> None:
        without = json.loads(self.plan("--json").stdout)["estimate"]
        waiting = self.plan("--host-overhead", "0.25", "--json").stdout
        estimate = json.loads(waiting)["estimate"]
        added = estimate["step_s"] - without["step_s"]
        assert added == pytest.approx(0.25, rel=1e-3)
        report = self.plan("--host-overhead", "0.25").stdout
        assert re.search(r"250 ms a step for data and host +you", report)

    @pytest.mark.parametrize("wrong", ["-1", "soon", "nan", "inf"])
    def test_host_overhead_must_be_seconds(self, wrong: str) -> None:
        result = self.plan("--host-overhead", wrong, exit_code=2)
        assert "`--host-overhead` wants seconds, zero or more" in result.stderr

    def test_imbalance_adds_waiting_and_its_remedies_need_allow_stale(self) -> None:
        small = ("gpt-125m", *EIGHT, "--global-batch", "64", "--imbalance", "0.4")
        report = " ".join(advise(*small).stdout.split())
        assert "ranks' computing times scatter by 40% you" in report
        assert "waiting for the slowest rank" in report
        assert "only `--allow-stale`" in report
        taken = json.loads(advise(*small, "--allow-stale", "--json").stdout)
        assert taken["plan"]["updates"] == "diloco"
        result = self.plan("--imbalance", "-0.1", exit_code=2)
        assert "`--imbalance` wants a fraction, zero or more" in result.stderr

    def test_the_batch_defaults_to_one_sample_per_device_with_a_note(self) -> None:
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

    def test_explain_compares_another_plan(self) -> None:
        self.plan("-o", "plan.json")
        text = advise("explain", "plan.json", "--why-not", "dp_replicate=32").stdout
        assert text.startswith("dp_replicate=32: ")

    def test_explain_names_a_misspelt_setting(self) -> None:
        self.plan("-o", "plan.json")
        result = advise("explain", "plan.json", "--why-not", "dp_shrad=32")
        assert result.exit_code == 2
        assert "did you mean `dp_shard`" in result.stderr

    def test_an_option_that_a_longer_name_begins_with_is_suggested(self) -> None:
        """`--sequence-length` is that of many a training script."""
        result = CliRunner().invoke(cli, ["gpt-7b", "--sequence-length", "4096"])
        assert result.exit_code == 2
        assert "did you mean `--seq`?" in result.stderr


class TestTree:
    def test_ends_in_families(self) -> None:
        assert "[DDP, ZeRO (FSDP)]" in advise("tree").stdout

    def test_is_drawn_by_mermaid(self) -> None:
        assert advise("tree", "--format", "mermaid").stdout.startswith("flowchart TD\n")


class TestDemo:
    @pytest.fixture
    def calls(self, monkeypatch: pytest.MonkeyPatch) -> list[dict[str, object]]:
        seen: list[dict[str, object]] = []

        def run(**settings: object) -> int:
            seen.append(settings)
            return 3

        monkeypatch.setattr("advisor.tutorial.demo.launch.run", run)
        return seen

    def test_takes_the_usual_ranks_and_decides_itself(self, calls: list[dict[str, object]]) -> None:
        assert advise("demo").exit_code == 3  # what the job said
        assert calls == [{"ranks": None, "plan": "", "steps": None}]

    def test_forces_a_plan(self, calls: list[dict[str, object]]) -> None:
        advise("demo", "--ranks", "4", "--plan", "dp_shard=4", "--steps", "5")
        assert calls == [{"ranks": 4, "plan": "dp_shard=4", "steps": 5}]
