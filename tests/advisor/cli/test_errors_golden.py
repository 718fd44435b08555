"""Error messages, word for word: tests/golden/error_*.txt.

Each file is the whole of stderr; stdout stays empty and there is no traceback.
"""

from __future__ import annotations

import errno
import json
import os
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from advisor.cli.main import cli
from profiles.machine.catalogue import accelerators, systems
from tests import golden
from tests.factories import chain, transformer

EIGHT = ("--cluster", "8xH100-SXM-80GB")
BATCH = ("--global-batch", "64")
FOUR = ("--cluster", "4xH100-SXM-80GB")

TRAIN = """
from urllib.error import URLError

import torch
from torch import nn
from torch.nn.functional import cross_entropy


def build_model():
    return nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 4)), batch(16), cross_entropy


def wrong_sample():
    return nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 4)), batch(17), cross_entropy


def batch(width):
    return torch.zeros(8, width), torch.zeros(8, dtype=torch.long)


def load_weights():
    return torch.load("weights.pt")


def download_weights():
    raise URLError("no route to the host")


class Broken(nn.Linear):
    def forward(self, x):
        return {"logits": x}["output"]


def forward_raises():
    return Broken(16, 4), torch.zeros(8, 16)


def alone():
    return nn.Linear(16, 4)


def one_block():
    return nn.Linear(16, 4), batch(16), cross_entropy


def no_loss():
    return nn.Linear(16, 4), batch(16)


def settings():
    return {"width": 16}
"""

CLUSTER = """
nodes = 2
devices_per_node = 8
accelerator = "H100-SXM-80GB"

[inter]
bandwidth = "400 Gbit/s"
"""


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A current folder with a model in train.py; what is imported from it is forgotten after."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    (tmp_path / "train.py").write_text(TRAIN)
    (tmp_path / "config.json").write_text('{"model_type": "llama", "hidden_size": 4096}')
    chain().save(tmp_path / "model.json")
    yield tmp_path
    sys.modules.pop("train", None)


def advise(*args: str) -> Result:
    return CliRunner().invoke(cli, list(args))


def refused(name: str, *args: str, exit_code: int = 2) -> None:
    """Assert that the command fails with the golden text on stderr and nothing on stdout."""
    result = advise(*args)
    assert (result.exit_code, result.stdout) == (exit_code, "")
    golden.check(f"error_{name}.txt", result.stderr)


class TestModel:
    def test_does_not_import(self) -> None:
        refused("model_does_not_import", "trian:build_model", *EIGHT)

    def test_imports_something_that_is_missing(self, folder: Path) -> None:
        (folder / "train.py").write_text("import torch\nimport flash_attn_of_mars\n")
        refused("model_needs_a_package", "train:build_model", *EIGHT)

    def test_does_not_exist(self) -> None:
        refused("model_does_not_exist", "train:buildmodel", *EIGHT)

    def test_bundled_name_does_not_exist(self) -> None:
        refused("model_unknown_name", "gpt-7", *EIGHT)

    @pytest.mark.parametrize("name", ["train.py", "train"])
    def test_is_a_file_of_which_no_function_is_named(self, name: str) -> None:
        result = advise(name, *EIGHT)
        assert (result.exit_code, result.stdout) == (2, "")
        assert "hint: name its function, as in `train.py:build_model`" in result.stderr

    def test_is_not_a_module(self) -> None:
        refused("model_is_not_a_module", "train:settings", *EIGHT)

    def test_is_in_a_file_that_is_not_there(self) -> None:
        refused("model_is_in_no_file", "trian.py:build_model", *EIGHT)

    def test_raises_in_its_forward(self) -> None:
        refused("model_forward_raises", "train:forward_raises", *EIGHT)

    def test_takes_the_target_for_an_input(self) -> None:
        refused("model_without_loss", "train:no_loss", *EIGHT)

    def test_raises(self) -> None:
        refused("model_raises", "train:load_weights", *EIGHT)

    def test_wants_the_network(self) -> None:
        refused("model_wants_the_network", "train:download_weights", *EIGHT)

    def test_does_not_fit_its_sample(self) -> None:
        refused("sample_does_not_fit", "train:wrong_sample", *EIGHT)


class TestCluster:
    def test_unknown_accelerator(self) -> None:
        refused("unknown_accelerator", "train:build_model", "--cluster", "4x8xH100-SMX-80GB")

    def test_an_accelerator_like_none_is_shown_all_of_them_in_lines_of_80(self) -> None:
        result = advise("train:build_model", "--cluster", "8xTPUv5")
        listed = result.stderr.partition("known: ")[2].partition("\nhint: ")[0]
        assert [*accelerators(), *systems()] == [name.strip() for name in listed.split(",")]
        assert max(map(len, result.stderr.splitlines()[:-1])) <= 80

    def test_number_without_unit(self, folder: Path) -> None:
        (folder / "cluster.toml").write_text(CLUSTER.replace("400 Gbit/s", "400"))
        refused("unit_missing", "train:build_model", "--cluster", "cluster.toml")

    def test_bits_written_as_bytes(self, folder: Path) -> None:
        card = CLUSTER.replace("[inter]", '[inter]\nlink = "ib-ndr-1x400"')
        (folder / "cluster.toml").write_text(card.replace("Gbit/s", "GB/s"))
        refused("bits_for_bytes", "train:build_model", "--cluster", "cluster.toml")

    def test_both_directions_added_up(self, folder: Path) -> None:
        (folder / "cluster.toml").write_text(CLUSTER + '[intra]\nbandwidth = "900 GB/s"\n')
        refused("both_directions", "train:build_model", "--cluster", "cluster.toml")

    def test_memory_in_bits(self, folder: Path) -> None:
        (folder / "cluster.toml").write_text(CLUSTER + '[device]\nmemory = "80 Gb"\n')
        refused("memory_in_bits", "train:build_model", "--cluster", "cluster.toml")

    def test_nodes_of_unequal_counts(self) -> None:
        nodes = "8xH100-SXM-80GB+4xA100-SXM-80GB"
        refused("unequal_nodes", "train:build_model", "--cluster", nodes)

    def test_unknown_key(self, folder: Path) -> None:
        (folder / "cluster.toml").write_text(CLUSTER.replace("devices_per", "device_per"))
        refused("unknown_key", "train:build_model", "--cluster", "cluster.toml")

    def test_missing_file(self) -> None:
        refused("cluster_file_missing", "train:build_model", "--cluster", "nodes.toml")


class TestPlan:
    def test_for_another_world_size(self) -> None:
        refused("plan_world_size", "model.json", *EIGHT, *BATCH, "--plan", "dp_replicate=16")

    def test_batch_that_does_not_divide(self) -> None:
        ten = ("--global-batch", "10")
        refused("batch_does_not_divide", "model.json", *FOUR, *ten, "--plan", "dp_replicate=4")

    def test_unknown_setting(self) -> None:
        refused("unknown_setting", "model.json", *EIGHT, "--plan", "dp_shrad=8")

    def test_unknown_optimizer(self) -> None:
        refused("unknown_optimizer", "model.json", *EIGHT, "--optimizer", "adamv")


class TestSizes:
    """Sizes of zero and below."""

    @pytest.mark.parametrize(
        ("name", "written", "instead"),
        [
            ("nodes_zero", "nodes = 2", "nodes = 0"),
            ("devices_negative", "devices_per_node = 8", "devices_per_node = -8"),
            ("bandwidth_zero", '"400 Gbit/s"', '"0 GB/s"'),
            ("bandwidth_negative", '"400 Gbit/s"', '"-50 GB/s"'),
        ],
    )
    def test_in_a_cluster_file(self, folder: Path, name: str, written: str, instead: str) -> None:
        (folder / "cluster.toml").write_text(CLUSTER.replace(written, instead))
        refused(f"size_{name}", "model.json", "--cluster", "cluster.toml")

    def test_of_device_memory(self, folder: Path) -> None:
        (folder / "cluster.toml").write_text(CLUSTER + '[device]\nmemory = "0 GiB"\n')
        refused("size_memory_zero", "model.json", "--cluster", "cluster.toml")

    def test_of_a_cluster_in_a_name(self) -> None:
        refused("size_cluster_name_zero", "model.json", "--cluster", "0x8xH100-SXM-80GB")

    @pytest.mark.parametrize("count", ["-2x8", "2x-8", "-8", "2x000"])
    def test_of_a_cluster_in_a_name_below_zero(self, count: str) -> None:
        result = advise("model.json", f"--cluster={count}xH100-SXM-80GB")
        assert result.exit_code == 2
        assert f"error: cluster `{count}xH100-SXM-80GB` has no devices" in result.stderr

    @pytest.mark.parametrize(("name", "value"), [("zero", "0"), ("negative", "-4")])
    def test_of_the_batch(self, name: str, value: str) -> None:
        refused(f"size_batch_{name}", "model.json", *EIGHT, "--global-batch", value)

    @pytest.mark.parametrize(("name", "value"), [("zero", "tp=0"), ("negative", "pp=-1")])
    def test_of_a_degree(self, name: str, value: str) -> None:
        refused(f"size_degree_{name}", "model.json", *EIGHT, "--plan", value)


class TestProfile:
    """Saved profiles with missing parts."""

    def saved(self, folder: Path, **changes: object) -> str:
        data = json.loads((folder / "model.json").read_text()) | changes
        remaining = {name: value for name, value in data.items() if value is not ...}
        (folder / "model.json").write_text(json.dumps(remaining))
        return "model.json"

    def test_without_a_sample(self, folder: Path) -> None:
        refused("profile_without_sample", self.saved(folder, samples=...), *EIGHT, *BATCH)

    def test_of_an_empty_sample(self, folder: Path) -> None:
        refused("profile_of_empty_sample", self.saved(folder, samples=0), *EIGHT, *BATCH)

    def test_without_units(self, folder: Path) -> None:
        refused("profile_without_units", self.saved(folder, units=[]), *EIGHT, *BATCH)

    def test_a_factory_of_a_module_alone_has_no_sample(self) -> None:
        refused("model_without_sample", "train:alone", *EIGHT, *BATCH)


class TestNothingFits:
    """The question was valid: exit code 1, the plans tried, the nearest miss, three remedies."""

    def test_a_cluster_smaller_than_the_model_needs(self, folder: Path) -> None:
        """70 B parameters: 1,052 GiB of states, eight devices and 512 GiB of main memory."""
        seventy = transformer(name="70b", layers=80, hidden=8192, ffn=28672, vocab=128256)
        seventy.save(folder / "large.json")
        (folder / "cluster.toml").write_text(
            CLUSTER.replace("devices_per_node = 8", 'devices_per_node = 4\nhost_memory = "512 GiB"')
        )
        asked = ("large.json", "--cluster", "cluster.toml", "--global-batch", "8")
        refused("nothing_fits", *asked, "--precision", "bf16", exit_code=1)

    def test_settings_that_leave_nothing_that_fits(self, folder: Path) -> None:
        transformer().save(folder / "large.json")
        asked = ("large.json", *EIGHT, *BATCH, "--precision", "bf16", "--plan", "zero=0 tp=1 pp=1")
        refused("settings_leave_nothing", *asked, exit_code=1)


class TestContradictions:
    def test_a_pipeline_of_two_stages_of_a_model_of_one_block(self) -> None:
        refused("pipeline_of_one_block", "train:one_block", *EIGHT, *BATCH, "--plan", "pp=2")

    def test_microbatches_that_do_not_multiply_to_the_batch(self) -> None:
        plan = "microbatch_size=3 accumulation=5"
        refused("cuts_do_not_multiply", "model.json", *EIGHT, *BATCH, "--plan", plan)

    def test_degrees_that_contradict_each_other(self) -> None:
        refused("degrees_contradict", "model.json", *EIGHT, *BATCH, "--plan", "dp_shard=8 zero=1")


class TestUsage:
    def test_unknown_option(self) -> None:
        refused("unknown_option", "train:build_model", "--cluser", "8xH100-SXM-80GB")

    def test_unknown_command(self) -> None:
        refused("unknown_command", "expalin", "plan.json")

    def test_missing_argument(self) -> None:
        refused("missing_argument", "plan", *EIGHT)

    def test_unknown_choice(self) -> None:
        refused("unknown_choice", "train:build_model", *EIGHT, "--objective", "fast")

    def test_not_a_count(self) -> None:
        refused("not_a_count", "train:build_model", *EIGHT, "--global-batch", "1e3")

    def test_not_a_decision(self, folder: Path) -> None:
        (folder / "plan.json").write_text("{")
        refused("not_json", "show", "plan.json")

    @pytest.mark.parametrize("command", ["show", "explain"])
    def test_a_config_for_a_decision(self, command: str) -> None:
        refused("not_a_decision", command, "config.json")


class TestRun:
    """Errors that torchrun would report after seconds, or in an `argparse` of its own."""

    def test_without_a_script(self) -> None:
        refused("script_missing", "run", "--nproc-per-node", "4")

    def test_with_a_script_that_does_not_exist(
        self, folder: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(os, "getcwd", lambda: "/home/you")
        refused("script_does_not_exist", "run", "--nproc-per-node", "4", "trian.py", "--lr", "1")


class TestOutput:
    """Unwritable outputs fail before the work; a report is shown even if it cannot be written."""

    def written(self, name: str, output: str) -> None:
        result = advise("model.json", *EIGHT, *BATCH, "-o", output)
        assert result.exit_code == 2
        assert result.stdout.startswith("advise: ")
        golden.check(f"error_{name}.txt", result.stderr)

    def test_is_a_folder(self, folder: Path) -> None:
        (folder / "out").mkdir()
        refused("output_is_a_folder", "model.json", *EIGHT, *BATCH, "-o", "out")

    def test_is_in_a_missing_folder(self) -> None:
        refused("output_in_no_folder", "model.json", *EIGHT, *BATCH, "-o", "runs/plan.json")

    @pytest.mark.parametrize(
        ("name", "number"), [("no_space", errno.ENOSPC), ("no_right", errno.EACCES)]
    )
    def test_cannot_be_written_and_the_old_file_stays(
        self, folder: Path, monkeypatch: pytest.MonkeyPatch, name: str, number: int
    ) -> None:
        def refuse(*paths: object) -> None:
            raise OSError(number, os.strerror(number))

        (folder / "plan.json").write_text("the old one")
        monkeypatch.setattr(os, "replace", refuse)
        self.written(f"output_{name}", "plan.json")
        assert (folder / "plan.json").read_text() == "the old one"
        assert sorted(path.name for path in folder.glob("*plan.json*")) == ["plan.json"]


class TestOurMistake:
    def boom(self, monkeypatch: pytest.MonkeyPatch) -> None:
        def wrong(*args: object, **settings: object) -> None:
            raise KeyError("axis")

        monkeypatch.setattr("advisor.inputs.models.profile_model", wrong)

    def test_is_reported_with_instructions(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.boom(monkeypatch)
        refused("our_mistake", "train:build_model", *EIGHT, exit_code=101)

    def test_shows_the_traceback_with_debug(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.boom(monkeypatch)
        result = advise("train:build_model", *EIGHT, "--debug")
        assert result.exit_code == 101
        assert "Traceback (most recent call last)" in result.stderr
        assert 'raise KeyError("axis")' in result.stderr

    def test_a_users_mistake_shows_the_cause_with_debug(self) -> None:
        result = advise("train:load_weights", *EIGHT, "--debug")
        assert result.exit_code == 2
        assert 'torch.load("weights.pt")' in result.stderr
        assert result.stderr.count("error: ") == 1
