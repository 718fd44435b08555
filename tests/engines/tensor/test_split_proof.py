"""Tensor plans of users are proved as our own: what is wrong is refused before any work."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from engines.tensor.proposal import propose_styles
from engines.tensor.rules import proposed_styles
from engines.tensor.split_proof import SplitProof, prove_split
from profiles.capture.capture import capture
from profiles.errors import ModelError, PlanError, UnknownNameError
from tests.engines.shared_parameters import OUTSIDE
from tests.engines.tensor import units

HEADS = (
    ("blocks.*.q", "column"),
    ("blocks.*.k", "column"),
    ("blocks.*.v", "column"),
    ("blocks.*.o", "row"),
)


def partial_of(model: nn.Module, *pairs: tuple[str, str], size: int = 2) -> frozenset[str]:
    batch = torch.randn(2, 8, units.WIDTH)
    profile = capture(model, batch, name="stack")
    proof = prove_split(model, batch, pairs, size=size, profile=profile, has_target=False)
    return frozenset(proof.partial)


def test_partial_gradients_are_named_for_every_equal_block() -> None:
    model = units.Stack([units.NormedHeads(), units.NormedHeads()])
    names = {f"blocks.{n}.q_norm.{own}" for n in range(2) for own in ("weight", "bias")}
    assert partial_of(model, *HEADS) == names


@pytest.mark.parametrize(
    ("pairs", "words"),
    [
        ((("blocks.*.q", "column"),), "is not what it is whole: the split unit does not run"),
        ((("blocks.*.o", "vocab"), ("blocks.0.q", "row")), "is not what it is whole"),
        ((("blocks.*", "column"),), "a CountedHeads, cannot be split by `column`"),
        ((*HEADS, ("blocks.*", "sizes(width_of_head)")), "is not what it is whole"),
        ((*HEADS, ("blocks.*", "sizes(nothing)")), "`.nothing` is None"),
    ],
)
def test_a_wrong_plan_is_refused_with_the_reason(
    pairs: tuple[tuple[str, str], ...], words: str
) -> None:
    model = units.Stack([units.CountedHeads(), units.CountedHeads()])
    with pytest.raises(PlanError) as caught:
        partial_of(model, *pairs)
    assert words in str(caught.value)


def test_attributes_that_count_heads_follow_from_the_code_of_the_modules() -> None:
    """A plan that was made from a profile does not name them."""
    model = units.Stack([units.CountedHeads(), units.CountedHeads()])
    batch = torch.randn(2, 8, units.WIDTH)
    profile = capture(model, batch, name="stack")
    proof = prove_split(model, batch, HEADS, size=2, profile=profile, has_target=False)
    styles = proof.by_module
    counted = [str(style) for block in ("blocks.0", "blocks.1") for style in styles[block]]
    assert counted == ["sizes(num_heads)"] * 2


def test_a_tp_that_does_not_divide_is_refused_with_the_numbers() -> None:
    model = units.Stack([units.CountedHeads(), units.CountedHeads()])
    with pytest.raises(PlanError, match="is 4: it has no equal share for each of 3 ranks"):
        partial_of(model, *HEADS, ("blocks.*", "sizes(num_heads)"), size=3)


def test_a_layer_between_units_cannot_return_a_shard() -> None:
    model = nn.Sequential(nn.Linear(units.WIDTH, 8), nn.ReLU(), nn.Linear(8, 4))
    with pytest.raises(PlanError, match="values between units are whole"):
        partial_of(model, ("0", "column"), ("2", "row"))
    assert partial_of(model, ("0", "gather"), ("2", "gather")) == frozenset()


def test_a_pattern_that_fits_no_module_is_refused() -> None:
    with pytest.raises(UnknownNameError, match=r"blocks\.\*\.query"):
        partial_of(units.Stack([units.Attention(), units.Attention()]), ("blocks.*.query", "row"))


class Sharing(units.Stack):
    """The norm of the heads of one block is used in another one, which is not split."""

    def __init__(self) -> None:
        heads, plain = units.NormedHeads(), units.NormedHeads()
        plain.q_norm = heads.q_norm
        super().__init__([heads, plain])

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x)


def test_a_gradient_partial_in_one_block_and_whole_in_another_is_refused() -> None:
    first = [(path.replace("*", "0"), style) for path, style in HEADS]
    with pytest.raises(PlanError, match=r"used by split layers and also in blocks\.1"):
        partial_of(Sharing(), *first)
    assert partial_of(Sharing(), *HEADS) == {"blocks.0.q_norm.weight", "blocks.0.q_norm.bias"}


def test_a_tied_weight_must_be_split_in_all_of_its_places() -> None:
    model = nn.Sequential(nn.Linear(units.WIDTH, units.WIDTH), nn.Linear(units.WIDTH, units.WIDTH))
    model[1].weight = model[0].weight
    with pytest.raises(PlanError, match="used in another place that is not split alike"):
        partial_of(model, ("0", "gather"))
    assert partial_of(model, ("0", "gather"), ("1", "gather")) == frozenset()


def test_a_weight_that_its_unit_is_given_from_outside_must_be_whole() -> None:
    case = OUTSIDE["Borrowed"]
    model, batch = case.build(), case.batch(2)
    profile = capture(model, batch, loss_fn=case.loss_fn)
    pairs = (("blocks.1.up", "column"), ("blocks.1.down", "row"))  # nobody else uses these
    with pytest.raises(PlanError, match=r"weight of `blocks\.1\.up` is used in another place"):
        prove_split(model, batch, pairs, size=2, profile=profile, has_target=True)


@pytest.mark.parametrize("name", OUTSIDE)
def test_a_proposal_leaves_weights_whole_that_are_used_outside_and_is_proved(name: str) -> None:
    case = OUTSIDE[name]
    model, batch = case.build(), case.batch(2)
    profile = capture(model, batch, loss_fn=case.loss_fn)
    proposal = propose_styles(model, batch, size=2, profile=profile, has_target=True)
    assert proposal.proof is not None
    assert proposal.proof.covers(model, proposal.styles, size=2)
    proof = prove_split(model, batch, proposal.styles, size=2, profile=profile, has_target=True)
    assert proposal.proof == proof


@pytest.mark.parametrize("name", OUTSIDE)
def test_styles_by_the_rules_alone_are_proved_on_such_models_too(name: str) -> None:
    case = OUTSIDE[name]
    model, batch = case.build(), case.batch(2)
    profile = capture(model, batch, loss_fn=case.loss_fn)
    styles = proposed_styles(profile, 2)
    assert prove_split(model, batch, styles, size=2, profile=profile, has_target=True).styles


def test_a_plan_for_units_that_cannot_be_tried_is_refused_with_the_reason() -> None:
    with pytest.raises(ModelError, match=r"`blocks\.0` cannot be tried alone: a LockedCache"):
        partial_of(units.CachingStack(units.LockedCache), *HEADS)


@pytest.mark.parametrize(
    "unit", [units.Attention, units.CountedHeads, units.NormedHeads, units.FusedHeads, units.Alibi]
)
def test_a_proposal_carries_the_proof_that_its_styles_have(unit: type[nn.Module]) -> None:
    model, batch = units.Stack([unit(), unit()]), torch.randn(2, 8, units.WIDTH)
    profile = capture(model, batch, name="stack")
    proposal = propose_styles(model, batch, size=2, profile=profile)
    proof = prove_split(model, batch, proposal.styles, size=2, profile=profile, has_target=False)
    assert proposal.proof is not None
    assert proposal.proof.by_module == proof.by_module
    assert proposal.proof.partial == proof.partial
    assert proposal.proof.covers(model, proposal.styles, size=2)


def test_a_proposal_from_shapes_alone_carries_no_proof() -> None:
    model, batch = (
        units.Stack([units.Attention(), units.Attention()]),
        torch.randn(2, 8, units.WIDTH),
    )
    profile = capture(model, batch, name="stack")
    proposal = propose_styles(model, batch, size=2, profile=profile, shapes_only=True)
    assert proposal.styles
    assert proposal.proof is None


def test_a_proof_covers_its_own_split_alone() -> None:
    model = units.Stack([units.CountedHeads(), units.CountedHeads()])
    batch = torch.randn(2, 8, units.WIDTH)
    profile = capture(model, batch, name="stack")
    proof = prove_split(model, batch, HEADS, size=2, profile=profile, has_target=False)
    counted = (*HEADS, ("blocks.*", "sizes(num_heads)"))
    assert SplitProof.model_validate_json(proof.model_dump_json()) == proof
    assert proof.covers(model, HEADS, size=2)
    assert proof.covers(model, counted, size=2)
    assert not proof.covers(model, HEADS, size=4)
    assert not proof.covers(model, HEADS[:3], size=2)
    assert not proof.covers(model, (*HEADS, ("blocks.*", "sizes(width_of_head)")), size=2)


class Ticking(units.Attention):
    """Scales its output by the number of its calls, of which a closure knows."""

    def __init__(self) -> None:
        super().__init__()
        calls = 0

        def tick() -> int:
            nonlocal calls
            calls += 1
            return calls

        self.tick = tick

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * self.tick()


def test_a_proof_leaves_what_the_code_of_a_unit_counts_as_it_was() -> None:
    """Units are tried many times, on one rank alone."""
    model = units.Stack([Ticking(), Ticking()])
    batch = torch.randn(2, 8, units.WIDTH)
    profile = capture(model, batch, name="stack")
    proposal = propose_styles(model, batch, size=2, profile=profile)
    assert any(style == "row" for _, style in proposal.styles)  # every trial sees the same number
    prove_split(model, batch, proposal.styles, size=2, profile=profile, has_target=False)
    assert [block.tick() for block in model.blocks if isinstance(block, Ticking)] == [1, 1]
