"""A Lightning module in a short loop, without Lightning's trainer; it need not be installed.

torchrun --nproc-per-node 2 tests/examples/lightning_style.py [PLAN]
"""

from __future__ import annotations

import sys
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from advisor import auto_parallelize

try:
    from lightning import LightningModule
except ImportError:
    LightningModule = nn.Module


class LitRegressor(LightningModule):  # type: ignore[misc, valid-type]
    """As Lightning's users write them."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(16, 64), nn.ReLU(), nn.Linear(64, 1))

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.layers(x)
        return out

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        x, y = batch
        return F.mse_loss(self(x), y)

    def configure_optimizers(self) -> dict[str, Any]:
        optimizer = torch.optim.AdamW(self.parameters(), lr=1e-2)
        return {
            "optimizer": optimizer,
            "lr_scheduler": torch.optim.lr_scheduler.StepLR(optimizer, step_size=4),
        }


class TrainingStep(nn.Module):
    """The training step as a forward, so that it is what is looked at, split and exchanged."""

    def __init__(self, module: LitRegressor) -> None:
        super().__init__()
        self.module = module

    def forward(self, *batch: Tensor) -> Tensor:
        return self.module.training_step(batch, 0)  # type: ignore[arg-type]


def main(plan: str | None = None) -> float:
    torch.manual_seed(0)
    points = torch.randn(128, 16, generator=torch.Generator().manual_seed(1))
    loader = DataLoader(TensorDataset(points, points[:, :1].sin()), batch_size=16, shuffle=True)
    module = LitRegressor()
    configured = module.configure_optimizers()
    scheduler = configured["lr_scheduler"]
    parallel = auto_parallelize(
        TrainingStep(module),
        sample=next(iter(loader)),
        optimizer=configured["optimizer"],  # built on the module: it is carried over
        global_batch_size=16,
        plan=plan,
        learns=False,
    )
    parallel.register(scheduler=scheduler)  # part of checkpoints
    loss = torch.zeros(())
    for batch in parallel.shard(loader):
        loss = parallel.train_step(batch)
        scheduler.step()
    return loss.item()


if __name__ == "__main__":
    print(f"loss {main(*sys.argv[1:]):.6f}")
