"""Attention with a number for every head in its scores: what is split, and that it computes what
the whole model does."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from engines.state.slices import Slice
from engines.tensor.proposal import Proposal, propose_styles
from engines.tensor.rules import is_by_head, proposed_styles
from engines.tensor.split import split
from engines.tensor.split_proof import prove_split
from engines.tensor.styles import Style, cutting, styles_of
from engines.tensor.unit_copy import copy_unit
from engines.tensor.unit_kinds import unit_kinds
from engines.tensor.unit_proof import prove_unit
from profiles.capture.capture import capture
from profiles.errors import PlanError
from profiles.model.profile import ModelProfile
from tests.engines.tensor import units
from tests.engines.tensor.biases import MODELS, SharedTable, Slopes, Windows, WithLoss, sample
from tests.engines.tensor.ranks import Parity, split_parity
from tests.workers import Pool

PAIR = {"q": "column", "k": "column", "v": "column", "o": "row"}
SPLITS = {
    "a table for all blocks": {
        **{f"blocks.*.{layer}": style for layer, style in PAIR.items()},
        "blocks.*.table": "column",
        "blocks.0": "bias/4(return_1)",
        "blocks.1": "bias/4(bias)",
        "blocks.2": "bias/4(bias)",
    },
    "slopes by argument": {
        **{f"blocks.*.{layer}": style for layer, style in PAIR.items()},
        "blocks.*": "sizes(num_heads) bias/4(alibi)",
    },
    "tables of windows": {
        **{f"blocks.*.{layer}": style for layer, style in PAIR.items()},
        "blocks.*": "bias/4(scale)",
        "blocks.*.positions": "bias/4(table)",
    },
    "slopes in a buffer": {
        **{f"blocks.*.{layer}": style for layer, style in PAIR.items()},
        "blocks.*": "bias/4(slopes)",
    },
}


def looked_at(name: str) -> tuple[nn.Module, ModelProfile]:
    torch.manual_seed(0)
    model = WithLoss(MODELS[name]())
    return model, capture(model, sample(), name=name)


def proposed(name: str, size: int = 2) -> Proposal:
    model, profile = looked_at(name)
    return propose_styles(model, sample(), size=size, profile=profile)


def written(proposal: Proposal) -> dict[str, str]:
    texts: dict[str, str] = {}
    for pattern, style in proposal.styles:
        path = pattern.removeprefix("model.")
        texts[path] = f"{texts[path]} {style}" if path in texts else style
    return texts


@pytest.mark.parametrize("name", SPLITS)
def test_attention_is_split_with_its_biases_by_head(name: str) -> None:
    assert written(proposed(name)) == SPLITS[name]


@pytest.mark.parametrize("name", SPLITS)
def test_heads_that_have_no_equal_share_leave_attention_whole(name: str) -> None:
    assert set(written(proposed(name, size=3)).values()) <= {"gather", "vocab"}


@pytest.mark.parametrize("name", SPLITS)
def test_the_rules_split_the_layers_that_are_proved(name: str) -> None:
    model, profile = looked_at(name)
    names = [path for path, _ in model.named_modules()]

    def cuts(pairs: tuple[tuple[str, str], ...]) -> dict[str, str]:
        return {
            path: str(style)
            for path, styles in styles_of(pairs, names).items()
            if (style := cutting(styles))
        }

    by_rules = proposed_styles(profile, 2)
    assert cuts(by_rules) == cuts(proposed(name).styles)


@pytest.mark.parametrize("name", SPLITS)
def test_a_plan_by_the_rules_is_proved_with_the_biases_that_it_does_not_name(name: str) -> None:
    model, profile = looked_at(name)
    by_rules = proposed_styles(profile, 2)
    proof = prove_split(model, sample(), by_rules, size=2, profile=profile, has_target=False)
    proposal = proposed(name).proof
    assert proposal is not None
    assert proof.by_module == proposal.by_module
    assert proof.covers(model, by_rules, size=2)


def parity(name: str, by_tokens: bool) -> Parity:
    torch.manual_seed(0)
    return split_parity(WithLoss(MODELS[name]()), sample(), by_tokens=by_tokens)


@pytest.mark.dist
@pytest.mark.parametrize("size", [2, 4])
@pytest.mark.parametrize("name", SPLITS)
def test_loss_and_gradients_are_those_of_one_process(pool: Pool, name: str, size: int) -> None:
    """Also of tables and scales, each of which a rank has the part of its heads of."""
    for by_tokens in (False, True):
        for result in pool.run(parity, name, by_tokens, world_size=size):
            assert result.loss < 1e-6
            assert result.gradient < 1e-4, result.worst  # a key's bias has none but for rounding
            assert result.share < 1.2 / size


def why_not(model: nn.Module, styles: dict[str, str], block: int = 0) -> str:
    path = f"blocks.{block}"
    (kind,) = unit_kinds(model, sample(), [path], has_target=False)
    named = {p: tuple(map(Style.parse, text.split())) for p, text in styles.items()}
    return prove_unit(copy_unit(model, kind), named, size=2).why_not


def test_a_bias_for_later_blocks_must_be_whole() -> None:
    styles = {**PAIR, "table": "column"}
    assert "an output differs" in why_not(SharedTable(), styles)
    assert why_not(SharedTable(), {**styles, "": "bias/4(return_1)"}) == ""


def test_a_bias_of_an_earlier_block_gets_its_whole_gradient() -> None:
    assert "does not run" in why_not(SharedTable(), PAIR, block=1)
    assert why_not(SharedTable(), {**PAIR, "": "bias/4(bias)"}, block=1) == ""


@pytest.mark.parametrize(
    ("elements", "is_of_heads"),
    [
        (4, True),  # slopes
        (4 * 10, True),  # a table of ten distances
        (6, False),
        (8, False),  # a norm of each head
        (32, False),  # a norm of all heads at once
        (2 * 32, False),  # with its bias
    ],
)
def test_a_number_for_each_of_four_heads_of_eight_features(
    elements: int, is_of_heads: bool
) -> None:
    assert is_by_head(elements, 4, 32) is is_of_heads
    assert not is_by_head(elements, 1, 32)


@pytest.mark.parametrize("heads", [2, 8])
def test_slopes_of_another_number_of_heads_are_refused(heads: int) -> None:
    """Of two heads for each sample every second would be taken, and none of eight."""
    assert why_not(Slopes(), {**PAIR, "": f"sizes(num_heads) bias/{heads}(alibi)"})


def test_hidden_values_are_no_bias() -> None:
    """Two rows are no four heads; four are, and would be cut where others run as many."""
    assert "has no 4 heads" in why_not(Slopes(), {**PAIR, "": "sizes(num_heads) bias/4(alibi+x)"})


def test_a_table_is_cut_by_heads_and_not_by_positions() -> None:
    styles = {**PAIR, "": "bias/4(scale)", "positions": "bias/4(table)"}
    assert why_not(Windows(), styles) == ""
    with pytest.raises(PlanError, match="no dimension of 6 heads"):
        split(Windows().blocks[0], {"positions": (Style.parse("bias/6(table)"),)}, FirstOfTwo())


def test_a_name_that_the_module_does_not_have_is_refused() -> None:
    with pytest.raises(PlanError, match="no parameter, buffer or argument `slope`"):
        split(Slopes().blocks[0], {"": (Style.parse("bias/4(slope)"),)}, FirstOfTwo())


def test_a_table_that_another_block_uses_whole_is_not_cut() -> None:
    model = Windows()
    first, second = model.blocks
    second.positions.table = first.positions.table  # type: ignore[union-attr]
    styles = [(f"blocks.0.{layer}", style) for layer, style in PAIR.items()]
    styles += [("blocks.0", "bias/4(scale)"), ("blocks.0.positions", "bias/4(table)")]
    profile = capture(model, sample(), name="windows")
    with pytest.raises(PlanError, match="used in another place that is not split alike"):
        prove_split(model, sample(), styles, size=2, profile=profile, has_target=False)


class FirstOfTwo:
    """The exchange of rank 0 of 2 that nobody answers."""

    rank, size = 0, 2

    def copy(self, whole: Tensor) -> Tensor:
        return whole

    def gather(self, part: Tensor, cut: Slice, *, length: int) -> Tensor:
        return torch.cat([part, part], cut.dim)

    def scatter(self, whole: Tensor, cut: Slice) -> Tensor:
        return cut.part(whole, rank=self.rank, size=self.size)

    reduce = split_tokens = gather_tokens = join_tokens = reduce_tokens = copy


def test_a_buffer_is_whole_but_while_the_forward_runs() -> None:
    model = MODELS["slopes in a buffer"]()
    block = model.get_submodule("blocks.0")
    before = block.get_buffer("slopes").clone()
    styles = {**PAIR, "": "bias/4(slopes)"}
    split(block, {p: (Style.parse(text),) for p, text in styles.items()}, FirstOfTwo())
    block(sample())
    assert torch.equal(block.get_buffer("slopes"), before)
    assert torch.equal(block.state_dict()["slopes"], before)


def test_slopes_that_the_forward_makes_by_itself_leave_attention_whole() -> None:
    model = units.Stack([units.Alibi(), units.Alibi()])
    profile = capture(model, sample(), name="stack")
    styles = propose_styles(model, sample(), size=2, profile=profile).styles
    assert {style for _, style in styles} == {"gather"}
