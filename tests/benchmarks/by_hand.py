"""The plans of `engine_speed` as one writes them in plain torch, or with Accelerate and DeepSpeed.

Each takes a model and a rank's batch (ids, targets), and returns a training step.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.pipelining import PipelineStage, Schedule1F1B
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    parallelize_module,
)
from torch.nn.parallel import DistributedDataParallel

from engines.data.ddp import all_reduced
from tests.benchmarks.subject import GPT, LAYERS, loss_fn

Step = Callable[[], object]
MICROBATCHES = 4


def adam(parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=1e-3)


def _step(model: nn.Module, owner: nn.Module, ids: Tensor, targets: Tensor) -> Step:
    """`model` is called, the parameters of `owner` are stepped."""
    optimizer = adam(list(owner.parameters()))

    def step() -> object:
        loss = loss_fn(model(ids), targets)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        return loss.detach()

    return step


def ddp(model: GPT, ids: Tensor, targets: Tensor) -> Step:
    runner = DistributedDataParallel(model, gradient_as_bucket_view=True)
    if dist.get_backend() == "fake":  # without results, which DDP's own all-reduce waits for
        runner.register_comm_hook(None, all_reduced)
    return _step(runner, model, ids, targets)


def _shard(model: nn.Module, blocks: list[nn.Module], mesh: DeviceMesh, *, release: bool) -> None:
    for block in blocks:
        fully_shard(block, mesh=mesh, reshard_after_forward=release)
    fully_shard(model, mesh=mesh, reshard_after_forward=False)


def zero3(model: GPT, ids: Tensor, targets: Tensor) -> Step:
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    _shard(model, list(model.blocks), mesh, release=True)
    return _step(model, model, ids, targets)


def zero1(model: GPT, ids: Tensor, targets: Tensor) -> Step:
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    _shard(model, list(model.blocks), mesh, release=False)
    return _step(model, model, ids, targets)


def _split(model: nn.Module, mesh: DeviceMesh) -> None:
    """Column-wise then row-wise, in attention by heads and in the MLP."""
    styles = {
        **dict.fromkeys(("q", "k", "v", "mlp.0"), ColwiseParallel()),
        **dict.fromkeys(("out", "mlp.2"), RowwiseParallel()),
    }
    for block in model.get_submodule("blocks").children():
        parallelize_module(block, mesh, styles)


def tensor(model: GPT, ids: Tensor, targets: Tensor) -> Step:
    _split(model, init_device_mesh("cpu", (dist.get_world_size(),)))
    return _step(model, model, ids, targets)


def tensor_zero3(model: GPT, ids: Tensor, targets: Tensor) -> Step:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    _split(model, mesh["tp"])
    _shard(model, list(model.blocks), mesh["dp"], release=True)
    return _step(model, model, ids, targets)


class Half(nn.Module):
    """The first or the second half of the model."""

    def __init__(self, model: GPT, *, is_first: bool) -> None:
        super().__init__()
        middle = LAYERS // 2
        self.is_first = is_first
        self.blocks = model.blocks[:middle] if is_first else model.blocks[middle:]
        if is_first:
            self.embed, self.position = model.embed, model.position
        else:
            self.norm, self.head = model.norm, model.head

    def forward(self, x: Tensor) -> Tensor:
        if self.is_first:
            x = self.embed(x) + self.position(torch.arange(x.shape[1]))
        for block in self.blocks:
            x = block(x)
        return x if self.is_first else self.head(self.norm(x))


def _pipeline(
    half: Half, runner: nn.Module, group: dist.ProcessGroup, ids: Tensor, targets: Tensor
) -> Step:
    stage = PipelineStage(runner, 0 if half.is_first else 1, 2, torch.device("cpu"), group=group)
    schedule = Schedule1F1B(stage, MICROBATCHES, loss_fn=loss_fn)
    optimizer = adam(list(half.parameters()))

    def step() -> object:
        if half.is_first:
            schedule.step(ids, return_outputs=False)
        else:
            schedule.step(target=targets, return_outputs=False)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        return None

    return step


def pipeline(model: GPT, ids: Tensor, targets: Tensor) -> Step:
    half = Half(model, is_first=dist.get_rank() == 0)
    group = dist.group.WORLD
    assert group is not None
    return _pipeline(half, half, group, ids, targets)


def pipeline_ddp(model: GPT, ids: Tensor, targets: Tensor) -> Step:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("pp", "dp"))
    half = Half(model, is_first=mesh.get_local_rank("pp") == 0)
    runner = DistributedDataParallel(
        half, process_group=mesh.get_group("dp"), gradient_as_bucket_view=True
    )
    return _pipeline(half, runner, mesh.get_group("pp"), ids, targets)


def accelerate_ddp(model: GPT, ids: Tensor, targets: Tensor) -> Step:
    from accelerate import Accelerator

    accelerator = Accelerator(cpu=True)
    runner, optimizer = accelerator.prepare(model, adam(list(model.parameters())))
    assert isinstance(runner, DistributedDataParallel)

    def step() -> object:
        loss = loss_fn(runner(ids), targets)
        accelerator.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    return step


def _deepspeed(stage: int, model: GPT, ids: Tensor, targets: Tensor) -> Step:
    import deepspeed

    engine, *_ = deepspeed.initialize(
        model=model,
        optimizer=adam(list(model.parameters())),
        config={
            "train_micro_batch_size_per_gpu": len(ids),
            "gradient_clipping": 0.0,  # its default clips
            "zero_optimization": {"stage": stage},
            "zero_allow_untested_optimizer": True,
        },
        dist_init_required=False,
    )

    def step() -> object:
        loss = loss_fn(engine(ids), targets)
        engine.backward(loss)
        engine.step()
        return loss.detach()

    return step


def deepspeed_zero1(model: GPT, ids: Tensor, targets: Tensor) -> Step:
    return _deepspeed(1, model, ids, targets)


def deepspeed_zero3(model: GPT, ids: Tensor, targets: Tensor) -> Step:
    return _deepspeed(3, model, ids, targets)
