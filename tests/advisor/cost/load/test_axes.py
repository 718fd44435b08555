"""Ring attention, experts over ranks, and glue between units, by hand."""

from __future__ import annotations

from dataclasses import replace

import pytest

from advisor.cost.load.axes import (
    expert_bytes,
    over_experts,
    over_tokens,
    split_experts,
    without_experts,
)
from advisor.cost.load.loads import ends_of
from advisor.cost.load.unit_load import with_glue, with_less, with_whole
from advisor.cost.load.work import ProductLoad, UnitWork
from profiles.model.layers import LayerCost, LayerKind
from profiles.model.profile import Affine, ParameterShape, UnitCost, UnitProfile
from profiles.model.work import ProductKind
from tests.advisor.cost.memory.hand_made import loads, unit


def layer(nbytes: float, same_input: int = 0, pieces: tuple[int, ...] = ()) -> LayerCost:
    return LayerCost(
        path="x",
        kind=LayerKind.LINEAR,
        inputs=1,
        outputs=1,
        same_input=same_input,
        output_bytes=Affine(per_sample=nbytes),
        pieces=pieces,
    )


ROW = Affine(per_sample=100.0)


@pytest.mark.parametrize(
    ("layers", "own"),
    [
        ((), 2 * 100),  # as wide as the block
        ((layer(64), layer(8), layer(4), layer(999, 3)), 8 + 4),  # the last two that read its input
        ((layer(96, pieces=(16, 4, 4)), layer(999, 1)), 96 * 8 / 24),  # a fused one
        ((layer(64), layer(8)), 2 * 100),
        ((layer(96, pieces=(16, 8)),), 2 * 100),
    ],
)
def test_a_ring_passes_keys_and_values_and_sums_their_gradients_in_fp32(
    layers: tuple[LayerCost, ...], own: float
) -> None:
    """Of two samples over four ranks; gradients of 16-bit ones are twice as wide and are one hop
    longer under way: 4/3 of what a reduce-scatter sends."""
    block = unit("b", is_block=True, forward_transient_bytes=1.0, backward_transient_bytes=2.0)
    cost = UnitCost(output_bytes=ROW, layers=layers)
    own *= 2
    for element_bytes, wide in ((2, 2 * own), (4, own), (8, own)):
        split = over_tokens(block, cost, cp=4, samples=2, element_bytes=element_bytes)
        assert [each.payload_bytes for each in split.exchanges] == pytest.approx(
            [4 * own, 4 * own, wide * 4 * 4 / 3]
        )
        assert [each.in_forward for each in split.exchanges] == [True, False, False]
        assert [each.is_repeated for each in split.exchanges] == [True, False, False]
        assert split.forward_transient_bytes == pytest.approx(1 + 2 * own)
        assert split.backward_transient_bytes == pytest.approx(2 + 2 * own + 2 * wide)
    head = replace(block, is_block=False)
    assert over_tokens(head, cost, cp=4, samples=2, element_bytes=2) is head


# Eight experts of 10 x 12, two matrices; a router of 4 x 8; a convolution of as many dimensions.
MIXED = UnitProfile(
    name="b",
    kind="Block",
    is_block=True,
    parameter_bytes=2 * 8 * 120 * 4 + 32 * 4 + 3 * 30 * 4,
    gradient_bytes=2 * 8 * 120 * 4 + 32 * 4 + 3 * 30 * 4,
    costs={},
    experts=(8,),
    shapes=(
        ParameterShape(sizes=(8, 10, 12), element_bytes=4, count=2),
        ParameterShape(sizes=(4, 8), element_bytes=4),
        ParameterShape(sizes=(3, 5, 6), element_bytes=4),
    ),
)
EXPERTS, OTHERS = 2 * 8 * 120 * 4, 32 * 4 + 3 * 30 * 4


def test_a_rank_steps_its_part_of_the_experts_and_all_of_the_rest() -> None:
    assert expert_bytes(MIXED, ep=4) == EXPERTS
    assert expert_bytes(MIXED, ep=3) == 0  # 8 experts do not divide
    part = without_experts(MIXED, ep=4)
    assert part.parameter_bytes == part.gradient_bytes == EXPERTS / 4 + OTHERS
    assert [shape.sizes for shape in part.shapes] == [(2, 10, 12), (4, 8), (3, 5, 6)]
    twice = without_experts(MIXED, ep=4, shards=2)  # divided by two afterwards
    assert twice.parameter_bytes == EXPERTS / 2 + OTHERS
    assert twice.shapes[0].sizes == (4, 10, 12)
    split = split_experts(MIXED, tp=3)
    assert split.parameter_bytes == split.gradient_bytes == EXPERTS / 3 + OTHERS
    assert [shape.sizes for shape in split.shapes] == [(8, 10, 4), (4, 8), (3, 5, 6)]
    assert split_experts(MIXED, tp=5).shapes[0].sizes == (8, 10, 3)  # 12 over 5, rounded up
    dense = MIXED.model_copy(update={"experts": ()})
    assert without_experts(dense, ep=4) is dense
    assert split_experts(dense, tp=3) is dense


WHOLE = unit(
    "b",
    parameter_bytes=float(EXPERTS + OTHERS),
    gradient_bytes=float(EXPERTS + OTHERS),
    output_bytes=100.0,
    input_bytes=60.0,
    forward_transient_bytes=1.0,
    backward_transient_bytes=2.0,
)


@pytest.mark.parametrize(
    ("is_sharded", "shards", "sharded", "unsharded", "own"),
    [
        (False, 0, EXPERTS / 4 + OTHERS, 0, EXPERTS / 4),  # replicas: its quarter
        (True, 0, OTHERS, EXPERTS / 4, 0),  # whole beside the shards of the rest
        (True, 8, EXPERTS / 4 + OTHERS, EXPERTS * 3 / 4 / 8, EXPERTS / 4),
    ],
)
def test_a_rank_has_a_part_of_the_experts_beside_its_share_of_the_rest(
    is_sharded: bool, shards: int, sharded: float, unsharded: float, own: float
) -> None:
    """Of eight shards over ep=4 a rank keeps an eighth of all experts: a quarter over eight, and
    three quarters over eight besides."""
    how = {"ep": 4, "per_token": 3, "is_sharded": is_sharded, "shards": shards}
    part = over_experts(WHOLE, MIXED, **how)
    assert (part.parameter_bytes, part.gradient_bytes) == (sharded, sharded)
    assert (part.unsharded_bytes, part.expert_bytes, part.expert_tensors) == (unsharded, own, 2)
    sent = [(each.purpose, each.payload_bytes, each.in_forward) for each in part.exchanges]
    there, back = "tokens to experts", "tokens from experts"
    assert sent == [(w, 3 * 100, flag) for w in (there, back) for flag in (True, False)]
    assert {each.copies for each in part.exchanges} == {3}
    assert (part.forward_transient_bytes, part.backward_transient_bytes) == (601, 602)
    assert (part.partial_gradient_bytes, part.partial_expert_bytes) == (0, 0)
    usual = over_experts(WHOLE, MIXED, **{**how, "per_token": None})
    assert usual.exchanges[0].payload_bytes == 2 * 100
    dense = MIXED.model_copy(update={"experts": ()})
    assert over_experts(WHOLE, dense, **how) is WHOLE


def test_experts_of_split_blocks_have_partial_gradients_and_narrower_tokens() -> None:
    """The engines' experts alone; tokens are as wide as the experts' own products, if known."""
    partial = replace(WHOLE, partial_gradient_bytes=EXPERTS + 7.0)
    how = {"ep": 4, "per_token": 3, "is_sharded": False}
    part = over_experts(partial, MIXED, **how)
    assert (part.partial_gradient_bytes, part.partial_expert_bytes) == (7, EXPERTS / 4)
    assert part.exchanges[0].payload_bytes == 3 * 60  # the narrower of input and output
    sharded = over_experts(partial, MIXED, **{**how, "is_sharded": True}, shards=8)
    assert sharded.partial_expert_bytes == EXPERTS / 8
    other = over_experts(partial, MIXED, **how, is_torch=False, routed=50)
    assert (other.partial_gradient_bytes, other.partial_expert_bytes) == (7, 0)
    assert [each.payload_bytes for each in other.exchanges] == [300] * 4
    grouped = [
        ProductLoad(ProductKind.GROUPED, 16, n, k, 8, 0.0, 0.0, 0.0, 0.0)
        for n, k in ((24, 10), (10, 12), (20, 12))
    ]
    latent = replace(WHOLE, work=UnitWork(tuple(grouped)))
    routed = over_experts(latent, MIXED, **how, routed=50)
    assert [each.payload_bytes for each in routed.exchanges] == [
        *[2 * 16 * 8 * 10] * 2,
        *[2 * 16 * 8 * 20] * 2,
        8 * 4,  # an int64 for each rank
        8 * 50,  # and for each token's copy
    ]


def test_glue_adds_what_it_saves_and_is_as_full_without_the_unit() -> None:
    sizes = {"activation_bytes": 10.0, "selective_bytes": 8.0, "input_bytes": 4.0}
    work = {"forward_transient_bytes": 5.0, "backward_transient_bytes": 6.0, "output_bytes": 3.0}
    own = unit("a", **sizes, **work)
    glue = unit("glue", activation_bytes=100.0, forward_transient_bytes=150.0)
    glue = replace(glue, backward_transient_bytes=30.0)
    both = with_glue(own, glue)
    assert (both.activation_bytes, both.selective_bytes, both.input_bytes) == (110, 108, 104)
    assert both.forward_transient_bytes == 150 - 100 - 4
    assert both.backward_transient_bytes == 30 - (10 - 4) - 3
    block = with_glue(replace(own, is_block=True), glue)
    assert block.backward_transient_bytes == 30 - 3  # of a block its inputs alone are sure
    small = with_glue(own, unit("glue", activation_bytes=100.0))
    assert (small.forward_transient_bytes, small.backward_transient_bytes) == (5, 6)
    assert both.glue is glue


def test_weights_of_other_ranks_and_whole_parameters_are_taken_out() -> None:
    load = unit("a", parameter_bytes=100.0, gradient_bytes=80.0, partial_gradient_bytes=15.0)
    less = with_less(load, 10.0)
    assert (less.parameter_bytes, less.gradient_bytes, less.partial_gradient_bytes) == (90, 70, 5)
    assert with_less(load, 20.0).partial_gradient_bytes == 0
    # Of 200 bytes as built the rank has half: of 60 whole ones, 40 of them trained, too.
    shapes = (ParameterShape(sizes=(5,), element_bytes=4, count=2),)
    sizes = {"parameter_bytes": 200, "whole_bytes": 60, "whole_shapes": shapes}
    rest = with_whole(load, UnitProfile(name="a", kind="Block", costs={}, **sizes))
    assert (rest.parameter_bytes, rest.gradient_bytes) == (100 - 30, 80 - 20)
    assert (rest.whole_bytes, rest.whole_gradient_bytes, rest.whole_tensors) == (30, 20, 2)


def test_long_runs_are_known_by_both_of_their_ends() -> None:
    assert [sum(ends_of(count)) for count in (1, 2, 3, 30)] == [1, 2, 3, 30]
    sizes = {"parameter_bytes": 2.0, "gradient_bytes": 3.0, "expert_bytes": 1.0, "tensors": 5}
    more = {"unsharded_bytes": 7.0, "whole_bytes": 11.0, "whole_gradient_bytes": 13.0}
    run = unit("a", count=30, is_separate=True, expert_tensors=2, **sizes, **more)
    whole = loads(run, unit("b", parameter_bytes=100.0, gradient_bytes=200.0))
    assert (whole.parameter_bytes, whole.gradient_bytes) == (160, 290)
    assert (whole.unsharded_bytes, whole.whole_bytes, whole.whole_gradient_bytes) == (210, 330, 390)
    assert (whole.expert_bytes, whole.common_gradient_bytes) == (30, 260)
    assert (whole.root_parameter_bytes, whole.root_gradient_bytes) == (100, 200)
    assert (whole.tensors, whole.common_tensors) == (151, 91)
    assert sum(each.parameter_bytes * each.count for each in whole.entries) == 160
    part = whole.part(28, 31)
    assert [each.count for each in part.runs] == [2, 1]
    assert (part.pieces, part.names) == (((0, 2), (1, 1)), ("a", "a", "b"))
    assert whole.part(0, 30).pieces == ((0, 30),)
    assert len(list(whole.units)) == 31
