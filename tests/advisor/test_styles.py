"""Splits proposed from a profile alone, beside those that the engine proposes and proves."""

from __future__ import annotations

import pytest

from advisor.styles import proposed_split, proposed_styles
from engines.tensor.proposal import propose_styles
from engines.tensor.styles import cutting, styles_of
from profiles.capture import capture
from profiles.model import ModelProfile
from tests.engines.cases import CASES, profile_of

FAMILIES = (
    "GPT-2", "Llama", "Qwen 3", "Mistral", "OPT", "GPT-NeoX", "BERT", "T5", "OLMo 2", "ViT",
    "BLOOM",
)  # fmt: skip
UNPROVED = {
    # Its bias of positions is a table whose rows are heads: the first block hands it to the others.
}
"""Layers that the engine refuses for what a profile does not tell, by architecture."""


@pytest.mark.parametrize("name", FAMILIES)
@pytest.mark.parametrize("tp", [2, 4])
def test_known_models_are_split_as_the_engine_proves(name: str, tp: int) -> None:
    pytest.importorskip("transformers")
    from tests import zoo

    build, sample = zoo.ARCHITECTURES[name]
    model = build()
    profile = capture(model, sample, name=name)
    names = [path for path, _ in model.named_modules()]

    def cuts(pairs: tuple[tuple[str, str], ...]) -> dict[str, str]:
        found = {path: cutting(styles) for path, styles in styles_of(pairs, names).items()}
        return {path: str(style) for path, style in found.items() if style is not None}

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


def test_heads_that_do_not_divide_are_not_split_and_the_reason_is_said() -> None:
    split = proposed_split(gpt(), 8)
    styles = dict(split.styles)
    assert (styles["blocks.*.qkv"], styles["blocks.*.out"]) == ("gather", "gather")
    reasons = {note.layer: note.why for note in split.notes}
    assert reasons["blocks.*.qkv"] == "4 heads for 8 ranks"


def test_a_tied_weight_is_split_alike_in_all_its_places_or_not_at_all() -> None:
    case = CASES["tied-frozen-unused"]
    styles = dict(proposed_styles(profile_of(case, case.build()), 2))
    # Its head's logits are scaled by code of the model itself before the loss takes them.
    assert styles["embed"] == "vocab"
    assert styles["head"] in ("vocab", "gather")
