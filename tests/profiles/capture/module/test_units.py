"""Units by hand-drawn models: which module is a block, which is opened, which stays whole."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from profiles.capture.capture import capture
from profiles.capture.module.units import find_units, owners
from profiles.model.profile import GLUE


class Block(nn.Module):
    def __init__(self, width: int = 4) -> None:
        super().__init__()
        self.inner = nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(x)


class Stage(nn.Module):
    """Blocks of its own, and a way down to the next width."""

    def __init__(self, width: int, depth: int = 2) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block(width) for _ in range(depth))
        self.down = nn.Linear(width, 2 * width)


class Experts(nn.Module):
    """A block that holds a list of equal modules itself."""

    def __init__(self) -> None:
        super().__init__()
        self.attention = Block()
        self.experts = nn.ModuleList(Block() for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        x = self.attention(x)
        outputs: Tensor = torch.stack([expert(x) for expert in self.experts]).sum(0)
        return outputs


class Model(nn.Module):
    def __init__(self, **children: nn.Module) -> None:
        super().__init__()
        for name, child in children.items():
            self.add_module(name, child)


def names(model: nn.Module) -> list[str]:
    """Unit names; blocks in brackets."""
    return [f"[{unit.name}]" if unit.is_block else unit.name for unit in find_units(model)]


def test_a_model_without_children_is_one_unit() -> None:
    assert names(nn.Linear(2, 2)) == [""]


def test_elements_of_a_list_are_blocks_and_the_rest_is_around_them() -> None:
    model = Model(
        embed=nn.Embedding(4, 4),
        body=Model(layers=nn.ModuleList([Block(), Block()])),
        head=Block(),
    )
    assert names(model) == ["embed", "[body.layers.0]", "[body.layers.1]", "head"]


def test_elements_without_children_or_of_one_kind_only_are_units_but_not_blocks() -> None:
    model = Model(stem=nn.Sequential(nn.Linear(4, 4), nn.ReLU(), Block()))
    assert names(model) == ["stem.0", "stem.1", "stem.2"]


def test_lists_of_plain_layers_inside_blocks_do_not_make_stages_of_them() -> None:
    def block(width: int) -> nn.Module:
        normed = (nn.Sequential(nn.Conv2d(width, width, 1), nn.BatchNorm2d(width)) for _ in "ab")
        block = Block(width)
        block.inner = nn.Sequential(*normed)
        return block

    model = Model(layers=nn.Sequential(block(2), block(4), block(4)))
    assert names(model) == ["[layers.0]", "[layers.1]", "[layers.2]"]


def test_experts_stay_inside_their_block() -> None:
    model = Model(layers=nn.ModuleList(Experts() for _ in range(4)))
    assert names(model) == [f"[layers.{i}]" for i in range(4)]


def test_stages_of_different_widths_are_split_into_their_blocks() -> None:
    model = Model(stages=nn.ModuleList([Stage(4), Stage(8, depth=3)]))
    assert names(model) == [
        "[stages.0.blocks.0]",
        "[stages.0.blocks.1]",
        "stages.0.down",
        *(f"[stages.1.blocks.{i}]" for i in range(3)),
        "stages.1.down",
    ]


def test_a_plain_sequence_of_layers_is_a_block_and_one_of_blocks_is_a_stage() -> None:
    flat = nn.Sequential(*(nn.Sequential(nn.Linear(4, 4), nn.ReLU()) for _ in range(2)))
    assert names(flat) == ["[0]", "[1]"]
    nested = nn.Sequential(nn.Sequential(Block(), Block()), nn.Sequential(Block(), Block()))
    assert names(nested) == ["[0.0]", "[0.1]", "[1.0]", "[1.1]"]


class MLP(Block):
    """Another class than the attention beside it."""


def test_what_nobody_calls_is_opened_and_its_parts_are_blocks_where_the_list_repeats_them() -> None:
    pairs = nn.ModuleList(nn.ModuleList([Block(), MLP()]) for _ in range(2))
    assert names(Model(layers=pairs)) == [
        "[layers.0.0]",
        "[layers.0.1]",
        "[layers.1.0]",
        "[layers.1.1]",
    ]
    parted = nn.ModuleList(Model(norm=nn.LayerNorm(4), mlp=MLP()) for _ in range(2))
    assert names(Model(layers=parted)) == [
        "layers.0.norm",
        "[layers.0.mlp]",
        "layers.1.norm",
        "[layers.1.mlp]",
    ]
    alone = nn.ModuleList([nn.ModuleDict({"attention": Block(), "mlp": MLP()}), Block()])
    assert names(Model(layers=alone)) == ["layers.0.attention", "layers.0.mlp", "layers.1"]


def test_a_module_registered_twice_is_one_unit() -> None:
    block = Block()
    model = Model(first=block, second=nn.ModuleList([block, Block(), Block()]))
    assert names(model) == ["first", "[second.1]", "[second.2]"]


def test_every_parameter_has_one_unit_and_those_between_units_are_glue() -> None:
    model = Model(body=Model(layers=nn.ModuleList([Block(), Block()])))
    model.body.position = nn.Parameter(torch.zeros(4))
    owner_of = owners(model, find_units(model))
    assert {owner_of[id(m)] for m in model.modules()} == {"body.layers.0", "body.layers.1", GLUE}
    assert owner_of[id(model.body)] == GLUE


def test_calls_within_calls_belong_to_the_inner_unit() -> None:
    class Calling(Block):
        def forward(self, x: Tensor) -> Tensor:
            return self.inner(self.borrowed(x))

    class Outer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.helper = nn.Linear(4, 4)
            self.blocks = nn.ModuleList([Calling(), Calling()])
            for block in self.blocks:
                block.__dict__["borrowed"] = self.helper  # called, but not a child

        def forward(self, x: Tensor) -> Tensor:
            for block in self.blocks:
                x = block(x)
            return x

    profile = capture(Outer(), torch.randn(3, 4))
    costs = {unit.name: next(iter(unit.costs.values())) for unit in profile.units}
    one = 2 * 3 * 4 * 4
    assert costs["helper"].forward_flop.at(3) == 2 * one
    assert costs["blocks.0"].forward_flop.at(3) == costs["blocks.1"].forward_flop.at(3) == one
