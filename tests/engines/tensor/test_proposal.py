"""Proposed splits, for blocks with traps and for models whose split is known."""

from __future__ import annotations

import functools

import pytest
import torch
from torch import Tensor, nn

from engines.tensor.proposal import Proposal, propose_styles
from profiles.capture.capture import capture
from profiles.errors import PlanError
from tests.engines.tensor import units
from tests.nightly import nightly


def proposed(model: nn.Module, size: int = 2) -> Proposal:
    batch = torch.randn(2, 6, units.WIDTH)
    profile = capture(model, batch, name="stack")
    return propose_styles(model, batch, size=size, profile=profile)


def of_block(unit: nn.Module, size: int = 2) -> dict[str, str]:
    actual = proposed(units.Stack([unit, type(unit)()]), size)
    return {pattern.removeprefix("blocks.*").lstrip("."): style for pattern, style in actual.styles}


HEADS = {"q": "column", "k": "column", "v": "column", "o": "row"}


def test_attention_is_split_by_heads() -> None:
    assert of_block(units.Attention()) == HEADS


def test_counted_heads_are_counted_anew() -> None:
    assert of_block(units.CountedHeads()) == {**HEADS, "": "sizes(num_heads)"}


def test_heads_are_counted_by_their_number_where_no_name_says_so() -> None:
    assert of_block(units.ShortNames()) == {**HEADS, "": "sizes(h+kv)"}


def test_fused_heads_are_three_packs() -> None:
    assert of_block(units.FusedHeads()) == {"qkv": "column/3", "o": "row"}


def test_layers_that_cannot_be_split_are_gathered_with_a_note() -> None:
    actual = proposed(units.Stack([units.Alibi(), units.Alibi()]))
    assert {style for path, style in actual.styles if path[-1] in "qkvo"} == {"gather"}
    reasons = {note.layer: str(note) for note in actual.notes}
    assert "gather, the split unit does not run" in reasons["blocks.*.q"]


def test_a_table_of_distances_is_split_by_its_columns_which_are_heads() -> None:
    assert of_block(units.RelativeBias()) == {**HEADS, "table": "column"}


def test_few_key_heads_are_computed_by_several_ranks_where_queries_divide() -> None:
    model = units.Stack([units.Attention(kv_heads=2), units.Attention(kv_heads=2)])
    assert {style for _, style in proposed(model, size=2).styles} == {"column", "row"}
    assert {style for _, style in proposed(model, size=4).styles} == {"column", "heads/2", "row"}
    assert {style for _, style in proposed(model, size=3).styles} == {"gather"}


@pytest.mark.parametrize(("size", "keys"), [(4, 2), (8, 4)])
def test_of_few_key_heads_their_number_and_repeats_are_counted(size: int, keys: int) -> None:
    """Of 8 queries and 2 keys a rank has 8 / size and one: so often is a key repeated."""
    model = units.Stack([units.CountedGroups(), units.CountedGroups()])
    assert {style for _, style in proposed(model, size=size).styles} == {
        "column",
        "heads/2",
        "row",
        "sizes/2(num_key_value_groups)",
        f"sizes/{keys}(num_key_value_heads)",
    }


def test_units_may_write_to_their_inputs() -> None:
    def layer() -> nn.Module:
        return nn.Sequential(nn.ReLU(inplace=True), nn.Linear(units.WIDTH, units.WIDTH))

    model = units.Stack([layer(), nn.ReLU(inplace=True), layer()])
    assert {style for _, style in proposed(model).styles} == {"gather"}


def test_blocks_that_fill_a_cache_are_split_like_any_other() -> None:
    results = {p.removeprefix("blocks.*."): s for p, s in proposed(units.CachingStack()).styles}
    assert results == HEADS


def test_a_unit_that_cannot_be_tried_is_left_whole_with_a_note() -> None:
    class WithHead(units.CachingStack):
        def __init__(self) -> None:
            super().__init__(units.LockedCache)
            self.head = nn.Linear(units.WIDTH, units.WIDTH)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            actual: torch.Tensor = self.head(super().forward(x))
            return actual

    actual = proposed(WithHead())
    assert dict(actual.styles) == {"head": "gather"}
    notes = {note.layer: str(note) for note in actual.notes}
    assert notes.keys() == {f"blocks.*.{name}" for name in HEADS}
    assert all(
        "whole, `blocks.0` cannot be tried alone: a LockedCache" in s for s in notes.values()
    )


def test_a_layer_that_two_blocks_hold_is_left_whole_and_others_are_split() -> None:
    first, second, third = (units.Attention() for _ in range(3))
    third.q = second.q
    actual = dict(proposed(units.Stack([first, second, third])).styles)
    assert "blocks.0.q" in actual
    assert not {"blocks.*.q", "blocks.1.q", "blocks.2.q"} & set(actual)


def test_a_model_without_a_layer_is_refused_with_the_reason() -> None:
    with pytest.raises(PlanError, match="no layer that tensor parallelism could split"):
        proposed(units.Stack([nn.LayerNorm(units.WIDTH), nn.LayerNorm(units.WIDTH)]))


def test_a_proposal_does_not_change_the_model() -> None:
    model = units.Stack([units.CountedHeads(), units.CountedHeads()])
    before = {name: value.clone() for name, value in model.state_dict().items()}
    hooks = [len(module._forward_hooks) for module in model.modules()]
    proposed(model)
    assert all(torch.equal(model.state_dict()[name], value) for name, value in before.items())
    assert [len(module._forward_hooks) for module in model.modules()] == hooks


PLANS = {
    "Llama": {
        "model.embed_tokens": "vocab",
        "model.layers.*.self_attn.q_proj": "column",
        "model.layers.*.self_attn.o_proj": "row",
        "model.layers.*.mlp.gate_proj": "column",
        "model.layers.*.mlp.up_proj": "column",
        "model.layers.*.mlp.down_proj": "row",
        "lm_head": "vocab",
    },
    "GPT-2": {
        "transformer.wte": "vocab",
        "transformer.h.*.attn.c_attn": "column/3",
        "transformer.h.*.attn.c_proj": "row",
        "transformer.h.*.mlp.c_fc": "column",
        "transformer.h.*.mlp.c_proj": "row",
        "lm_head": "vocab",
    },
    "OPT": {
        "model.decoder.layers.*.self_attn": "sizes(num_heads)",
        "model.decoder.layers.*.fc1": "column",
        "model.decoder.layers.*.fc2": "row",
    },
    "BLOOM": {
        "transformer.h.*.self_attention.query_key_value": "column",
        "transformer.h.*.self_attention.dense": "row",
        "transformer.h.*.mlp.dense_h_to_4h": "column",
    },
}
"""As Megatron and the models' authors split them."""


@pytest.mark.parametrize("name", PLANS)
def test_known_models_are_split_as_by_hand(name: str) -> None:
    pytest.importorskip("transformers")
    from tests import zoo

    build, sample = zoo.ARCHITECTURES[name]
    model = build()
    profile = capture(model, sample, name=name)
    actual = dict(propose_styles(model, sample, size=2, profile=profile).styles)
    assert {path: actual.get(path) for path in PLANS[name]} == PLANS[name]


@pytest.mark.parametrize("name", ["Mistral", *nightly("T5")])
def test_a_cache_does_not_change_the_proposal(name: str) -> None:
    """These hold tensors from the beginning, or are read in the middle of a forward."""
    pytest.importorskip("transformers")
    from tests import zoo

    def split(*, caches: bool) -> Proposal:
        build, sample = zoo.ARCHITECTURES[name]
        model = build()
        for module in model.modules():
            if hasattr(module, "config") and not caches:
                module.config.use_cache = False
        return propose_styles(model, sample, size=2, profile=capture(model, sample, name=name))

    assert split(caches=True) == split(caches=False)


class Counting(nn.Module):
    """Counts its calls in an attribute, and averages what it takes in a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(16, 64), nn.Linear(64, 16)
        self.turn = 0
        self.register_buffer("mean", torch.zeros(16))

    def forward(self, x: Tensor) -> Tensor:
        self.turn += 1
        self.mean = 0.9 * self.mean + 0.1 * x.detach().mean((0, 1))
        out: Tensor = x + self.down(self.up(x).relu())
        return out


class Branching(nn.Module):
    """Takes a branch by its values."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([Counting(), Counting()])

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x) if x.mean() > -9 else x
        return x


def test_a_real_run_leaves_attributes_and_buffers_as_they_were() -> None:
    model, sample = Branching(), (torch.randn(2, 8, 16) + 1,)
    profile = capture(model, sample)
    proposal = propose_styles(model, sample, size=2, profile=profile)
    assert {"column", "row"} <= set(dict(proposal.styles).values())
    for block in model.blocks:
        assert isinstance(block, Counting)
        assert block.turn == 0
        assert not block.mean.any()


class Acting(nn.Module):
    """Two layers and what is between them: a function, or its name."""

    def __init__(self, act: object) -> None:
        super().__init__()
        self.wide, self.back = nn.Linear(units.WIDTH, 64), nn.Linear(64, units.WIDTH)
        self.act = act

    def forward(self, x: Tensor) -> Tensor:
        act = self.act if callable(self.act) else {"relu": torch.relu, "mean": _centred}[self.act]
        out: Tensor = x + self.back(act(self.wide(x)))
        return out


def _centred(x: Tensor) -> Tensor:
    return x - x.mean(-1, keepdim=True)


def _scaled(x: Tensor) -> Tensor:
    return 2 * x


@pytest.mark.parametrize(
    ("one", "other"),
    [
        (_scaled, _centred),
        ("relu", "mean"),
        (torch.relu, functools.partial(torch.softmax, dim=-1)),
        (functools.partial(torch.softmax, dim=1), functools.partial(torch.softmax, dim=2)),
    ],
)
def test_blocks_that_differ_in_a_function_or_its_name_are_tried_apart(
    one: object, other: object
) -> None:
    model = units.Stack([Acting(one), Acting(other), Acting(one)])
    styles = {path: style for path, style in proposed(model).styles if path.endswith("wide")}
    assert styles == {
        "blocks.0.wide": "column",
        "blocks.1.wide": "gather",
        "blocks.2.wide": "column",
    }


MEANS: list[Tensor] = []
TOTAL = {"mean": torch.zeros((), dtype=torch.float64)}


class Leaving(nn.Module):
    """A block that leaves a mean for others beside what it returns."""

    def __init__(self, place: str, value: str) -> None:
        super().__init__()
        self.wide, self.back = nn.Linear(units.WIDTH, 64), nn.Linear(64, units.WIDTH)
        self._place, self._value = place, value

    def forward(self, x: Tensor, left: list[Tensor]) -> Tensor:
        part = torch.relu(self.wide(x))
        out: Tensor = self.back(part)
        mean = (part if self._value == "part" else out).abs().mean()
        if self._place == "tensor":
            TOTAL["mean"] += mean
        elif self._place != "attribute":
            (MEANS if self._place == "global" else left).append(mean)
        else:
            self.mean = mean
        return x + out


class Penalised(nn.Module):
    """Adds the means of its blocks, if `reads`."""

    def __init__(self, place: str, value: str, *, reads: bool = True) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Leaving(place, value) for _ in range(2))
        self.reads = reads

    def forward(self, x: Tensor) -> Tensor:
        left: list[Tensor] = []
        MEANS.clear()
        TOTAL["mean"] = x.new_zeros(())
        for block in self.blocks:
            x = block(x, left)
        if not self.reads:
            return x
        means = left or MEANS or [getattr(block, "mean", TOTAL["mean"]) for block in self.blocks]
        return x * (1 + torch.stack(means).sum())


@pytest.mark.parametrize("place", ["list", "attribute", "global"])
@pytest.mark.parametrize(("value", "styles"), [("part", {"gather"}), ("whole", {"column", "row"})])
def test_what_a_block_leaves_for_others_is_whole_too(
    place: str, value: str, styles: set[str]
) -> None:
    """Each rank would add the mean of its part: gradients were 56 to 78 % off."""
    assert set(dict(proposed(Penalised(place, value)).styles).values()) == styles


def test_a_block_that_adds_to_a_tensor_which_others_read_is_not_split() -> None:
    """Ranks of a trial share it."""
    with pytest.raises(PlanError, match="no layer that tensor parallelism could split"):
        proposed(Penalised("tensor", "part"))


def test_what_a_block_leaves_and_nobody_reads_may_be_a_part() -> None:
    styles = dict(proposed(Penalised("attribute", "part", reads=False)).styles)
    assert set(styles.values()) == {"column", "row"}
