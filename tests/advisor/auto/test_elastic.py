"""A training goes on with more or fewer ranks, under a plan for their number."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader, TensorDataset

from advisor.auto.parallelize import advise, auto_parallelize
from engines.runtime.world import join_world
from tests.engines.cases import TinyGPT, cpu_ranks, token_loss
from tests.nightly import nightly
from tests.workers import Pool

pytestmark = pytest.mark.dist

BATCH, LENGTH, ROWS = 8, 8, 40
SIZES = (4, 2, 1, 4)
"""Ranks of one attempt after the other, each for three steps."""
STEPS = 3


def _batches() -> DataLoader[tuple[torch.Tensor, ...]]:
    ids = torch.randint(61, (ROWS, LENGTH + 1), generator=torch.Generator().manual_seed(1))
    return DataLoader(TensorDataset(ids[:, :-1], ids[:, 1:]), batch_size=BATCH, shuffle=True)


def _request() -> dict[str, Any]:
    sample = torch.zeros(2, LENGTH, dtype=torch.int64)
    return {
        "sample": (sample, sample),
        "loss_fn": token_loss,
        "optimizer": lambda parameters: torch.optim.SGD(parameters, lr=0.1, momentum=0.9),
        "global_batch_size": BATCH,
    }


def _attempt(folder: str, plan: str | None, until: int) -> tuple[str, list[float]]:
    """The plan, and the loss of each step, of a script that knows nothing of its ranks."""
    torch.manual_seed(0)
    parallel = auto_parallelize(
        TinyGPT(),
        **_request(),
        plan=plan,
        cluster=cpu_ranks(join_world().size),
        learns=False,
    )
    losses: list[float] = []
    parallel.fit(
        _batches(),
        steps=until,
        save=folder,
        on_step=lambda step, loss: losses.append(loss.item()),
    )
    return str(parallel.plan), losses


@pytest.mark.parametrize("by_file", [False, *nightly(True)])
def test_losses_are_those_of_one_process_while_ranks_come_and_go(
    pool: Pool, tmp_path: Path, by_file: bool
) -> None:
    plan = None
    if by_file:
        for size, text in {4: "pp=2 tp=2", 2: "pp=2 schedule=1f1b"}.items():
            decision = advise(TinyGPT(), **_request(), plan=text, cluster=cpu_ranks(size))
            decision.save(tmp_path / f"{size}.json")
        plan = str(tmp_path / "{world_size}.json")
    steps = STEPS * len(SIZES)
    (_, wanted), *_ = pool.run(_attempt, str(tmp_path / "alone"), None, steps, world_size=1)
    losses: list[float] = []
    plans: list[str] = []
    for number, size in enumerate(SIZES, 1):
        (used, part), *_ = pool.run(
            _attempt, str(tmp_path / "elastic"), plan, STEPS * number, world_size=size
        )
        losses += part
        plans.append(used)
    assert losses == pytest.approx(wanted, rel=1e-5)
    assert len(set(plans)) == 3
    if by_file:
        assert [plans[0].split()[:2], plans[1].split()[0]] == [["pp=2", "tp=2"], "pp=2"]
