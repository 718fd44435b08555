"""nn.DataParallel: the batch is scattered from the first device, the module copied, outputs
gathered there."""

from __future__ import annotations

import torch
from torch import nn

from engines.blocks.autocast import keep_dtype
from engines.plan import DataParallel, Plan
from engines.runtime.world import World
from profiles.errors import PlanError


def one_process_plan(plan: Plan) -> Plan:
    """The plan of the one process: microbatches of all devices together."""
    rows = plan.microbatch_size
    update = {
        "data_parallel": DataParallel.NONE,
        "dp_replicate": 1,
        "microbatch_size": rows and rows * plan.dp_replicate,
    }
    return plan.model_copy(update=update)


def require_devices(replicas: int, world: World, *, where: str) -> None:
    """Raise a `PlanError` unless this is one process that sees a device for each replica."""
    seen = torch.cuda.device_count()
    if world.size == 1 and seen >= replicas:
        return
    has = f"this job has {world.size}" if world.size > 1 else f"this process sees {seen}"
    fewer = [f"set dp_replicate={seen}"] if world.size == 1 and seen > 1 else []
    raise PlanError(
        f"data_parallel=threads is one process that drives {replicas} accelerators: {has}"
        + (" processes" if world.size > 1 else ""),
        where=where,
        hints=[*fewer, "leave data_parallel out and start a process for each: DDP is faster"],
    )


def data_parallel(
    model: nn.Module, plan: Plan, world: World, mixed: torch.dtype | None
) -> nn.DataParallel[nn.Module]:
    """`model`, which is on the device of `world`, with a thread for each device of `plan`, computed
    in `mixed` under autocast."""
    if mixed is not None:
        keep_dtype(model, world.device.type, mixed)
    first = world.device.index or 0
    others = (n for n in range(torch.cuda.device_count()) if n != first)
    devices = [first, *others][: plan.dp_replicate]
    return nn.DataParallel(model, device_ids=devices, output_device=first)
