"""A loop of one's own, with accumulation, clipping, a schedule and a metric.

torchrun --nproc-per-node 2 tests/examples/plain_loop.py [PLAN]
"""

from __future__ import annotations

import sys
from contextlib import nullcontext

import torch
import torch.nn.functional as F
from torch import nn
from torch.optim.lr_scheduler import CosineAnnealingLR
from torch.utils.data import DataLoader, TensorDataset

from advisor import auto_parallelize

MICROBATCHES, EPOCHS = 2, 3


def data() -> TensorDataset:
    """Points in 16 dimensions; their class is the quarter-plane of the first two."""
    points = torch.randn(256, 16, generator=torch.Generator().manual_seed(1))
    return TensorDataset(points, (points[:, 0] > 0).long() + 2 * (points[:, 1] > 0).long())


def main(plan: str | None = None) -> tuple[float, float]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(16, 64), nn.GELU(), nn.Linear(64, 64), nn.GELU())
    model.append(nn.Linear(64, 4))
    loader = DataLoader(data(), batch_size=16, shuffle=True)
    parallel = auto_parallelize(
        model,
        sample=next(iter(loader)),
        loss_fn=F.cross_entropy,
        optimizer=lambda parameters: torch.optim.AdamW(parameters, lr=1e-2),
        scheduler=lambda optimizer: CosineAnnealingLR(optimizer, T_max=EPOCHS * 8),
        global_batch_size=16,
        plan=plan,
        learns=False,
    )
    sharded = parallel.shard(loader)
    for _ in range(EPOCHS):
        for number, (points, classes) in enumerate(sharded):
            is_last = number % MICROBATCHES == MICROBATCHES - 1
            with nullcontext() if is_last else parallel.no_sync():
                loss = F.cross_entropy(parallel(points), classes.to(parallel.device))
                (loss / MICROBATCHES).backward()
            if is_last:
                parallel.clip_grad_norm_(1.0)
                parallel.optimizer.step()  # the schedule steps with it
                parallel.optimizer.zero_grad()
    total, hits, rows = 0.0, 0, 0
    parallel.eval()
    with torch.no_grad():
        for points, classes in parallel.shard(DataLoader(data(), batch_size=16)):
            output, classes = parallel(points), classes.to(parallel.device)
            total += F.cross_entropy(output, classes, reduction="sum").item()
            hits += int((output.argmax(-1) == classes).sum())
            rows += len(classes)
    means = parallel.global_mean({"loss": total / rows, "accuracy": hits / rows}, count=rows)
    return means["loss"], means["accuracy"]


if __name__ == "__main__":
    print("loss {:.6f}, accuracy {:.3f}".format(*main(*sys.argv[1:])))
