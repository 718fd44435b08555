"""MODEL to a module, a sample and a loss: every way to write it, every way it goes wrong."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch

from advisor.inputs.models import LoadedModel, load_model, profile_model, require_model
from profiles.errors import FileError, InputError, ModelError, UnknownNameError
from profiles.model.profile import ModelProfile, Numerics, UnitCost, UnitProfile

Write = Callable[[str, str], None]

LLAMA = {
    "model_type": "llama",
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "max_position_embeddings": 128,
}


@pytest.fixture
def write(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Write]:
    """Write a file into an empty current folder; what is imported from it is forgotten after."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.setattr(sys, "dont_write_bytecode", True)

    def write_file(name: str, text: str) -> None:
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)

    yield write_file
    for name, module in list(sys.modules.items()):
        if str(getattr(module, "__file__", "")).startswith(str(tmp_path)):
            del sys.modules[name]


def load(text: str, seq: int | None = None, samples: int = 2) -> LoadedModel:
    return load_model(text, samples=samples, sequence_length=seq)


class TestBundled:
    def test_takes_no_memory_and_brings_tokens_and_their_loss(self) -> None:
        loaded = load("gpt-70b", samples=3)
        assert loaded.name == "gpt-70b"
        assert {p.device.type for p in loaded.module.parameters()} == {"meta"}
        assert [tuple(part.shape) for part in loaded.sample] == [(3, 2048), (3, 2048)]
        assert loaded.loss_fn is not None

    def test_a_longer_sequence_gets_a_longer_position_table(self) -> None:
        short, long = load("gpt-125m", seq=1024), load("gpt-125m", seq=4096)
        assert short.sample[0].shape == (2, 1024)
        assert long.sample[0].shape == (2, 4096)
        sizes = [sum(p.numel() for p in m.module.parameters()) for m in (short, long)]
        assert sizes[1] - sizes[0] == 2048 * 768  # 2,048 more positions of width 768

    def test_a_misspelt_name_gets_the_near_miss(self) -> None:
        with pytest.raises(UnknownNameError, match="did you mean `gpt-7b`") as caught:
            load("gtp-7b")
        assert caught.value.exit_code == 2


class TestHuggingFace:
    def test_config_is_built_on_meta_with_labels(self, write: Write) -> None:
        pytest.importorskip("transformers")
        write("tiny/config.json", json.dumps(LLAMA))
        loaded = load("tiny/config.json", seq=16)
        assert type(loaded.module).__name__ == "LlamaForCausalLM"
        assert {p.device.type for p in loaded.module.parameters()} == {"meta"}
        assert {key: tuple(t.shape) for key, t in loaded.sample.items()} == {
            "input_ids": (2, 16),
            "labels": (2, 16),
        }
        assert (loaded.loss_fn, loaded.name) == (None, "tiny")
        # embedding and head 2 x 64 x 32; per layer 4 x 32^2 + 3 x 32 x 48 + 2 x 32; last norm 32
        size = sum(p.numel() for p in loaded.module.parameters())
        assert size == 2 * 64 * 32 + 2 * (4 * 32**2 + 3 * 32 * 48 + 2 * 32) + 32

    def test_without_architectures_it_is_a_causal_language_model(self, write: Write) -> None:
        pytest.importorskip("transformers")
        config = {key: value for key, value in LLAMA.items() if key != "architectures"}
        write("llama.json", json.dumps(config))
        loaded = load("llama.json", seq=16)
        assert (type(loaded.module).__name__, loaded.name) == ("LlamaForCausalLM", "llama")

    def test_the_sequence_length_is_asked_for(self, write: Write) -> None:
        pytest.importorskip("transformers")
        write("config.json", json.dumps(LLAMA))
        with pytest.raises(InputError, match=r"add `--seq 128` \(positions go to 128\)"):
            load("config.json")

    def test_a_sequence_beyond_the_positions_is_refused_with_the_limit(self, write: Write) -> None:
        pytest.importorskip("transformers")
        write("config.json", json.dumps(LLAMA))
        with pytest.raises(InputError, match="`--seq 256`, but the positions of this model go"):
            load("config.json", seq=256)

    def test_another_dtype_of_the_weights_is_reported(
        self, write: Write, capsys: pytest.CaptureFixture[str]
    ) -> None:
        pytest.importorskip("transformers")
        write("config.json", json.dumps({**LLAMA, "dtype": "bfloat16"}))
        loaded = load("config.json", seq=16)
        assert {p.dtype for p in loaded.module.parameters()} == {torch.float32}
        assert "config.json names bfloat16; parameters are taken as fp32" in capsys.readouterr().err

    def test_a_vision_model_needs_a_factory(self, write: Write) -> None:
        pytest.importorskip("transformers")
        write("vit.json", json.dumps({"model_type": "vit"}))
        with pytest.raises(ModelError, match="does not take token ids alone"):
            load("vit.json", seq=16)

    def test_without_transformers_the_extra_is_named(
        self, write: Write, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        write("config.json", json.dumps(LLAMA))
        monkeypatch.setitem(sys.modules, "transformers", None)
        with pytest.raises(ModelError, match=r"pip install 'parallel-advisor\[hf\]'"):
            load("config.json", seq=16)

    def test_another_json_file_is_refused(self, write: Write) -> None:
        write("other.json", '{"learning_rate": 1}')
        with pytest.raises(FileError, match="neither a model profile"):
            load("other.json")

    def test_broken_json_says_where(self, write: Write) -> None:
        write("config.json", '{\n  "model_type" "llama"}')
        with pytest.raises(FileError, match="line 2, column 16"):
            load("config.json")

    def test_a_missing_file_is_named(self, write: Write) -> None:
        with pytest.raises(FileError, match=r"cannot read `config\.json`: No such file"):
            load("config.json")


class TestSavedProfile:
    PROFILE = ModelProfile(
        name="saved",
        units=(UnitProfile(name="head", kind="Linear", costs={Numerics.AS_BUILT: UnitCost()}),),
        dtype="float32",
        samples=1,
        tokens_per_sample=512,
    )

    def test_is_read_back_without_a_sample(self, write: Write) -> None:
        self.PROFILE.save("model.json")
        assert profile_model("model.json", samples=1, sequence_length=None) == self.PROFILE
        assert profile_model("model.json", samples=1, sequence_length=512) == self.PROFILE

    def test_another_sequence_length_needs_another_profile(self, write: Write) -> None:
        self.PROFILE.save("model.json")
        with pytest.raises(InputError, match="`--seq 1024`, but the profile is of 512 tokens"):
            profile_model("model.json", samples=1, sequence_length=1024)


TOKEN_MODEL = """
import torch
from torch import nn

class Tokens(nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(16, 4)
        self.head = nn.Linear(4, 16)
    def forward(self, ids):
        return self.head(self.embedding(ids))
"""


class TestFactory:
    def test_a_module_class_is_called(self, write: Write) -> None:
        write("train.py", TOKEN_MODEL)
        loaded = load("train:Tokens", seq=8)
        assert type(loaded.module).__name__ == "Tokens"
        assert loaded.name == "train:Tokens"

    def test_a_module_that_begins_with_an_embedding_gets_tokens(self, write: Write) -> None:
        write("train.py", TOKEN_MODEL)
        loaded = load("train:Tokens", seq=8)
        tokens, targets = loaded.sample
        assert tuple(tokens.shape) == tuple(targets.shape) == (2, 8)
        value = loaded.loss_fn(loaded.module(tokens), targets)
        assert value.ndim == 0

    def test_a_module_with_a_configured_context_needs_no_length(self, write: Write) -> None:
        write("train.py", "from advisor.inputs.bundled.gpt import GPT\n"
              "from advisor.inputs.bundled.gpt_shapes import SHAPES\n"
              "def build(): return GPT(SHAPES['gpt-10m'])\n")  # fmt: skip
        assert load("train:build").sample[0].shape == (2, 128)

    def test_a_model_that_takes_labels_computes_its_loss(self, write: Write) -> None:
        write(
            "train.py",
            TOKEN_MODEL.replace("forward(self, ids)", "forward(self, input_ids, labels)"),
        )
        loaded = load("train:Tokens", seq=8)
        assert sorted(loaded.sample) == ["input_ids", "labels"]
        assert loaded.loss_fn is None

    def test_its_sample_and_loss_are_taken_as_they_are(self, write: Write) -> None:
        write("pkg/__init__.py", "")
        write(
            "pkg/vision.py",
            "import torch\nfrom torch import nn\nfrom torch.nn.functional import cross_entropy\n"
            "def pair(): return nn.Linear(3, 5), torch.zeros(4, 3)\n"
            "def build():\n"
            "    sample = torch.zeros(4, 3), torch.zeros(4).long()\n"
            "    return nn.Linear(3, 5), sample, cross_entropy\n",
        )
        loaded = load("pkg.vision:build")
        assert [tuple(part.shape) for part in loaded.sample] == [(4, 3), (4,)]
        assert loaded.loss_fn is torch.nn.functional.cross_entropy
        assert load("pkg.vision:pair").sample.shape == (4, 3)

    def test_a_sequence_length_over_its_own_sample_is_refused(self, write: Write) -> None:
        write(
            "train.py",
            "import torch\ndef build(): return torch.nn.Linear(3, 5), torch.zeros(4, 3)\n",
        )
        with pytest.raises(InputError, match="brings its own sample"):
            load("train:build", seq=128)

    def test_a_module_object_is_taken_as_it_is(self, write: Write) -> None:
        write("train.py", TOKEN_MODEL + "model = Tokens()\n")
        assert load("train:model", seq=8).module is sys.modules["train"].model

    def test_dotted_attributes_are_followed(self, write: Write) -> None:
        write("train.py", TOKEN_MODEL + "class Zoo:\n    small = Tokens\n")
        assert type(load("train:Zoo.small", seq=8).module).__name__ == "Tokens"

    def test_prints_of_a_factory_do_not_reach_stdout(
        self, write: Write, capsys: pytest.CaptureFixture[str]
    ) -> None:
        write("train.py", TOKEN_MODEL + "print('at import')\ndef build():\n"
              "    print('at call')\n    return Tokens()\n")  # fmt: skip
        load("train:build", seq=8)
        captured = capsys.readouterr()
        assert (captured.out, captured.err) == ("", "at import\nat call\n")


class TestFactoryInAFile:
    def test_its_folder_is_searched_first(self, write: Write) -> None:
        write("scripts/width.py", "WIDTH = 12")
        write(
            "scripts/net.py",
            "from torch import nn\nfrom width import WIDTH\nnet = nn.Embedding(7, WIDTH)",
        )
        assert load("scripts/net.py:net", seq=4).module.embedding_dim == 12

    def test_in_a_package_it_is_imported_as_a_part_of_it(self, write: Write) -> None:
        write("src/pkg/__init__.py", "")
        write("src/pkg/width.py", "WIDTH = 12")
        write(
            "src/pkg/net.py",
            "from torch import nn\nfrom .width import WIDTH\nnet = nn.Embedding(7, WIDTH)",
        )
        assert load("src/pkg/net.py:net", seq=4).module.embedding_dim == 12

    def test_that_is_missing_names_the_nearest_one(self, write: Write) -> None:
        write("scripts/train.py", TOKEN_MODEL)
        with pytest.raises(
            ModelError, match=r"no file `scripts/trian\.py`\n\nhint: did you mean `scripts/train"
        ):
            require_model("scripts/trian.py:Tokens")

    def test_has_another_function_by_its_path(self, write: Write) -> None:
        write("scripts/train.py", TOKEN_MODEL)
        with pytest.raises(ModelError, match=r"did you mean `scripts/train\.py:Tokens`"):
            load("scripts/train.py:Token")

    def test_whose_name_is_taken_is_refused(self, write: Write) -> None:
        write("scripts/json.py", TOKEN_MODEL)
        with pytest.raises(ModelError, match="another module is called `json`"):
            load("scripts/json.py:Tokens")


class TestFactoryMistakes:
    def test_a_missing_package_is_named_before_anything_is_imported(self, write: Write) -> None:
        write("training.py", "raise SystemExit('imported')")
        require_model("training:build")
        with pytest.raises(ModelError, match="no module named `trainings`") as error:
            require_model("trainings:build")
        assert error.value.hints[0] == "did you mean `training`?"

    def test_a_missing_module_names_the_nearest_one(self, write: Write) -> None:
        write("train.py", TOKEN_MODEL)
        with pytest.raises(
            ModelError, match=r"no module named `trian`\n\nhint: did you mean `train`"
        ):
            load("trian:Tokens")

    def test_a_missing_submodule_names_its_sibling(self, write: Write) -> None:
        write("pkg/__init__.py", "")
        write("pkg/train.py", TOKEN_MODEL)
        with pytest.raises(
            ModelError, match=r"named `pkg\.trian`\n\nhint: did you mean `pkg\.train`"
        ):
            load("pkg.trian:Tokens")

    def test_a_dependency_that_is_missing_is_named_with_the_line(self, write: Write) -> None:
        write("train.py", "import torch\nimport flash_attn_of_mars\n")
        with pytest.raises(ModelError) as caught:
            load("train:build")
        assert caught.value.what == "`train` does not import: no module named `flash_attn_of_mars`"
        assert caught.value.where == "train.py:2"

    def test_a_syntax_error_has_its_line(self, write: Write) -> None:
        write("train.py", "import torch\n\ndef build(:\n")
        with pytest.raises(ModelError, match="`train` does not import: SyntaxError") as caught:
            load("train:build")
        assert caught.value.where == "train.py:3"

    def test_a_script_that_exits_at_import_does_not_end_the_process(self, write: Write) -> None:
        write("train.py", "import sys\nsys.exit('usage: train.py DATA')\n")
        with pytest.raises(ModelError, match=r"SystemExit: usage: train\.py DATA") as caught:
            load("train:build")
        assert caught.value.where == "train.py:2"

    def test_a_missing_attribute_names_the_nearest_one(self, write: Write) -> None:
        write("train.py", "def build_model(): ...\n")
        with pytest.raises(ModelError, match="did you mean `train:build_model`"):
            load("train:buildmodel")

    def test_without_a_near_attribute_all_of_the_module_are_listed(self, write: Write) -> None:
        write("train.py", "from pathlib import Path\ndef make(): ...\nlimit = 3\n_p = make\n")
        with pytest.raises(ModelError, match=r"it has: make$"):
            load("train:transformer")

    @pytest.mark.parametrize(
        ("value", "shown"),
        [
            ("{}", "a dict"),
            ("None", "`None`"),
            ("torch.nn.Linear", "`<class 'torch.nn.modules.linear.Linear'>`"),
            ("(1, torch.zeros(2))", r"\(int, Tensor\)"),
            ("()", r"\(\)"),
            ("(torch.nn.Linear(1, 1), 1, 2, 3)", r"\(Linear, int, int, int\)"),
        ],
    )
    def test_values_that_are_not_modules_are_described(
        self, write: Write, value: str, shown: str
    ) -> None:
        write("train.py", f"import torch\ndef build(): return {value}\n")
        with pytest.raises(ModelError, match=rf"`train:build` gives {shown}, not a torch\.nn"):
            load("train:build")

    def test_values_that_cannot_be_called_are_described(self, write: Write) -> None:
        write("train.py", "width = 3\n")
        with pytest.raises(
            ModelError, match=r"`train:width` gives an int, not a torch\.nn\.Module"
        ):
            load("train:width")

    def test_an_exception_is_shown_with_the_users_own_line(self, write: Write) -> None:
        write("train.py", "import torch\ndef build():\n    return torch.nn.Linear('a', 1)\n")
        with pytest.raises(ModelError, match="`train:build` raises: TypeError: ") as caught:
            load("train:build")
        assert caught.value.where == "train.py:3"  # not torch's line
        assert isinstance(caught.value.__cause__, TypeError)

    def test_only_the_first_line_of_an_exception_is_shown(self, write: Write) -> None:
        write("train.py", "def build(): raise ValueError('first\\nsecond')\n")
        with pytest.raises(ModelError) as caught:
            load("train:build")
        assert caught.value.what == "`train:build` raises: ValueError: first"

    def test_network_errors_are_exceptions_of_the_factory(self, write: Write) -> None:
        write("train.py", "import socket\ndef build():\n"
              "    socket.create_connection(('192.0.2.1', 80), timeout=0.1)\n")  # fmt: skip
        with pytest.raises(ModelError, match="`train:build` raises: OSError: tests may not reach"):
            load("train:build")

    def test_a_factory_with_arguments_says_which(self, write: Write) -> None:
        write("train.py", "def build(config): ...\n")
        with pytest.raises(ModelError, match="missing a required argument: 'config'"):
            load("train:build")

    def test_a_module_without_token_ids_asks_for_a_sample(self, write: Write) -> None:
        write("train.py", "import torch\ndef build(): return torch.nn.Linear(3, 5)\n")
        with pytest.raises(
            ModelError, match=r"return \(Module, sample\) or \(Module, sample, loss"
        ):
            load("train:build")

    def test_an_unknown_sequence_length_is_asked_for(self, write: Write) -> None:
        write("train.py", TOKEN_MODEL)
        with pytest.raises(InputError, match="add `--seq 2048`"):
            load("train:Tokens")

    @pytest.mark.parametrize("text", ["train:", ":build"])
    def test_half_a_name_is_refused(self, write: Write, text: str) -> None:
        with pytest.raises(ModelError, match=r"is not `pkg\.module:factory`"):
            load(text)
