"""Splits by the rules on a profile alone, compared with those that the engine proves."""

from __future__ import annotations

import pytest

from engines.tensor.proposal import propose_styles
from engines.tensor.rules import proposed_split, proposed_styles
from engines.tensor.styles import cutting, styles_of
from profiles.capture.capture import capture
from profiles.closed_forms.transformer import TransformerShape, transformer_profile
from profiles.model.profile import ModelProfile
from tests.contract.subjects import Decoder, batch_of
from tests.engines.cases import CASES, profile_of, token_loss
from tests.nightly import nightly

FAMILIES = (
    "BART", "BERT", "BLOOM", "Falcon", "Gemma 2", "GPT-2", "GPT-NeoX", "GPT-OSS", "Llama",
    "Mixtral", "OLMo 2", "OPT", "Phi 3", "Qwen 3", "T5",
)  # fmt: skip


@pytest.mark.parametrize(
    ("name", "tp"),
    [
        ("T5", 2),
        ("Gemma 2", 2),
        ("Llama", 4),
        ("Mixtral", 2),
        *nightly(*((name, 2) for name in FAMILIES if name not in ("T5", "Gemma 2", "Mixtral"))),
    ],
)
@pytest.mark.filterwarnings("ignore")
def test_known_models_are_split_as_the_engine_proves(name: str, tp: int) -> None:
    pytest.importorskip("transformers")
    from tests import zoo

    build, sample = zoo.ARCHITECTURES[name]
    model = build()
    for module in model.modules():
        if hasattr(module, "config"):
            module.config.use_cache = False  # the cache of keys is not an output of a block
    profile = capture(model, sample, name=name)
    names = [path for path, _ in model.named_modules()]

    def cuts(pairs: tuple[tuple[str, str], ...]) -> dict[str, str]:
        by_path = {path: cutting(styles) for path, styles in styles_of(pairs, names).items()}
        return {path: str(style) for path, style in by_path.items() if style is not None}

    proved = propose_styles(model, sample, size=tp, profile=profile)
    assert cuts(proposed_styles(profile, tp)) == cuts(proved.styles)


def gpt() -> ModelProfile:
    return profile_of(CASES["gpt"], CASES["gpt"].build())


def test_a_pair_is_column_then_row_and_fused_heads_are_three_packs() -> None:
    assert dict(proposed_styles(gpt(), 2)) == {
        "embed": "vocab",
        "blocks.*.qkv": "column/3",
        "blocks.*.out": "row",
        "blocks.*.mlp.0": "column",
        "blocks.*.mlp.2": "row",
        "head": "vocab",
    }


def test_heads_that_do_not_divide_are_not_split_and_the_reason_is_given() -> None:
    split = proposed_split(gpt(), 8)
    styles = dict(split.styles)
    assert (styles["blocks.*.qkv"], styles["blocks.*.out"]) == ("gather", "gather")
    reasons = {note.layer: note.why for note in split.notes}
    assert reasons["blocks.*.qkv"] == "4 heads for 8 ranks"


def test_a_tied_weight_is_split_everywhere_or_nowhere() -> None:
    model = Decoder(tied=True)
    profile = capture(model, batch_of(2), loss_fn=token_loss)
    styles = dict(proposed_styles(profile, 2))
    assert (styles["embed"], styles["head"]) == ("vocab", "vocab")

    used_by_code = profile.flow.calls[0].model_copy(update={"parameters": ("embed.weight",)})
    flow = profile.flow.model_copy(update={"calls": (used_by_code, *profile.flow.calls[1:])})
    split = proposed_split(profile.model_copy(update={"flow": flow}), 2)
    assert not {"embed", "head"} & dict(split.styles).keys()
    assert {"embed", "head"} <= {note.layer for note in split.notes}


@pytest.mark.parametrize("name", ["gpt", "llama"])
def test_layers_are_split_in_pairs(name: str) -> None:
    """As Megatron-LM splits them (arXiv:1909.08053): the groups of heads of queries, keys and
    values, which lie side by side, and both halves of a gated layer alike."""
    is_gated = name == "llama"
    shape = TransformerShape(
        kind="llama" if is_gated else "dense_gpt", layers=2, hidden=64, heads=8, kv_heads=4,
        ffn=256, vocab=128, length=32, gated=is_gated, tied=not is_gated, head_width=8,
    )  # fmt: skip
    model = transformer_profile(shape, name=name)
    assert dict(proposed_split(model, 4).styles) == {
        "embedding.words": "vocab",
        "head": "vocab",
        "layers.*.attention.qkv": "column",
        "layers.*.attention.output": "row",
        "layers.*.mlp.up": "column/2" if is_gated else "column",
        "layers.*.mlp.down": "row",
    }
    reasons = [note.why for note in proposed_split(model, 8).notes if "qkv" in note.layer]
    assert reasons == ["4 heads for 8 ranks"]
