"""The training that is killed: a small GPT with dropout, shuffled data and a cosine schedule."""

from __future__ import annotations

import os
import random
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.optim.lr_scheduler import CosineAnnealingLR
from torch.utils.data import DataLoader, TensorDataset

from advisor.auto.parallelize import auto_parallelize
from engines.parallel import ParallelModel
from engines.plan import Plan
from engines.runtime.world import leave_world
from tests.engines.cases import Block, TinyGPT, cpu_ranks, token_loss

PLANS = {
    "ddp": "dp_replicate=4",
    "zero1": "dp_replicate=4 zero=1",
    "zero3": "dp_shard=4",
    "tp2": "tp=2 dp_replicate=2",
    "pp2": "pp=2 dp_replicate=2 schedule=1f1b",
    "hsdp": "dp_replicate=2 dp_shard=2",
}
"""Of four ranks, by name."""
ROWS, BATCH, LENGTH, VOCABULARY = 136, 16, 8, 61
"""The last batch of a pass has half the rows."""


class DropoutBlock(Block):
    """A block that drops elements of what it adds."""

    def __init__(self, width: int, heads: int, drop: float) -> None:
        super().__init__(width, heads)
        self.drop = nn.Dropout(drop)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.drop(super().forward(x))
        return out


class DropoutGPT(TinyGPT):
    """Four blocks with dropout."""

    def __init__(self, drop: float) -> None:
        super().__init__(vocabulary=VOCABULARY, width=32, layers=0)
        self.blocks = nn.ModuleList(DropoutBlock(32, 4, drop) for _ in range(4))


def global_batches() -> DataLoader[Any]:
    """Shuffled; a token is followed by its double, so that there is something to learn."""
    numbers = torch.Generator().manual_seed(5)
    first = torch.randint(1, VOCABULARY, (ROWS, 1), generator=numbers)
    ids = first * 2 ** torch.arange(LENGTH + 1) % VOCABULARY
    return DataLoader(TensorDataset(ids[:, :-1], ids[:, 1:]), batch_size=BATCH, shuffle=True)


def build(
    plan: str, *, steps: int, drop: float = 0.1, timeout_s: float | None = 60
) -> tuple[ParallelModel, CosineAnnealingLR]:
    """The model under `plan`, and its schedule.

    What the plan leaves open is decided by facts of a machine that never change.

    Args:
        drop: of the dropout.
        timeout_s: of the job; None: as a user has it who gives none.
    """
    random.seed(3)
    np.random.seed(3)
    torch.manual_seed(3)
    sample = torch.zeros(BATCH // 4, LENGTH, dtype=torch.int64)
    parallel = auto_parallelize(
        DropoutGPT(drop),
        sample=(sample, sample),
        loss_fn=token_loss,
        optimizer=lambda parameters: torch.optim.AdamW(parameters, lr=3e-3),
        plan=plan,
        global_batch_size=BATCH,
        max_grad_norm=1.0,
        cluster=cpu_ranks(Plan.parse(plan).world_size),
        learns=False,
        timeout_s=timeout_s,
    )
    return parallel, CosineAnnealingLR(parallel.optimizer, T_max=steps)


def train(folder: Path, plan: str, steps: int, save_every: int) -> None:
    """Train from where the last attempt came to.

    Each rank writes into `folder`: its process into `process.RANK`, and into `steps.RANK` a line
    for each step, and one for the step that an attempt began after.
    """
    rank = os.environ["RANK"]
    (folder / f"process.{rank}").write_text(identity(os.getpid()))
    torch.set_num_threads(1)
    parallel, scheduler = build(plan, steps=steps)
    with open(folder / f"steps.{rank}", "a", buffering=1) as lines:
        first = [True]

        def note(step: int, loss: Tensor) -> None:
            if first:
                lines.write(f"start {step - 1}\n")
                first.clear()
            lines.write(f"{step} {loss.item().hex()}\n")

        parallel.fit(
            global_batches(),
            steps=steps,
            save=folder / "saves",
            save_every=save_every,
            scheduler=scheduler,
            on_step=note,
        )
    leave_world()


def identity(pid: int) -> str:
    """A process by its number and its time of start; empty where it is gone."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return ""
    state, *fields = stat.rpartition(")")[2].split()
    return "" if state in "ZX" else f"{pid} {fields[18]}"
