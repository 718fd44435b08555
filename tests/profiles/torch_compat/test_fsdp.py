"""FSDP2's ways with unused parameters and broken-off steps, the same on every torch."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard

from profiles.torch_compat.fsdp import (
    forget_step_underway,
    note_used,
    reduce_now,
    reduce_unused_parameters,
    watch_reductions,
)
from tests.workers import Pool


class Forked(nn.Module):
    """Two layers, of which a rank uses its own one."""

    def __init__(self) -> None:
        super().__init__()
        self.ways = nn.ModuleList([nn.Linear(2, 2), nn.Linear(2, 2)])
        self.fails = False

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.ways[dist.get_rank()](x).sum()
        if self.fails:
            raise KeyError
        return out


def _gradients(root: nn.Module) -> list[float]:
    """Every weight's gradient is the same number in all places; None is -1."""
    return [
        -1.0 if p.grad is None else p.grad.full_tensor().mean().item()  # type: ignore[attr-defined]
        for p in root.parameters()
    ]


def _unused_on_a_rank() -> list[float]:
    root = fully_shard(Forked())
    reduce_unused_parameters(root)
    root(torch.ones(1, 2)).backward()
    return _gradients(root)


@pytest.mark.dist
def test_unused_parameters_of_a_rank_count_as_zero(pool: Pool) -> None:
    # d(sum of outputs)/dw = 1 on the rank that uses it, 0 on the other: the mean is 1/2.
    assert pool.run(_unused_on_a_rank, world_size=2) == [[0.5] * 4] * 2


def _broken_off() -> list[list[float]]:
    """A backward that leaves its gradients whole, a forward that fails, then forgetting both."""
    root = fully_shard(Forked())
    reduce_unused_parameters(root)
    results = []
    for forgets in (False, True):
        root.zero_grad()
        root.set_requires_gradient_sync(False)
        root(torch.ones(1, 2)).backward()
        if forgets:
            root.fails = True
            with pytest.raises(KeyError):
                root(torch.ones(1, 2))
            root.fails = False
            forget_step_underway(root)
        root.set_requires_gradient_sync(True)
        root(torch.ones(1, 2)).backward()
        results.append(_gradients(root))
    return results


@pytest.mark.dist
def test_a_step_underway_is_forgotten(pool: Pool) -> None:
    for added, forgotten in pool.run(_broken_off, world_size=2):
        assert added == [1.0] * 4  # two backwards of 1/2
        assert forgotten == [0.5] * 4


def _reduced_late() -> tuple[list[float], list[float]]:
    """Two backwards that leave gradients whole, then one reduction of both."""
    root = fully_shard(Forked())
    reduce_unused_parameters(root)
    root.set_requires_gradient_sync(False)
    for _ in range(2):
        root(torch.ones(1, 2)).backward()
    before = _gradients(root)
    root.set_requires_gradient_sync(True)
    reduce_now(root)
    root.reshard()
    return before, _gradients(root)


@pytest.mark.dist
def test_whole_gradients_are_reduced_when_asked_for(pool: Pool) -> None:
    for before, after in pool.run(_reduced_late, world_size=2):
        assert before == [-1.0] * 4  # none on the shards
        assert after == [1.0] * 4  # two backwards of 1/2


def _watched() -> list[list[float]]:
    """Inputs of the reduce-scatter of a layer whose every gradient is the rank plus one."""
    root = fully_shard(nn.Linear(2, 2, bias=False))
    heard: list[list[float]] = []
    watch_reductions(root, lambda gradients: heard.append(gradients.tolist()))
    (root(torch.ones(1, 2)).sum() * (dist.get_rank() + 1)).backward()
    return [*heard, _gradients(root)]


@pytest.mark.dist
def test_watched_reductions_are_still_done(pool: Pool) -> None:
    assert pool.run(_watched, world_size=2) == [[[1.0] * 4, [1.5]], [[2.0] * 4, [1.5]]]


def _noted_where_gradients_are_zero() -> tuple[int, list[float]]:
    """Uses of this rank's layer, whose weight has a gradient of zeros."""
    root, used = fully_shard(Forked()), list[nn.Parameter]()
    reduce_unused_parameters(root)
    note_used(root, used.append)
    root(torch.zeros(1, 2)).backward()
    own = {id(p) for p in root.ways[dist.get_rank()].parameters()}  # type: ignore[union-attr]
    return sum(id(p) in own for p in used), _gradients(root)


@pytest.mark.dist
def test_a_gradient_of_zeros_is_one(pool: Pool) -> None:
    for used, gradients in pool.run(_noted_where_gradients_are_zero, world_size=2):
        assert used == 2
        assert gradients == [0.0, 0.5, 0.0, 0.5]  # of weights and biases
