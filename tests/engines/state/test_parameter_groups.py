"""Parameter groups of a factory are those of the whole model, whatever part a rank holds."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import nn

from tests.engines.parity import local_rows, parallelize, reference_loss, state_error
from tests.workers import Pool

SPLIT = "tp=2 tensor_styles=embed:vocab,head:vocab"
STAGES = "pp=2 schedule=1f1b microbatches=2 stages=blocks.1"
VOCABULARY = 61


def by_place(parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
    """Rates decay from one parameter to the next."""
    groups = [{"params": [p], "lr": 0.1 * 0.9**n} for n, p in enumerate(parameters)]
    return torch.optim.SGD(groups, momentum=0.9)


def by_size(parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
    """Tables apart from the rest, and groups without a parameter left out."""
    tables = [p for p in parameters if p.shape[0] == VOCABULARY]
    others = [p for p in parameters if p.shape[0] != VOCABULARY]
    groups = [{"params": tables, "weight_decay": 0.5}, {"params": others, "lr": 0.01}]
    return torch.optim.SGD([g for g in groups if g["params"]], lr=0.1, momentum=0.9)


def by_dimensions(parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
    """Four groups, two of them without a parameter."""
    groups = [
        {"params": [p for p in parameters if p.dim() == n], "lr": 0.02 * (n + 1)} for n in range(4)
    ]
    return torch.optim.SGD(groups, momentum=0.9)


FACTORIES = {each.__name__: each for each in (by_place, by_size, by_dimensions)}


def trained(kind: str, plan: str, saved: str = "", loaded: str = "") -> tuple[int, float]:
    """Groups of a rank, and the error of two steps against one process.

    Args:
        saved: a folder in which the state after the first step is saved.
        loaded: from there, in place of the first step.
    """
    factory = FACTORIES[kind]
    case, reference, parallel = parallelize("gpt", plan, optimizer=factory)
    optimizer = factory(list(reference.parameters()))
    for rows in (4, 6):
        reference_loss(reference, case, case.batch(rows)).backward()
        optimizer.step()
        optimizer.zero_grad()
        if rows == 4 and loaded:
            parallel.load(loaded)
        else:
            parallel.train_step(local_rows(parallel, case.batch(rows), rows))
        if rows == 4 and saved:
            parallel.save(saved)
    return len(parallel.optimizer.param_groups), state_error(parallel, reference)


@pytest.mark.dist
@pytest.mark.parametrize(
    ("kind", "plan", "groups"),
    [("by_size", SPLIT, 2), ("by_place", STAGES, 41)],
)
def test_a_factory_sorts_the_parameters_of_the_whole_model(
    pool: Pool, kind: str, plan: str, groups: int
) -> None:
    for count, error in pool.run(trained, kind, plan, world_size=2):
        assert count == groups
        assert error < 1e-5


@pytest.mark.dist
@pytest.mark.parametrize(("first", "then"), [(STAGES, SPLIT), (SPLIT, STAGES)])
def test_groups_that_are_empty_on_a_rank_are_saved_and_loaded(
    pool: Pool, tmp_path: Path, first: str, then: str
) -> None:
    folder = str(tmp_path)
    pool.run(trained, "by_dimensions", first, folder, world_size=2)
    for count, error in pool.run(trained, "by_dimensions", then, "", folder, world_size=2):
        assert count == 4
        assert error < 1e-5
