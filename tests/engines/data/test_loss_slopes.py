"""Losses of parts that make up that of the whole, and gradients that do not."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from tests.engines.data.test_loss_parts import (
    Loss,
    by_rows,
    losses,
    over_a_mask,
    seen,
)


def balanced(logits: Tensor, target: dict[str, Tensor]) -> Tensor:
    loss, penalty = by_rows(logits, target), logits.square().mean()
    return loss + penalty * (loss.detach() / penalty.detach())


def of_size_one(logits: Tensor, target: dict[str, Tensor]) -> Tensor:
    loss = over_a_mask(logits, target)
    return loss / loss.detach()


def focal(logits: Tensor, target: dict[str, Tensor]) -> Tensor:
    each = losses(logits, target)
    return (each * (1 - torch.exp(-each.detach()))).sum() / target["mask"].sum()


@pytest.mark.parametrize("loss_fn", [balanced, of_size_one])
def test_detached_factors_of_all_rows_are_seen_in_gradients_alone(loss_fn: Loss) -> None:
    doubt = seen(loss_fn).doubt
    assert "the losses of 3 and 5 rows of the sample make up that of all of them" in doubt
    assert "their gradients do not" in doubt


def test_a_detached_factor_of_a_row_is_none_of_all() -> None:
    assert seen(focal) == seen(over_a_mask)
