"""PyTorch's DDP tutorial, `DDP(model)` replaced: processes and process group are the script's own.

python tests/examples/mp_spawn.py [PLAN]
"""

from __future__ import annotations

import os
import socket
import sys

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import Tensor, nn

from advisor import auto_parallelize

WORLD_SIZE, ROWS, STEPS = 2, 20, 4


def setup(rank: int, world_size: int, port: int) -> None:
    os.environ["MASTER_ADDR"] = "localhost"
    os.environ["MASTER_PORT"] = str(port)
    dist.init_process_group("gloo", rank=rank, world_size=world_size)


class ToyModel(nn.Module):
    """The tutorial's."""

    def __init__(self) -> None:
        super().__init__()
        self.net1 = nn.Linear(10, 10)
        self.relu = nn.ReLU()
        self.net2 = nn.Linear(10, 5)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.net2(self.relu(self.net1(x)))
        return out


def train(rank: int, world_size: int, plan: str | None) -> float:
    """Steps on a rank's own rows; the loss over all of them."""
    torch.manual_seed(0)
    model, loss_fn = ToyModel(), nn.MSELoss()
    inputs, labels = torch.randn(ROWS, 10), torch.randn(ROWS, 5)
    parallel = auto_parallelize(
        model,
        sample=(inputs, labels),
        loss_fn=loss_fn,
        optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.1),
        global_batch_size=ROWS,
        plan=plan,
        learns=False,
    )
    mine = slice(parallel.data_rank, None, parallel.data_world_size)
    loss = torch.zeros(())
    for _ in range(STEPS):
        parallel.optimizer.zero_grad()
        outputs = parallel(inputs[mine])
        loss = loss_fn(outputs, labels[mine])
        loss.backward()
        parallel.optimizer.step()
    return parallel.global_mean({"loss": loss.detach()}, count=len(inputs[mine]))["loss"]


def demo(rank: int, world_size: int, port: int, plan: str | None) -> None:
    setup(rank, world_size, port)
    loss = train(rank, world_size, plan)
    if rank == 0:
        print(f"loss {loss:.6f}")
    dist.destroy_process_group()


def main(plan: str | None = None) -> None:
    with socket.socket() as free:
        free.bind(("localhost", 0))
        port = free.getsockname()[1]
    mp.spawn(demo, args=(WORLD_SIZE, port, plan), nprocs=WORLD_SIZE)


if __name__ == "__main__":
    main(*sys.argv[1:])
