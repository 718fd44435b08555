"""Weights of the ranks' losses, where a loss counts some of its targets."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from engines.context.input_sharding import InputSharding
from engines.context.proof import prove
from engines.data.loss_rule import LossParts
from engines.plan import Plan
from profiles.errors import PlanError
from profiles.model.loss_terms import LossTerms
from tests.engines.cases import Case, TinyGPT
from tests.engines.parity import gradient_error, local_rows, reference_loss, relative, spread
from tests.workers import Pool

TOLERANCE = 1e-5


def over_nonzero(logits: Tensor, targets: Tensor) -> Tensor:
    is_counted = targets != 0
    each = F.cross_entropy(logits.flatten(0, 1), targets.flatten(), reduction="none")
    return (each * is_counted.flatten()).sum() / is_counted.sum()


def weights_of_classes(logits: Tensor, targets: Tensor) -> Tensor:
    weights = torch.arange(1.0, 62.0)
    return F.cross_entropy(logits.flatten(0, 1), targets.flatten(), weight=weights, ignore_index=0)


def sum_of_all(logits: Tensor, targets: Tensor) -> Tensor:
    return F.cross_entropy(logits.flatten(0, 1), targets.flatten(), reduction="sum")


def by_rows(logits: Tensor, targets: Tensor) -> Tensor:
    each = F.cross_entropy(logits.transpose(1, 2), targets, reduction="none", ignore_index=0)
    return (each.sum(1) / (targets != 0).sum(1)).mean()


LOSSES = [over_nonzero, weights_of_classes, sum_of_all]


def masked_error(loss_fn: Callable[[Tensor, Tensor], Tensor], plan: str) -> float:
    """Differences from one process where targets are padded and those of the sample were not."""
    case = Case(TinyGPT, positive_tokens, loss_fn)
    reference, parallel = spread(case, plan, rows=4)
    ids, targets = positive_tokens(4)
    batch = ids, targets.where(torch.arange(12) < torch.tensor([[12], [5], [9], [3]]), 0)
    wanted = reference_loss(reference, case, batch)
    wanted.backward()  # type: ignore[no-untyped-call]
    loss = parallel.forward_backward(local_rows(parallel, batch, 4))
    return max(relative(loss, wanted.detach()), gradient_error(parallel, reference))


def positive_tokens(rows: int) -> tuple[Tensor, Tensor]:
    made = torch.Generator().manual_seed(rows)
    ids = torch.randint(1, 61, (rows, 13), generator=made)
    return ids[:, :-1].contiguous(), ids[:, 1:].contiguous()


@pytest.mark.dist
@pytest.mark.parametrize("plan", ["cp=2", "dp_shard=2 cp=2 accumulation=2"])
@pytest.mark.parametrize("loss_fn", LOSSES)
def test_a_rank_weighs_as_much_as_what_its_loss_counts(
    pool: Pool, loss_fn: Callable[[Tensor, Tensor], Tensor], plan: str
) -> None:
    ranks = Plan.parse(plan).world_size
    assert max(pool.run(masked_error, loss_fn, plan, world_size=ranks)) < TOLERANCE


def test_a_loss_that_tokens_make_up_by_no_rule_is_refused_with_what_shows_it() -> None:
    """Without padding the mean of rows is one of tokens."""
    proof = prove(TinyGPT(), positive_tokens(2), by_rows, size=2)
    ids, targets = positive_tokens(2)
    assert not proof.loss.doubt_of((ids, targets))
    padded = targets.where(torch.arange(12) < torch.tensor([[12], [5]]), 0)
    assert "with 0 in `element 1` the loss" in proof.loss.doubt_of((ids, padded))
    with pytest.raises(PlanError, match="the losses of the tokens of 2 ranks are"):
        prove(TinyGPT(), (ids[:, :8], padded[:, :8]), by_rows, size=2)


@pytest.mark.parametrize(("second", "shares"), [(0, [0.0, 0.0]), (3, [0.5, 0.5])])
def test_a_batch_without_a_target_that_counts_weighs_nothing(
    second: int, shares: list[float]
) -> None:
    """Means of nothing are for the model's own loss to define."""
    way = InputSharding(
        gives_positions=False, gives_mask=False, shifts_labels=False, has_target=True
    )
    rule = LossParts(terms=LossTerms(name="element 1", ignored=0))
    batch = torch.ones(2, 8, dtype=torch.long), torch.full((2, 8), second)
    assert way.shares(batch, rule, size=2).tolist() == shares
