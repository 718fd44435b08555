"""The targets that a loss is a mean over are seen without values."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from profiles.capture.capture import capture
from profiles.model.profile import LossTerms

IDS = torch.randint(0, 9, (2, 6), generator=torch.Generator().manual_seed(0))


class Tokens(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(9, 4), nn.Linear(4, 9)

    def forward(self, ids: Tensor) -> Tensor:
        logits: Tensor = self.head(self.embed(ids))
        return logits


def shifted_by_slices(logits: Tensor, labels: Tensor) -> Tensor:
    return F.cross_entropy(logits[:, :-1].reshape(-1, 9), labels[:, 1:].reshape(-1))


def shifted_by_padding(logits: Tensor, labels: Tensor) -> Tensor:
    after = F.pad(labels, (0, 1), value=-100)[..., 1:].contiguous()
    return F.cross_entropy(logits.view(-1, 9).float(), after.view(-1).to(logits.device))


def of_log_probabilities(logits: Tensor, labels: Tensor) -> Tensor:
    return F.nll_loss(logits.flatten(0, 1).log_softmax(-1), labels.flatten(), ignore_index=0)


def masked(logits: Tensor, labels: Tensor) -> Tensor:
    return F.cross_entropy(logits.flatten(0, 1), labels.masked_fill(labels == 0, -100).flatten())


def summed(logits: Tensor, labels: Tensor) -> Tensor:
    return F.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="sum")


def of_two(logits: Tensor, labels: Tensor) -> Tensor:
    shifted = shifted_by_slices(logits, labels)
    return shifted + F.cross_entropy(logits.flatten(0, 1), labels.flatten())


def of_squares(logits: Tensor, labels: Tensor) -> Tensor:
    return F.mse_loss(logits.mean(-1), labels.float())


PLAIN = nn.CrossEntropyLoss(ignore_index=3)


@pytest.mark.parametrize(
    ("loss_fn", "terms"),
    [
        (shifted_by_slices, LossTerms(name="element 1", skipped=1)),
        (shifted_by_padding, LossTerms(name="element 1", skipped=1)),
        (of_log_probabilities, LossTerms(name="element 1", ignored=0)),
        (lambda o, t: PLAIN(o.flatten(0, 1), t.flatten()), LossTerms(name="element 1", ignored=3)),
        (masked, None),
        (summed, None),
        (of_two, None),
        (of_squares, None),
    ],
)
def test_targets_of_a_loss(loss_fn: Callable[..., Tensor], terms: LossTerms | None) -> None:
    assert capture(Tokens(), (IDS, IDS.clone()), loss_fn=loss_fn).loss_terms == terms


def test_an_ignored_value_is_none_of_the_numbers_of_many_targets() -> None:
    ids = torch.randint(0, 9, (4, 100), generator=torch.Generator().manual_seed(0))

    def loss(logits: Tensor, labels: Tensor) -> Tensor:
        return F.cross_entropy(logits.flatten(0, 1), labels.flatten(), ignore_index=255)

    # Elements of the target alone are numbered from the first: the batch has no other integers.
    features = nn.functional.one_hot(ids, 9).float()
    terms = capture(nn.Linear(9, 9), (features, ids), loss_fn=loss).loss_terms
    assert terms == LossTerms(name="element 1", ignored=255)


def test_probabilities_of_classes_are_no_targets_to_count() -> None:
    def loss(logits: Tensor, wanted: Tensor) -> Tensor:
        return F.cross_entropy(logits.flatten(0, 1), wanted.flatten(0, 1))

    assert capture(Tokens(), (IDS, torch.full((2, 6, 9), 1 / 9)), loss_fn=loss).loss_terms is None


@pytest.mark.parametrize(("name", "skipped"), [("gpt2", 1), ("llama", 1), ("bert", 0), ("t5", 0)])
def test_losses_inside_of_transformers(name: str, skipped: int) -> None:
    pytest.importorskip("transformers")
    from tests import zoo

    torch.manual_seed(0)
    model: Any = getattr(zoo, name)()
    terms = capture(model, zoo.TOKENS).loss_terms
    assert terms == LossTerms(name="labels", skipped=skipped)


def capped(logits: Tensor, labels: Tensor) -> Tensor:
    """With an accuracy beside it, which wants no gradient."""
    (logits.detach().argmax(-1) == labels).float().mean()
    bounded = 3.0 * torch.tanh(logits / 3.0)
    return F.cross_entropy(bounded.view(-1, 9), labels.view(-1), label_smoothing=0.1)


def with_entropy(logits: Tensor, labels: Tensor) -> Tensor:
    return capped(logits, labels) + 1e-4 * logits.logsumexp(-1).square().mean()


def classes_second(logits: Tensor, labels: Tensor) -> Tensor:
    return F.cross_entropy(logits.mT.float(), labels)


def rows_second(logits: Tensor, labels: Tensor) -> Tensor:
    return F.cross_entropy(logits.transpose(0, 1).flatten(0, 1), labels.t().flatten())


@pytest.mark.parametrize(
    ("loss_fn", "reader"),
    [
        (shifted_by_slices, ""),
        (shifted_by_padding, ""),
        (summed, ""),
        (of_two, ""),
        (capped, ""),
        (classes_second, ""),
        (rows_second, "transpose"),
        (of_log_probabilities, "log_softmax"),
        (of_squares, "mean"),
        (with_entropy, "logsumexp"),
    ],
)
def test_who_else_reads_the_logits_is_named(
    loss_fn: Callable[[Tensor, Tensor], Tensor], reader: str
) -> None:
    assert capture(Tokens(), (IDS, IDS.clone()), loss_fn=loss_fn).logits_read_by == reader
