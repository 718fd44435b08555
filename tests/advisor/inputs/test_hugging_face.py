"""A config.json with and without transformers: equal profiles, and a note on their source."""

from __future__ import annotations

import json
import math
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from advisor.inputs.models import load_model, profile_model
from profiles.capture.capture import capture
from profiles.errors import FileError, InputError, ModelError, UnknownNameError
from profiles.model.profile import ModelProfile, Numerics
from tests.profiles.capture.equal_profiles import assert_equal
from tests.profiles.closed_forms.family_configs import LLAMA_3_8B, VIT

ROOT = Path(__file__).resolve().parents[3]
LLAMA = {**LLAMA_3_8B, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 3} | {
    "vocab_size": 64,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
}


@pytest.fixture
def config(tmp_path: Path) -> Path:
    path = tmp_path / "tiny" / "config.json"
    path.parent.mkdir()
    path.write_text(json.dumps(LLAMA))
    return path


def captured(path: Path, tokens: int | None = 16) -> ModelProfile:
    """Capture the model that transformers builds."""
    loaded = load_model(str(path), samples=1, sequence_length=tokens)
    kinds = (Numerics.AS_BUILT, Numerics.BF16)
    return capture(
        loaded.module, loaded.sample, numerics=kinds, name=loaded.name, on_processor=False
    )


def profiled(path: Path, tokens: int | None = 16) -> ModelProfile:
    return profile_model(
        str(path), samples=1, sequence_length=tokens, numerics=(Numerics.BF16, Numerics.BF16)
    )


@pytest.mark.parametrize("missing", ["torch", "transformers"])
def test_the_closed_form_equals_the_capture_and_prints_a_note(
    config: Path,
    missing: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    pytest.importorskip("transformers")
    expected = captured(config)
    capsys.readouterr()
    with_both = profiled(config)
    assert "closed form" not in capsys.readouterr().err
    monkeypatch.setitem(sys.modules, missing, None)
    closed_form = profiled(config)
    said = capsys.readouterr().err
    assert closed_form == with_both
    assert f"note: without {missing}, LlamaForCausalLM is profiled in closed form" in said
    assert "names bfloat16; parameters are taken as fp32" in said
    assert closed_form.name == "tiny"
    assert closed_form.numerics == (Numerics.AS_BUILT, Numerics.BF16)
    assert_equal(closed_form, expected)


def test_an_image_classifier_is_profiled_with_and_without_transformers(
    config: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("transformers")
    config.write_text(json.dumps(VIT))
    expected = captured(config, None)
    assert expected.tokens_per_sample is None
    assert_equal(profiled(config, None), expected)
    monkeypatch.setitem(sys.modules, "transformers", None)
    assert_equal(profiled(config, None), expected)
    with pytest.raises(InputError, match="`--seq 16`, but this model takes images"):
        profiled(config, 16)


def test_a_network_without_an_image_size_is_profiled_at_224_pixels(
    config: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """torchvision's and He et al.'s ResNet-50 at 224 pixels: 25.6 M parameters, 4.09 G
    multiplications in the forward; transformers' ResNetConfig has no image size."""
    transformers = pytest.importorskip("transformers")
    made = transformers.ResNetConfig(architectures=["ResNetForImageClassification"])
    config.write_text(json.dumps({**made.to_dict(), "num_labels": 1000}))
    loaded = load_model(str(config), samples=2, sequence_length=None)
    assert "has no `image_size`: 224 x 224 pixels" in capsys.readouterr().err
    assert loaded.sample["pixel_values"].shape == (2, 3, 224, 224)  # type: ignore[call-overload]
    profile = profile_model(
        str(config), samples=2, sequence_length=None, numerics=(Numerics.AS_BUILT,)
    )
    forward = sum(u.cost(Numerics.AS_BUILT).forward_flop.at(1) for u in profile.units)
    assert forward == pytest.approx(2 * 4.09e9, rel=0.01)


def test_an_image_classifier_refuses_a_length_with_transformers_too(config: Path) -> None:
    pytest.importorskip("transformers")
    config.write_text(json.dumps(VIT))
    with pytest.raises(InputError, match="leave `--seq` out"):
        load_model(str(config), samples=1, sequence_length=16)


def test_configs_without_a_closed_form_are_captured_with_transformers(config: Path) -> None:
    """Eager attention writes its scores; the closed form is of `sdpa` alone."""
    pytest.importorskip("transformers")
    config.write_text(json.dumps({**LLAMA, "attn_implementation": "eager"}))
    assert_equal(profiled(config), captured(config))


@pytest.mark.parametrize("field", ["hidden_size", "num_hidden_layers", "vocab_size"])
def test_a_missing_size_and_a_misspelt_field_are_reported_alike_without_transformers(
    config: Path, field: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("transformers")
    missing = {f"{key}s" if key == field else key: value for key, value in LLAMA.items()}
    misspelt = {
        "num_key_value_head" if key == "num_key_value_heads" else key: value
        for key, value in LLAMA.items()
    }
    said = []
    for is_there in (True, False):
        if not is_there:
            monkeypatch.setitem(sys.modules, "transformers", None)
        config.write_text(json.dumps(missing))
        with pytest.raises(FileError) as caught:
            profiled(config)
        capsys.readouterr()
        config.write_text(json.dumps(misspelt))
        profiled(config)
        notes = [line for line in capsys.readouterr().err.splitlines() if "is not a field" in line]
        said.append((str(caught.value), notes))
    assert said[0] == said[1]
    assert f"`{field}s` is not a field: `{field}` is" in said[0][0]
    assert "`num_key_value_heads` is one" in said[0][1][0]


@pytest.mark.usefixtures("no_transformers")
class TestWithoutTransformers:
    @pytest.fixture
    def no_transformers(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setitem(sys.modules, "transformers", None)

    def test_the_sequence_length_is_asked_for(self, config: Path) -> None:
        with pytest.raises(InputError, match=r"add `--seq 2048` \(positions go to 8192\)"):
            profiled(config, None)

    def test_a_sequence_beyond_the_positions_is_refused(self, config: Path) -> None:
        with pytest.raises(InputError, match="`--seq 8193`, but the positions of this model"):
            profiled(config, 8193)

    def test_a_family_without_a_closed_form_names_the_package_to_install(
        self, config: Path
    ) -> None:
        config.write_text(json.dumps({**LLAMA, "model_type": "mixtrall"}))
        with pytest.raises(UnknownNameError, match="did you mean `mixtral`") as caught:
            profiled(config)
        assert caught.value.where == str(config)
        assert "pip install 'parallel-advisor[hf]'" in str(caught.value)


def test_a_known_kind_is_planned_without_an_import_of_torch(config: Path) -> None:
    """Importing torch would take longer than all else."""
    pytest.importorskip("transformers")
    code = """
import sys
from advisor.cli.main import main
try:
    main()
finally:
    print("imported:", sorted({"torch", "transformers"} & set(sys.modules)), file=sys.stderr)
"""
    command = [sys.executable, "-c", code, str(config), "--cluster", "2xH100-SXM-80GB"]
    run = subprocess.run(
        [*command, "--global-batch", "4", "--seq", "16", "--precision", "bf16"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=180,
    )
    assert run.returncode == 0, run.stderr
    assert "imported: []" in run.stderr


BLOCKED = """
import sys, time
class Blocked:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in ("torch", "transformers"):
            raise ImportError(f"{name} is blocked")
sys.meta_path.insert(0, Blocked())
from advisor.cli.main import main
try:
    main()
finally:
    print("cpu seconds:", time.process_time(), file=sys.stderr)
"""


def without_torch(config: Path, precision: str | None) -> tuple[dict[str, Any], float]:
    """Output of `advise` where torch cannot be imported, and CPU seconds of the process."""
    config.write_text(json.dumps(LLAMA_3_8B))
    command = [sys.executable, "-c", BLOCKED, str(config), "--cluster", "8xH100-SXM-80GB"]
    command += ["--global-batch", "64", "--seq", "2048", "--json"]
    command += ["--precision", precision] if precision else []
    run = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=180)
    assert run.returncode == 0, run.stderr
    decision = json.loads(run.stdout)
    assert "without torch, LlamaForCausalLM is profiled in closed form" in run.stderr
    return decision, float(run.stderr.rpartition("cpu seconds:")[2])


@pytest.mark.parametrize("precision", [None, "bf16"])
def test_advise_answers_where_torch_cannot_be_imported(config: Path, precision: str | None) -> None:
    decision, _ = without_torch(config, precision)
    assert decision["plan"]["precision"] == "bf16"  # what an H100 is planned in by default


@pytest.mark.timed
@pytest.mark.parametrize("precision", [None, "bf16"])
def test_advise_answers_at_once(config: Path, precision: str | None) -> None:
    assert without_torch(config, precision)[1] < 1


def test_a_size_that_transformers_would_default_is_required(config: Path) -> None:
    """`LlamaConfig` takes 4096 where `hidden_size` is missing, as of Llama 7B."""
    pytest.importorskip("transformers")
    renamed = {"hiden_size" if key == "hidden_size" else key: LLAMA[key] for key in LLAMA}
    config.write_text(json.dumps(renamed))
    with pytest.raises(FileError) as caught:
        load_model(str(config), samples=1, sequence_length=16)
    assert str(caught.value) == (
        "`hidden_size` is missing, without which a `llama` model has no shape\n"
        f"  {config}\n\nhint: `hiden_size` is not a field: `hidden_size` is"
    )


def test_own_names_of_sizes_of_a_model_type_are_accepted(config: Path) -> None:
    pytest.importorskip("transformers")
    sizes = {"vocab_size": 64, "n_embd": 32, "n_head": 4, "n_layer": 2, "n_positions": 32}
    config.write_text(json.dumps({"model_type": "gpt2", "n_inner": 48} | sizes))
    module = load_model(str(config), samples=1, sequence_length=16).module
    assert sum(1 for name, _ in module.named_modules() if name.endswith(".attn")) == 2


def test_a_misspelt_field_is_reported(config: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("transformers")
    config.write_text(
        json.dumps(
            {key: LLAMA[key] for key in LLAMA if key != "num_key_value_heads"}
            | {"num_key_value_head": 2}
        )
    )
    load_model(str(config), samples=1, sequence_length=16)
    said = capsys.readouterr().err
    assert f"note: `num_key_value_head` in {config} is not a field" in said
    assert "`num_key_value_heads` is one" in said


def test_a_misspelt_family_names_the_near_one(config: Path) -> None:
    pytest.importorskip("transformers")
    config.write_text(json.dumps(LLAMA | {"model_type": "lama"}))
    with pytest.raises(UnknownNameError, match=r"did you mean `llama`"):
        load_model(str(config), samples=1, sequence_length=16)


def test_errors_of_transformers_are_reported_with_their_reason(config: Path) -> None:
    pytest.importorskip("transformers")
    config.write_text(json.dumps(LLAMA | {"hidden_size": "32"}))
    with pytest.raises(ModelError, match=r"'hidden_size'.*'32'"):
        load_model(str(config), samples=1, sequence_length=16)


MAMBA = {
    "model_type": "mamba2",
    "architectures": ["Mamba2ForCausalLM"],
    "vocab_size": 64,
    "hidden_size": 32,
    "num_hidden_layers": 1,
    "state_size": 8,
    "num_heads": 4,
    "head_dim": 16,
    "n_groups": 1,
}


def test_a_limit_that_is_infinite_is_read_as_transformers_4_and_5_write_it(tmp_path: Path) -> None:
    """`[0.0, Infinity]`, which is no JSON, is in the files of Mamba 2 and of what grew from it."""
    pytest.importorskip("transformers")
    path = tmp_path / "mamba.json"
    profiles = []
    for limit in (math.inf, {"__float__": "Infinity"}):
        path.write_text(json.dumps({**MAMBA, "time_step_limit": [0.0, limit]}))
        module: Any = load_model(str(path), samples=1, sequence_length=16).module
        assert list(module.config.time_step_limit) == [0.0, math.inf]
        profiles.append(profile_model(str(path), samples=1, sequence_length=16))
    assert profiles[0] == profiles[1]
    assert ModelProfile.from_json(profiles[0].to_json()) == profiles[0]
    path.write_text(json.dumps({**MAMBA, "time_step_limit": [0.0, math.nan]}))
    with pytest.raises(FileError, match="`NaN` is not JSON"):
        load_model(str(path), samples=1, sequence_length=16)


@pytest.mark.parametrize("missing", ["nothing", "transformers"])
def test_quantized_weights_are_refused_with_transformers_and_without(
    config: Path, missing: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """transformers builds the whole model: its plan is not that of the weights in the file."""
    pytest.importorskip("transformers")
    if missing != "nothing":
        monkeypatch.setitem(sys.modules, missing, None)
    config.write_text(json.dumps({**LLAMA, "quantization_config": {"quant_method": "gptq"}}))
    with pytest.raises(InputError, match="quantized weights are not trained") as caught:
        profile_model(str(config), samples=1, sequence_length=16)
    assert caught.value.hints == ("leave it out to plan the training of the whole model",)
