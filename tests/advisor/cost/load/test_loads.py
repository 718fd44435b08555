"""Loads of a model's units: sums, parts, ends of runs, and the loss of split logits, by hand."""

from __future__ import annotations

from dataclasses import fields, replace

import pytest

from advisor.cost.load.loads import (
    ACTIVATION_ERROR,
    GUESS_ERROR,
    Loads,
    _over_expert_ranks,
    _with_split_loss,
    activation_error,
    combined,
    describe,
    loads_of,
)
from advisor.cost.load.unit_load import UnitLoad
from advisor.cost.load.work import ProductLoad, UnitWork
from profiles.model.flow import LOSS
from profiles.model.layers import LayerCost, LayerKind
from profiles.model.profile import Affine, CaptureSource, Numerics
from profiles.model.work import ProductKind
from profiles.workload.stack import TORCH, Loss
from tests.advisor.cost.memory.hand_made import loads, unit
from tests.factories import transformer

HEAD = unit("head", parameter_bytes=1.0, gradient_bytes=2.0, tensors=1)
BLOCK = unit(
    "block",
    count=3,
    is_separate=True,
    parameter_bytes=10.0,
    gradient_bytes=20.0,
    unsharded_bytes=30.0,
    whole_bytes=40.0,
    whole_gradient_bytes=50.0,
    expert_bytes=7.0,
    tensors=5,
    expert_tensors=2,
)
EVERY = loads(HEAD, BLOCK)


def test_sums_are_over_all_units_of_a_run() -> None:
    assert EVERY.parameter_bytes == 1 + 3 * 10
    assert EVERY.gradient_bytes == 2 + 3 * 20
    assert EVERY.unsharded_bytes == 3 * 30
    assert EVERY.whole_bytes == 3 * 40
    assert EVERY.whole_gradient_bytes == 3 * 50
    assert EVERY.expert_bytes == 3 * 7
    assert EVERY.common_gradient_bytes == 62 - 21
    assert EVERY.tensors == 1 + 3 * 5
    assert EVERY.common_tensors == 1 + 3 * 5 - 3 * 2
    assert EVERY.separate == (BLOCK,)


def test_fsdps_root_group_has_what_has_no_group_of_its_own() -> None:
    every = loads(replace(HEAD, count=2), BLOCK)
    assert every.root_parameter_bytes == 2 * 1
    assert every.root_gradient_bytes == 2 * 2


def test_a_part_cuts_runs_and_knows_where_it_came_from() -> None:
    part = EVERY.part(0, 3)
    assert [(run.name, run.count) for run in part.runs] == [("head", 1), ("block", 2)]
    assert part.pieces == ((0, 1), (1, 2))
    assert part.names == EVERY.names[:3]
    rest = EVERY.part(3, 4)
    assert [(run.name, run.count) for run in rest.runs] == [("block", 1)]
    assert rest.pieces == ((1, 1),)
    assert EVERY.part(0, 3) is part
    whole = combined([part, rest])
    assert whole.parameter_bytes == EVERY.parameter_bytes
    assert (whole.pieces, whole.names) == (((0, 1), (1, 2), (1, 1)), EVERY.names)
    assert combined([part]) is part


def test_entries_separate_both_ends_of_a_long_run() -> None:
    names = ("head", *(f"b.{n}" for n in range(9)))
    long = Loads((HEAD, unit("b", count=9)), 1, 1.0, 0.0, names)
    shown = [(each.name, each.count) for each in long.entries]
    assert shown == [("head", 1), ("b.0", 1), ("b.1", 1), ("b.2", 5), ("b.7", 1), ("b.8", 1)]
    assert [(each.name, each.count) for each in long.units] == [(name, 1) for name in names]


def test_a_guess_from_parameters_has_a_wide_range() -> None:
    model = transformer(layers=2)
    assert activation_error(model) == ACTIVATION_ERROR
    guess = model.model_copy(update={"source": CaptureSource.PARAMETERS})
    assert activation_error(guess) == GUESS_ERROR


@pytest.mark.parametrize(
    ("numerics", "share"), [(Numerics.AS_BUILT, 1.0), (Numerics.BF16_AUTOCAST, 0.5)]
)
def test_parameters_are_copied_in_16_bits_where_a_model_of_32_computes_in_them(
    numerics: Numerics, share: float
) -> None:
    model = transformer(layers=2)
    every = loads_of(model, numerics=numerics, samples=3)
    assert (every.compute_share, every.samples) == (share, 3)
    assert every.names == tuple(each.name for each in model.units)


def test_weights_of_experts_on_other_ranks_are_not_read() -> None:
    """Of 8 experts over 4 ranks: three quarters of the weights' bytes, in every pass over them."""
    m, n, k = 64.0, 32.0, 16.0
    weights, tokens = 8 * n * k * 2, m * (n + k) * 2
    flop = 2 * m * n * k
    product = ProductLoad(
        ProductKind.GROUPED, m, n, k, 8, flop, 2 * flop, weights + tokens, 2 * (weights + tokens)
    )
    block = unit(
        "experts",
        forward_moved_bytes=1e6,
        backward_moved_bytes=2e6,
        work=UnitWork(products=(product,)),
    )
    split = _over_expert_ranks(block, 4)
    assert split.forward_moved_bytes == 1e6 - weights * 3 / 4
    assert split.backward_moved_bytes == 2e6 - 2 * weights * 3 / 4
    dense = replace(block, work=UnitWork(products=(product._replace(kind=ProductKind.LINEAR),)))
    assert _over_expert_ranks(dense, 4) is dense


def test_units_are_named_in_sentences() -> None:
    assert [describe(name) for name in (LOSS, "layers.0", "")] == [
        "the loss",
        "`layers.0`",
        "the model",
    ]


# Amounts that a rank has a share of; each a number of its own.
SHARED = (
    "forward_flop",
    "backward_flop",
    "forward_moved_bytes",
    "backward_moved_bytes",
    "forward_cycles",
    "backward_cycles",
    "activation_bytes",
    "selective_bytes",
    "input_bytes",
    "forward_transient_bytes",
    "backward_transient_bytes",
)


@pytest.mark.parametrize(("numerics", "width"), [(Numerics.BF16, 2), (Numerics.AS_BUILT, 4)])
@pytest.mark.parametrize("loss", [Loss.MATERIALISED, Loss.FUSED])
def test_a_rank_has_its_share_of_the_loss_of_split_logits(
    numerics: Numerics, width: int, loss: Loss
) -> None:
    """Two samples of 8 rows and 100 classes over 4 ranks: every row's highest logit, its sum and
    the logit of its class are summed, in fp32; torch keeps the exponentials' input as well."""
    model = transformer(layers=1).model_copy(update={"dtype": "float32"})
    amounts = {name: 4.0 * (number + 1) for number, name in enumerate(SHARED)}
    whole = unit("loss", output_bytes=9.0, **amounts)
    head = LayerCost(
        path="head",
        kind=LayerKind.LINEAR,
        inputs=16,
        outputs=100,
        same_input=0,
        output_bytes=Affine(per_sample=8.0 * 100 * width),
        pieces=(),
    )
    stack = TORCH.model_copy(update={"loss": loss})
    split = _with_split_loss(whole, head, model, numerics, 2, tp=4, stack=stack)
    retained = 16 * 100 / 4 * 4 if loss is Loss.MATERIALISED else 0
    for name in SHARED:
        more = retained if name in ("activation_bytes", "selective_bytes") else 0
        assert getattr(split, name) == amounts[name] / 4 + more, name
    assert [each.payload_bytes for each in split.exchanges] == [16 * 4] * 3
    untouched = {field.name for field in fields(UnitLoad)} - {*SHARED, "exchanges"}
    assert all(getattr(split, name) == getattr(whole, name) for name in untouched)
