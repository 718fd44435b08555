"""`python -m tests.benchmarks.shard_host`: host time of FSDP2's hooks and of AdamW on its shards.

Small layers in one process, plain and sharded over a group of one rank: what sharding adds is
Python code. AdamW goes tensor by tensor, or through lists of them (`foreach`); shards are stepped
as torch does, and as our engines do, as a rank's own tensors. `unit_times` and `rates` of
`advisor.cost.compute` have these figures in launches.
"""

from __future__ import annotations

import sys
import time
from statistics import median

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from engines.state.local_step import step_local_parts

WIDTH, ROWS = 32, 4
WARM_UP, STEPS = 10, 30
SHAPES = ((8, 1), (8, 4), (8, 16))
"""Units, and parameters of each."""


def layers(units: int, parameters: int) -> nn.Sequential:
    """(B, C) to (B, C)."""
    return nn.Sequential(
        *(
            nn.Sequential(*(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(parameters)))
            for _ in range(units)
        )
    )


def sharded(model: nn.Sequential) -> nn.Sequential:
    """`model` with each unit, and the root, under FSDP2."""
    mesh = init_device_mesh("cpu", (1,))
    for unit in model:
        fully_shard(unit, mesh=mesh)
    fully_shard(model, mesh=mesh)
    return model


def seconds(
    model: nn.Module, x: Tensor, *, in_lists: bool = False, as_own: bool = False
) -> tuple[float, float]:
    """Of a forward and backward, and of the optimizer's step: medians. `as_own`: shards are
    stepped as a rank's own tensors."""
    optimizer = torch.optim.AdamW(model.parameters(), foreach=in_lists)
    if as_own:
        step_local_parts(optimizer)
    passes, updates = [], []
    for _ in range(WARM_UP + STEPS):
        began = time.perf_counter()
        model(x).sum().backward()
        between = time.perf_counter()
        optimizer.step()
        updates.append(time.perf_counter() - between)
        passes.append(between - began)
        optimizer.zero_grad()
    return median(passes[WARM_UP:]), median(updates[WARM_UP:])


def main() -> int:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    x = torch.randn(ROWS, WIDTH)
    for units, parameters in SHAPES:
        plain, plain_update = seconds(layers(units, parameters), x)
        whole, update = seconds(sharded(layers(units, parameters)), x)
        _, own = seconds(sharded(layers(units, parameters)), x, as_own=True)
        _, listed = seconds(layers(units, parameters), x, in_lists=True)
        listed_shards, own_listed = (
            seconds(sharded(layers(units, parameters)), x, in_lists=True, as_own=as_own)[1]
            for as_own in (False, True)
        )
        tensors = units * parameters
        sys.stdout.write(
            f"{units} units of {parameters}: hooks {(whole - plain) / units * 1e6:.0f} us a unit;"
            f" AdamW {plain_update / tensors * 1e6:.0f} us a tensor,"
            f" {update / tensors * 1e6:.0f} a shard, {own / tensors * 1e6:.0f} as our engines do;"
            f" in lists {listed / tensors * 1e6:.0f}, {listed_shards / tensors * 1e6:.0f} and"
            f" {own_listed / tensors * 1e6:.0f}\n"
        )
    dist.destroy_process_group()
    return 0


if __name__ == "__main__":
    sys.exit(main())
