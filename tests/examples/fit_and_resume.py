"""A training in one call, ended in its middle and resumed by the same script.

torchrun --nproc-per-node 2 tests/examples/fit_and_resume.py FOLDER [PLAN]
"""

from __future__ import annotations

import sys

import torch
import torch.nn.functional as F
from torch import nn
from torch.optim.lr_scheduler import OneCycleLR
from torch.utils.data import DataLoader, TensorDataset

from advisor import auto_parallelize

STEPS = 12


def train(folder: str, plan: str | None, *, steps: int) -> tuple[int, float | None]:
    """A job that reaches `steps` of the STEPS; the steps that were left to do, and the loss."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(16, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU())
    model.append(nn.Linear(64, 1))
    points = torch.randn(128, 16, generator=torch.Generator().manual_seed(1))
    loader = DataLoader(TensorDataset(points, points[:, :1].sin()), batch_size=16, shuffle=True)
    parallel = auto_parallelize(
        model,
        sample=next(iter(loader)),
        loss_fn=F.mse_loss,
        optimizer=lambda parameters: torch.optim.AdamW(parameters, lr=1e-3),
        scheduler=lambda optimizer: OneCycleLR(optimizer, max_lr=1e-2, total_steps=STEPS + 1),
        global_batch_size=16,
        plan=plan,
        learns=False,
    )
    seen: list[int] = []
    result = parallel.fit(
        loader,
        steps=steps,
        save=folder,
        save_every=4,
        on_step=lambda step, loss: seen.append(step),
    )
    return len(seen), result.loss


def main(folder: str, plan: str | None = None) -> float:
    done, _ = train(folder, plan, steps=5)
    rest, loss = train(folder, plan, steps=STEPS)  # weights, schedule and place in the data
    assert (done, rest) == (5, STEPS - 5)
    assert loss is not None
    return loss


if __name__ == "__main__":
    print(f"loss {main(*sys.argv[1:]):.6f}")
