"""The loss from split logits beside torch's own from whole ones."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from engines.blocks.logits import whole_tensors
from engines.state.slices import Slice
from engines.tensor.collectives import GroupCollectives
from engines.tensor.logits import VocabLogits
from tests.workers import Pool

VOCABULARY = 11  # odd: the last of four ranks has less


def shifted(logits: Tensor, target: Tensor) -> Tensor:
    """As transformers' causal models compute it."""
    logits, target = logits[..., :-1, :].float().contiguous(), target[:, 1:]
    return F.cross_entropy(logits.view(-1, VOCABULARY), target.reshape(-1), ignore_index=-100)


def capped(logits: Tensor, target: Tensor) -> Tensor:
    """Gemma's: between two bounds."""
    return nn.CrossEntropyLoss()((torch.tanh(logits / 3.0) * 3.0).flatten(0, 1), target.flatten())


def summed(logits: Tensor, target: Tensor) -> Tensor:
    return F.cross_entropy(logits.reshape(-1, VOCABULARY), target.flatten(), reduction="sum")


def by_token(logits: Tensor, target: Tensor) -> Tensor:
    losses = F.cross_entropy(logits.flatten(0, 1), target.flatten(), reduction="none")
    return (losses * torch.arange(len(losses))).sum()


def smoothed(logits: Tensor, target: Tensor) -> Tensor:
    return F.cross_entropy(logits.flatten(0, 1), target.flatten(), label_smoothing=0.1)


WEIGHT = torch.arange(1.0, VOCABULARY + 1) / VOCABULARY


def weighted(logits: Tensor, target: Tensor) -> Tensor:
    return F.cross_entropy(logits.flatten(0, 1), target.flatten(), weight=WEIGHT)


def weighted_and_smoothed(logits: Tensor, target: Tensor) -> Tensor:
    loss_fn = nn.CrossEntropyLoss(weight=WEIGHT, label_smoothing=0.3, reduction="none")
    losses = loss_fn(logits.flatten(0, 1), target.flatten())
    return (losses * torch.arange(len(losses))).sum() + loss_fn(
        logits[0], target[0].clamp(min=0)
    ).mean()


def of_shares(logits: Tensor, target: Tensor) -> Tensor:
    """Targets are shares of the classes. Not computed from parts."""
    shares = F.one_hot(target.clamp(min=0), VOCABULARY).float().flatten(0, 1)
    return F.cross_entropy(logits.flatten(0, 1), shares)


def classes_second(logits: Tensor, target: Tensor) -> Tensor:
    return F.cross_entropy(logits.transpose(1, 2), target)


def turned(logits: Tensor, target: Tensor) -> Tensor:
    """Two dimensions of places, and a loss for each."""
    logits = logits.view(2, 1, 5, VOCABULARY).permute(0, 3, 1, 2) / 2.0
    losses = F.cross_entropy(logits, target[:, None], reduction="none")
    return (losses * torch.arange(5.0)).sum()


def moved(logits: Tensor, target: Tensor) -> Tensor:
    return F.cross_entropy(
        torch.movedim(logits, -1, destination=1).float(), target, reduction="sum"
    )


def not_moved(logits: Tensor, target: Tensor) -> Tensor:
    """Classes go to the first dimension, which is that of rows."""
    return F.cross_entropy(logits.transpose(0, 2).flatten(1).t(), target.t().flatten())


def turned_back(logits: Tensor, target: Tensor) -> Tensor:
    """By the transposed view, whose second dimension are places: no classes."""
    return -logits.mT.log_softmax(1).mT.gather(-1, target.clamp(min=0)[..., None]).mean()


def turned_twice(logits: Tensor, target: Tensor) -> Tensor:
    logits = logits.transpose(1, 2).transpose(1, 2)
    return F.cross_entropy(logits.reshape(-1, VOCABULARY), target.flatten())


def by_hand(logits: Tensor, target: Tensor) -> Tensor:
    return -logits.log_softmax(-1).gather(-1, target.clamp(min=0)[..., None]).mean()


LOSSES: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    f.__name__: f
    for f in (shifted, capped, summed, by_token, smoothed, weighted,
              weighted_and_smoothed, of_shares, classes_second, turned, moved, not_moved,
              turned_back, turned_twice, by_hand)
}  # fmt: skip


def losses(names: list[str]) -> dict[str, tuple[float, float, bool]]:
    """Differences of loss and gradient of the hidden values, and whether logits were gathered."""
    ranks, results = GroupCollectives(None), {}
    for name in names:
        torch.manual_seed(0)
        hidden, weight = torch.randn(2, 5, 6), torch.randn(VOCABULARY, 6)
        target = torch.randint(VOCABULARY, (2, 5))
        target[0, 3] = -100
        whole = hidden.clone().requires_grad_()
        wanted = LOSSES[name](F.linear(whole, weight), target)
        wanted.backward()  # type: ignore[no-untyped-call]
        split = hidden.clone().requires_grad_()
        part = Slice(0).part(weight, rank=ranks.rank, size=ranks.size)
        logits = VocabLogits.of(F.linear(ranks.copy(split), part), ranks, length=VOCABULARY)
        assert logits.shape == (2, 5, VOCABULARY)
        gathers: list[int] = []
        logits.collectives = _Counting(ranks, gathers)
        loss = LOSSES[name](logits, target)
        loss.backward()  # type: ignore[no-untyped-call]
        assert whole.grad is not None
        assert split.grad is not None
        difference = (split.grad - whole.grad).abs().max() / whole.grad.abs().max()
        error = abs(loss.item() - wanted.item()) / abs(wanted.item())
        results[name] = error, difference.item(), bool(gathers)
        assert torch.allclose(whole_tensors({"logits": logits})["logits"], F.linear(hidden, weight))
    return results


class _Counting(GroupCollectives):
    def __init__(self, ranks: GroupCollectives, gathers: list[int]) -> None:
        super().__init__(ranks.group)
        self._gathers = gathers

    def gather(self, part: Tensor, cut: Slice, *, length: int) -> Tensor:
        self._gathers.append(length)
        return super().gather(part, cut, length=length)


@pytest.mark.dist
@pytest.mark.parametrize("size", [2, 4])
def test_every_loss_and_its_gradient_are_those_of_whole_logits(pool: Pool, size: int) -> None:
    for result in pool.run(losses, list(LOSSES), world_size=size):
        for name, (loss, gradient, _) in result.items():
            assert loss < 1e-6, name
            assert gradient < 1e-5, name


@pytest.mark.dist
def test_usual_losses_are_computed_without_whole_logits(pool: Pool) -> None:
    (actual, _) = pool.run(losses, list(LOSSES), world_size=2)
    gathered = {name for name, (_, _, is_gathered) in actual.items() if is_gathered}
    assert gathered == {"of_shares", "not_moved", "turned_back", "turned_twice", "by_hand"}
