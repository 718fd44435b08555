"""What a split leaves on a rank, and what it does not."""

from __future__ import annotations

import weakref

import pytest
import torch
from torch import Tensor

from engines.tensor.slices import Slice
from engines.tensor.split import split
from engines.tensor.styles import Style
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

    split_tokens = join_tokens = reduce_tokens = reduce


STYLES = {"q": "column", "k": "column", "v": "column", "o": "row"}


def halved(unit: units.Attention) -> Alone:
    exchange = Alone()
    split(unit, {path: (Style.parse(text),) for path, text in STYLES.items()}, exchange)
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


@pytest.mark.parametrize("fails", [False, True])
def test_nothing_of_a_forward_is_kept_when_it_is_over(fails: bool) -> None:
    unit = units.Attention()
    exchange = halved(unit)
    if fails:
        unit.o.register_forward_pre_hook(lambda *_: 1 / 0)
    try:
        unit(torch.randn(2, 8, units.WIDTH).requires_grad_())
    except ZeroDivisionError:
        assert fails
    assert [made() for made in exchange.copied] == [None]
