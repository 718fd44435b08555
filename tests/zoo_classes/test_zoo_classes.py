"""The rules that make configs and batches, and classes that were mended, run anew."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

pytest.importorskip("transformers")

import torch
import torch.nn.functional as F
import transformers

from tests.matrix.results import ALLOWED, Cell, Outcome
from tests.workers import Pool
from tests.zoo_classes import __main__ as command
from tests.zoo_classes.classes import class_names, class_of, sampled
from tests.zoo_classes.configs import HEAD_DIM, HEADS, SPECIAL, VOCABULARY, WIDTH, small_config
from tests.zoo_classes.inputs import ROWS, inputs_for, smooth_loss
from tests.zoo_classes.results import RESULTS, Classes, counts
from tests.zoo_classes.run import PLANS, cells_of
from tests.zoo_classes.subjects import Choice, NotTrained, first_that_trains, missing_places

MENDED: dict[str, list[str]] = {
    "LEDForConditionalGeneration": ["pp2"],  # reads a mask that it made itself
    "Llama4ForCausalLM": ["tp2"],  # a linear layer that returns a tuple
    "AXK2ForCausalLM": ["ddp"],  # empty splits of a layer's output
    "DINOv3ViTBackbone": ["zero3"],  # a parameter without elements
    "GotOcr2Model": ["zero3"],  # gradients of zeros
    "VitPoseForPoseEstimation": ["pp2"],  # layers that no loss depends on
    "Gemma4AudioModel": ["tp2"],  # a scale that all heads share, behind a mask
    "MobileBertForNextSentencePrediction": ["tp2"],  # gradients that float32 rounds by 8e-4
}


def test_a_larger_sample_contains_a_smaller_one() -> None:
    assert len(class_names()) > 1000
    assert sampled(40, seed=3)[:10] == sampled(10, seed=3) != sampled(10, seed=4)


def test_sizes_that_go_together_keep_together() -> None:
    config = small_config(transformers.Gemma3Config, "small")
    text, vision = config.text_config, config.vision_config
    assert (text.hidden_size, text.num_attention_heads, text.head_dim) == (WIDTH, HEADS, HEAD_DIM)
    assert text.num_attention_heads % text.num_key_value_heads == 0
    assert len(text.layer_types) == text.num_hidden_layers
    assert vision.image_size % vision.patch_size == 0
    assert text.vocab_size == VOCABULARY
    tokens = [getattr(config, n) for n in ("image_token_id", "boi_token_index", "eoi_token_index")]
    assert max(tokens) < SPECIAL
    assert len(set(tokens)) == 3


def test_depth_alone_is_cut_where_a_class_takes_no_other_sizes() -> None:
    config = small_config(transformers.BertConfig, "shallow")
    assert (config.num_hidden_layers, config.hidden_size) == (2, 768)


@pytest.mark.parametrize(
    ("name", "shape"),
    [
        ("BertForTokenClassification", (ROWS, 16)),
        ("BertForSequenceClassification", (ROWS,)),
        ("SegformerForSemanticSegmentation", (ROWS, 64, 64)),
        ("T5ForConditionalGeneration", (ROWS, 16)),
    ],
)
def test_targets_go_by_the_end_of_the_name(name: str, shape: tuple[int, ...]) -> None:
    kind = class_of(name)
    first = next(inputs_for(kind, small_config(kind.config_class, "small")))  # type: ignore[attr-defined]
    assert first.has_own_loss
    assert tuple(first.batch["labels"].shape) == shape


def test_a_class_without_a_loss_is_trained_on_all_its_outputs() -> None:
    x, y = torch.randn(4, 3), torch.randn(4, 2, 2)
    wanted = (F.softplus(x).mean() + F.softplus(y).mean()) / 2
    output = {"states": (x, torch.arange(3)), "pooled": y}
    assert torch.equal(smooth_loss(output, None), wanted)


def test_places_for_an_image_are_those_that_the_model_misses() -> None:
    text = "Image features and image tokens do not match, tokens: 0, features: 64"
    assert missing_places(text) == 64 // ROWS
    assert missing_places("shapes do not match") == 0


def test_what_one_process_does_not_train_is_not_counted_and_says_why() -> None:
    with pytest.raises(NotTrained, match=r"gradient|train"):
        first_that_trains("ReformerForMaskedLM")
    assert first_that_trains("BertModel") == Choice("small", 0)


def cell(name: str, plan: str, outcome: Outcome, text: str = "") -> Cell:
    return Cell(architecture=name, plan=plan, settings="tp=2", outcome=outcome, text=text)


def test_reasons_are_counted_without_their_names() -> None:
    results = Classes(torch="2", transformers="5", classes=9)
    for name in "abc":
        text = f"`{name}.layer` has {len(name)} heads"
        outcome = Outcome.TRAINED if name == "c" else Outcome.REFUSED
        results = results.with_class(name, [cell(name, "tp2", outcome, text)])
    lines = counts(results.with_class("d", "no config"), ["tp2"]).splitlines()
    assert lines[0].startswith("3 classes count, 1 do not, of 9")
    assert lines[1:] == [
        "tp2: 1 of 3 train (33.3 %); 2 refused",
        "    2 refused : `…` has n heads",
    ]


def test_a_stopped_run_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    ran: list[tuple[str, list[str]]] = []
    untrained = sampled(12, seed=0)[-1]

    def cells(name: str, plans: list[str], pool: Pool) -> Iterator[Cell] | str:
        ran.append((name, plans))
        if name == untrained:
            return "no module"
        outcome = Outcome.FAILED if ran == [(name, ["ddp"])] else Outcome.TRAINED
        return iter([cell(name, plan, outcome) for plan in plans])

    monkeypatch.setattr(command, "cells_of", cells)
    monkeypatch.setattr(command, "start_ranks", lambda pool: None)
    arguments = ["--out", f"{tmp_path}/zoo.json", "--sample", "12"]
    assert command.main([*arguments, "--plan", "ddp"]) == 1
    assert [plans for _, plans in ran] == [["ddp"]] * 12
    ran.clear()
    assert command.main([*arguments, "--again"]) == 0
    assert dict(ran)[untrained] == list(PLANS)
    assert [plans for _, plans in ran].count(["zero3", "tp2", "pp2"]) == 10
    ran.clear()
    assert command.main(arguments) == 0
    assert ran == []
    assert "ddp: 11 of 11 train (100.0 %)" in capsys.readouterr().out


@pytest.mark.dist
@pytest.mark.parametrize("name", MENDED)
def test_a_class_that_was_mended_trains_as_on_one_process(pool: Pool, name: str) -> None:
    cells = cells_of(name, MENDED[name], pool)
    assert not isinstance(cells, str), cells
    for made in cells:
        assert made.outcome is Outcome.TRAINED, made


def test_no_saved_class_differs_crashes_or_hangs() -> None:
    saved = Classes.load(RESULTS)
    assert [made for made in saved.cells if made.outcome not in ALLOWED] == []
    assert len({made.architecture for made in saved.cells}) >= 40
