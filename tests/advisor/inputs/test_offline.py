"""A config of strangers: no hub is asked, no code of its own is run, and its model has an end."""

from __future__ import annotations

import builtins
import json
import os
import socket
import sys
from pathlib import Path
from typing import Any, NoReturn

import pytest

from advisor.inputs import offline
from advisor.inputs.hugging_face import build
from advisor.inputs.models import profile_model
from profiles.errors import InputError, ModelError
from tests.profiles.closed_forms.family_configs import DECODER

pytest.importorskip("transformers")

OLMO = {**DECODER, "model_type": "olmo"}
"""Has no closed form: transformers builds it."""
CODE = {"auto_map": {"AutoConfig": "configuration_evil.EvilConfig", "AutoModel": "evil--x.Evil"}}


@pytest.fixture(autouse=True)
def _alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whoever asks the user, or a network, fails the test."""

    def refuse(*args: object, **settings: object) -> NoReturn:
        raise AssertionError("asked")

    monkeypatch.setattr(builtins, "input", refuse)
    monkeypatch.setattr(socket.socket, "connect", refuse)
    monkeypatch.setattr(socket, "getaddrinfo", refuse)


def written(folder: Path, config: dict[str, Any]) -> Path:
    path = folder / "config.json"
    path.write_text(json.dumps(config))
    return path


def built(path: Path) -> object:
    return build(path, samples=1, sequence_length=16)[0]


def test_code_that_a_config_names_is_not_looked_at(tmp_path: Path) -> None:
    (tmp_path / "configuration_evil.py").write_text("raise SystemExit('run')")
    before = {name: text for name, text in os.environ.items() if "OFFLINE" in name}
    module = built(written(tmp_path, {**OLMO, **CODE, "inner": CODE}))
    assert type(module).__name__ == "OlmoForCausalLM"
    assert {name: text for name, text in os.environ.items() if "OFFLINE" in name} == before
    assert not hasattr(module.config, "auto_map")  # type: ignore[attr-defined]
    profile = profile_model(str(tmp_path / "config.json"), samples=1, sequence_length=16)
    assert profile.parameters == sum(p.numel() for p in module.parameters())  # type: ignore[attr-defined]
    assert "configuration_evil" not in sys.modules


def test_a_model_that_has_only_code_of_its_own_is_refused_without_a_question(
    tmp_path: Path,
) -> None:
    path = written(tmp_path, {**OLMO, **CODE, "model_type": "zzzzzzzz"})
    with pytest.raises(ModelError, match=r"`auto_map`\) is never run"):
        built(path)
    with pytest.raises(ModelError, match="has no `model_type` 'zzzzzzzz'"):
        built(written(tmp_path, {**OLMO, "model_type": "zzzzzzzz"}))


@pytest.mark.parametrize(
    "name", ["pipeline", "AutoModel", "Trainer", "logging", "set_seed", "__path__"]
)
def test_what_an_architecture_names_is_made_only_if_it_is_a_model(
    tmp_path: Path, name: str
) -> None:
    module = built(written(tmp_path, {**OLMO, "architectures": [name]}))
    assert type(module).__name__ == "OlmoForCausalLM"


@pytest.mark.parametrize(
    "field",
    [
        {"attn_implementation": "kernels-community/flash-attn"},
        {"_attn_implementation": "flash_attention_2"},
        {"attn_implementation": {"": "evil/kernel:run"}},
        {"inner": [{"experts_implementation": "evil/kernel"}]},
        {"use_pretrained_backbone": True, "backbone": "evil/model"},
    ],
)
def test_kernels_and_weights_of_a_hub_are_refused(tmp_path: Path, field: dict[str, Any]) -> None:
    with pytest.raises(InputError, match="fetched"):
        built(written(tmp_path, {**OLMO, **field}))


def test_requests_of_transformers_are_refused_while_a_model_is_made() -> None:
    from huggingface_hub import constants, model_info
    from huggingface_hub.errors import OfflineModeIsEnabled

    before = constants.HF_HUB_OFFLINE
    with offline.offline(), pytest.raises(OfflineModeIsEnabled):
        model_info("gpt2")
    assert constants.HF_HUB_OFFLINE is before


def test_a_model_of_too_many_modules_is_refused_before_it_is_made(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each of three layers of OLMo has 13 modules, beside four around them."""
    path = written(tmp_path, OLMO)
    monkeypatch.setattr(offline, "MOST_MODULES", 30)
    with pytest.raises(InputError, match="the model has more than 30 modules"):
        built(path)
    monkeypatch.setattr(offline, "MOST_MODULES", 60)
    assert len(list(built(path).modules())) < 60  # type: ignore[attr-defined]


def test_an_image_of_terabytes_is_refused(tmp_path: Path) -> None:
    config = {
        "model_type": "vit",
        "architectures": ["ViTForImageClassification"],
        "hidden_size": 32,
        "num_hidden_layers": 1,
        "num_attention_heads": 4,
        "image_size": 1_000_000,
    }
    with pytest.raises(InputError, match="`image_size` = 1000000: an image has 3,000,000,000,000"):
        build(written(tmp_path, config), samples=1, sequence_length=None)
