"""The training that is killed: a small GPT with dropout, shuffled data and a cosine schedule.

    torchrun --nproc-per-node 4 -m tests.soak.training FOLDER --plan "dp_shard=4" --steps 300

Every rank writes a line for each step, and one for each start, into `FOLDER/steps.RANK`.
"""

from __future__ import annotations

import argparse
import os
from pathlib import Path
from typing import Any

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

    def __init__(self, width: int, heads: int) -> None:
        super().__init__(width, heads)
        self.drop = nn.Dropout(0.1)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.drop(super().forward(x))
        return out


class DropoutGPT(TinyGPT):
    """Four blocks with dropout."""

    def __init__(self) -> None:
        super().__init__(vocabulary=VOCABULARY, width=32, layers=0)
        self.blocks = nn.ModuleList(DropoutBlock(32, 4) for _ in range(4))


def global_batches() -> DataLoader[Any]:
    """Shuffled; a token is followed by its double, so that there is something to learn."""
    numbers = torch.Generator().manual_seed(5)
    first = torch.randint(1, VOCABULARY, (ROWS, 1), generator=numbers)
    ids = first * 2 ** torch.arange(LENGTH + 1) % VOCABULARY
    return DataLoader(TensorDataset(ids[:, :-1], ids[:, 1:]), batch_size=BATCH, shuffle=True)


def build(plan: str, *, steps: int) -> tuple[ParallelModel, CosineAnnealingLR]:
    """The model under `plan`, and its schedule.

    What the plan leaves open is decided by facts of a machine that never change.
    """
    torch.manual_seed(3)
    sample = torch.zeros(BATCH // 4, LENGTH, dtype=torch.int64)
    parallel = auto_parallelize(
        DropoutGPT(),
        sample=(sample, sample),
        loss_fn=token_loss,
        optimizer=lambda parameters: torch.optim.AdamW(parameters, lr=3e-3),
        plan=plan,
        global_batch_size=BATCH,
        max_grad_norm=1.0,
        cluster=cpu_ranks(Plan.parse(plan).world_size),
        learns=False,
        timeout_s=60,
    )
    return parallel, CosineAnnealingLR(parallel.optimizer, T_max=steps)


def main() -> None:
    """Train as the command line says, from where the last attempt came to."""
    parser = argparse.ArgumentParser()
    parser.add_argument("folder", type=Path)
    parser.add_argument("--plan", required=True)
    parser.add_argument("--steps", type=int, required=True)
    parser.add_argument("--save-every", type=int, default=10)
    given = parser.parse_args()
    torch.set_num_threads(1)
    parallel, scheduler = build(given.plan, steps=given.steps)
    with open(given.folder / f"steps.{os.environ['RANK']}", "a", buffering=1) as lines:

        def note(step: int, loss: Tensor) -> None:
            if first:
                lines.write(f"start {step - 1}\n")
                first.clear()
            lines.write(f"{step} {loss.item().hex()}\n")

        first = [True]
        parallel.fit(
            global_batches(),
            steps=given.steps,
            save=given.folder / "saves",
            save_every=given.save_every,
            scheduler=scheduler,
            on_step=note,
        )
    leave_world()


if __name__ == "__main__":
    main()
