"""The parts of a model on a rank after a split."""

from __future__ import annotations

import contextlib
import inspect
import weakref

import pytest
import torch
from torch import Tensor, nn

from engines.blocks.recompute import recompute_blocks, recomputed
from engines.plan import Plan, Recompute
from engines.state.slices import Slice
from engines.tensor.split import split
from engines.tensor.styles import Style
from profiles.capture.capture import capture
from tests.engines.tensor import units


class Alone:
    """The exchange of rank 0 of 2 that nobody answers; it counts."""

    rank, size = 0, 2

    def __init__(self) -> None:
        self.copied: list[weakref.ref[Tensor]] = []

    def copy(self, whole: Tensor) -> Tensor:
        made = whole.clone()
        self.copied.append(weakref.ref(made))
        return made

    def reduce(self, partial: Tensor) -> Tensor:
        return partial

    def gather(self, part: Tensor, cut: Slice, *, length: int) -> Tensor:
        raise NotImplementedError

    def scatter(self, whole: Tensor, cut: Slice) -> Tensor:
        raise NotImplementedError

    split_tokens = gather_tokens = join_tokens = reduce_tokens = reduce


class End(BaseException):
    """The exception that ends a stage's forward."""


STYLES = {"q": "column", "k": "column", "v": "column", "o": "row"}


def halved(unit: nn.Module, prefix: str = "") -> Alone:
    exchange = Alone()
    split(unit, {prefix + path: (Style.parse(text),) for path, text in STYLES.items()}, exchange)
    return exchange


def test_a_rank_keeps_half_of_every_split_weight_and_the_whole_bias_of_rows() -> None:
    unit = units.Attention()
    parameters = dict(unit.named_parameters())
    halved(unit)
    shapes = {name: tuple(p.shape) for name, p in unit.named_parameters()}
    assert shapes["q.weight"] == (16, 32)
    assert shapes["q.bias"] == (16,)
    assert shapes["o.weight"] == (32, 16)
    assert shapes["o.bias"] == (32,)
    assert all(p is parameters[name] for name, p in unit.named_parameters())
    assert all(p.untyped_storage().nbytes() == p.nbytes for p in unit.parameters())


def test_query_key_and_value_share_one_exchange() -> None:
    unit = units.Attention()
    exchange = halved(unit)
    unit(torch.randn(2, 8, units.WIDTH))
    assert len(exchange.copied) == 1


@pytest.mark.parametrize("error", [None, ZeroDivisionError, End])
def test_a_finished_forward_leaves_no_references(error: type[BaseException] | None) -> None:
    unit = units.Attention()
    exchange = halved(unit)

    def fail(*_: object) -> None:
        if error is not None:
            raise error

    unit.o.register_forward_pre_hook(fail)
    with contextlib.suppress(ZeroDivisionError, End):
        unit(torch.randn(2, 8, units.WIDTH).requires_grad_())
    assert [made() for made in exchange.copied] == [None]


def test_a_forward_that_ends_with_its_stage_leaves_no_references() -> None:
    model = units.Stack([units.Attention(), nn.Identity()])
    exchange = halved(model, "blocks.0.")

    def end(*_: object) -> None:
        raise End

    model.blocks[1].register_forward_pre_hook(end)
    with contextlib.suppress(End):
        model(torch.randn(2, 8, units.WIDTH).requires_grad_())
    assert [made() for made in exchange.copied] == [None]


def test_a_recomputed_block_leaves_no_references() -> None:
    model = units.Stack([units.Attention(), units.Attention()])
    exchange = halved(model, "blocks.1.")
    profile = capture(model, torch.randn(2, 8, units.WIDTH))
    exchange.copied.clear()
    plan = Plan(recompute=Recompute.FULL)
    recompute_blocks(model, recomputed(plan, profile), plan)
    loss = model(torch.randn(2, 8, units.WIDTH)).sum()
    loss.backward()
    assert [made() for made in exchange.copied] == [None, None]  # one for each run, not for q, k, v


def test_a_split_model_keeps_the_names_of_its_arguments() -> None:
    unit = units.Attention()
    halved(unit)
    assert list(inspect.signature(unit.forward).parameters) == ["x"]
