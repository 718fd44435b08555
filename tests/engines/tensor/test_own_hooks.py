"""Hooks of a user's own on layers that are split, and inside of them."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from engines.apply import apply_plan
from engines.plan import Plan
from engines.tensor.own_hooks import OwnHooks, hooked_part
from engines.tensor.styles import Style
from profiles.capture.capture import capture
from tests.engines.cases import cpu_ranks
from tests.engines.parity import sgd
from tests.engines.tensor.test_proposal import proposed
from tests.engines.tensor.units import WIDTH
from tests.workers import Pool

seen: list[Tensor] = []


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.act = nn.LayerNorm(WIDTH), nn.GELU()
        self.wide, self.back = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = x + self.back(self.act(self.wide(self.norm(x))))
        return out


def blocks() -> nn.Sequential:
    torch.manual_seed(1)
    return nn.Sequential(Block(), Block(), Block())


STYLES = {
    f"{number}.{layer}": (Style.parse(style),)
    for number in range(3)
    for layer, style in (("wide", "column"), ("back", "row"))
}


def divide_by_norm(module: nn.Module, args: Any, output: Tensor) -> Tensor:
    return output / (output.pow(2).mean(-1, keepdim=True) + 1).sqrt()


def keep(module: nn.Module, args: Any, output: Tensor) -> None:
    seen.append(output)


def look(*_: object) -> None:
    pass


@pytest.mark.parametrize(
    ("path", "register", "is_seen"),
    [
        ("1.wide", nn.Module.register_forward_hook, True),
        ("1.wide", nn.Module.register_forward_pre_hook, False),
        ("1.wide", nn.Module.register_full_backward_hook, True),
        ("1.act", nn.Module.register_forward_hook, True),
        ("1.act", nn.Module.register_full_backward_pre_hook, True),
        ("1.back", nn.Module.register_forward_hook, False),
        ("1.back", nn.Module.register_forward_pre_hook, True),
        ("1.norm", nn.Module.register_forward_hook, False),
        ("1", nn.Module.register_forward_hook, False),
        ("", nn.Module.register_forward_pre_hook, False),
    ],
)
def test_hooks_between_a_column_and_its_row_see_parts(
    path: str, register: Callable[..., object], is_seen: bool
) -> None:
    model = blocks()
    assert hooked_part(model, STYLES) is None
    register(model.get_submodule(path), look)
    assert hooked_part(model, STYLES) == (path if is_seen else None)


@pytest.mark.parametrize(
    ("path", "register", "is_seen"),
    [
        ("up", nn.Module.register_forward_hook, True),
        ("up", nn.Module.register_forward_pre_hook, False),
        ("down", nn.Module.register_forward_hook, False),
        ("down", nn.Module.register_forward_pre_hook, True),
    ],
)
def test_hooks_of_a_module_with_one_half_of_a_pair_see_parts_on_its_inner_side(
    path: str, register: Callable[..., object], is_seen: bool
) -> None:
    up = nn.Sequential(nn.Linear(WIDTH, 4 * WIDTH), nn.GELU())
    down = nn.Sequential(nn.Linear(4 * WIDTH, WIDTH))
    model = nn.ModuleDict({"up": up, "down": down})
    register(model[path], look)
    styles = {"up.0": (Style.parse("column"),), "down.0": (Style.parse("row"),)}
    assert hooked_part(model, styles) == (path if is_seen else None)


def test_in_a_block_that_is_split_by_tokens_every_hook_sees_parts() -> None:
    model = blocks()
    model.get_submodule("0.norm").register_forward_hook(look)
    by_tokens = {**STYLES, "0": tuple(map(Style.parse, ("sequence", "entry", "exit")))}
    assert hooked_part(model, by_tokens) == "0.norm"


@pytest.mark.parametrize("hook", [divide_by_norm, keep])
@pytest.mark.parametrize(("path", "wide"), [("1.act", "gather"), ("1.wide", None)])
def test_the_pair_around_a_hook_is_left_whole_and_others_are_split(
    path: str, wide: str | None, hook: Callable[..., Any]
) -> None:
    model = blocks()
    model.get_submodule(path).register_forward_hook(hook)
    proposal = proposed(model)
    seen.clear()
    of = {name: style for name, style in proposal.styles if name.endswith("wide")}
    assert (of["0.wide"], of.get("1.wide"), of["2.wide"]) == ("column", wide, "column")
    assert any("has a hook, which would see a rank's part" in str(n) for n in proposal.notes)


def test_a_hook_that_is_added_to_a_split_layer_is_warned_of_once() -> None:
    model = blocks()
    hooks = OwnHooks(model, STYLES, of_tokens=False, warns=True)
    hooks.warn()
    model.get_submodule("0.norm").register_forward_hook(look)
    hooks.warn()
    model.get_submodule("2.act").register_forward_hook(look)
    with pytest.warns(UserWarning, match=r"`2\.act` has a hook that sees this rank's part"):
        hooks.warn()
    hooks.warn()


def test_where_sequences_are_split_every_hook_that_is_added_is_warned_of() -> None:
    model = blocks()
    hooks = OwnHooks(model, {}, of_tokens=True, warns=True)
    model.register_forward_hook(look)
    with pytest.warns(UserWarning, match="sequences are split over the cp axis"):
        hooks.warn()


def with_penalty(output: Tensor, target: Tensor) -> Tensor:
    return (output - target).pow(2).mean() + seen.pop().pow(2).mean()


def of_seen(path: str) -> dict[str, float]:
    """Largest differences of the parameters after a step whose loss takes what a hook saw."""
    model, batch = blocks(), torch.randn(2, 2, 6, WIDTH, generator=torch.Generator().manual_seed(2))
    x, y = batch
    reference = copy.deepcopy(model)
    model.get_submodule(path).register_forward_hook(keep)
    proposal = proposed(model)
    seen.clear()
    parallel = apply_plan(
        model,
        Plan(tp=2, tensor_styles=proposal.styles),
        profile=capture(model, x, name="blocks"),
        cluster=cpu_ranks(2),
        loss_fn=with_penalty,
        sample=(x, y),
        optimizer=sgd,
    )
    seen.clear()
    parallel.train_step((x, y))
    seen.clear()
    reference.get_submodule(path).register_forward_hook(keep)
    optimizer = sgd(list(reference.parameters()))
    with_penalty(reference(x), y).backward()
    optimizer.step()
    after = parallel.state_dict()
    return {n: (after[n] - v).abs().max().item() for n, v in reference.state_dict().items()}


@pytest.mark.dist
def test_a_loss_of_what_a_hook_kept_is_that_of_one_process(pool: Pool) -> None:
    for difference in pool.run(of_seen, "1.act", world_size=2):
        assert max(difference.values()) < 1e-6
