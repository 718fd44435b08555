"""The training step of each tool, written as its users write it.

Each takes a subject, its model and the job, and returns a step: from the batch of all ranks to this
rank's loss. Packages are imported by the scripts that use them.
"""

from __future__ import annotations

import functools
import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import (
    CheckpointWrapper,
    apply_activation_checkpointing,
)
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import fp16_compress_hook
from torch.distributed.algorithms.ddp_comm_hooks.powerSGD_hook import PowerSGDState, powerSGD_hook
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

from profiles.capture.batch.call import Batch
from profiles.machine.cluster import ClusterProfile
from tests.peers.subjects import ROWS, Subject, adam, share

Step = Callable[[Batch], Tensor]


@dataclass(frozen=True)
class Job:
    """This rank among the others.

    Attributes:
        folder: all ranks see it.
        cluster: as timed by this job.
    """

    rank: int
    size: int
    nodes: int
    folder: Path
    cluster: ClusterProfile

    def rows(self, batch: Batch) -> Batch:
        """Rows of this rank, where every rank is a replica."""
        return share(batch, self.rank, self.size)


@dataclass(frozen=True)
class Running:
    """A script under way; `plan` is what it settled on, where it chose."""

    step: Step
    plan: str = ""


Script = Callable[[Subject, nn.Module, Job], Running]


def _loop(subject: Subject, runner: nn.Module, owner: nn.Module, job: Job) -> Running:
    """The plain loop: `runner` is called, the parameters of `owner` are stepped."""
    optimizer = adam(list(owner.parameters()))

    def step(batch: Batch) -> Tensor:
        loss = subject.loss(runner, job.rows(batch))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    return Running(step)


def ddp(subject: Subject, model: nn.Module, job: Job) -> Running:
    """Plain DDP with its defaults."""
    return _loop(subject, DistributedDataParallel(model), model, job)


def ddp_fp16(subject: Subject, model: nn.Module, job: Job) -> Running:
    """An expert's DDP for a slow link: torch's hook sends gradients as fp16 (bf16 wants NCCL)."""
    runner = DistributedDataParallel(model, gradient_as_bucket_view=True)
    runner.register_comm_hook(None, fp16_compress_hook)
    return _loop(subject, runner, model, job)


def ddp_powersgd(subject: Subject, model: nn.Module, job: Job) -> Running:
    """The same with torch's PowerSGD, begun as early as it lets one."""
    runner = DistributedDataParallel(model)
    state = PowerSGDState(None, matrix_approximation_rank=4, start_powerSGD_iter=2)
    runner.register_comm_hook(state, powerSGD_hook)
    return _loop(subject, runner, model, job)


def fsdp2(subject: Subject, model: nn.Module, job: Job) -> Running:
    """An expert's FSDP2: a unit a block; over nodes HSDP, whose gathers stay inside of them."""
    mesh = init_device_mesh("cpu", (job.size,))
    if job.nodes > 1:
        mesh = init_device_mesh(
            "cpu", (job.nodes, job.size // job.nodes), mesh_dim_names=("replicate", "shard")
        )
    for block in subject.blocks(model):
        fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)
    return _loop(subject, model, model, job)


def fsdp2_frugal(subject: Subject, model: nn.Module, job: Job) -> Running:
    """An expert's FSDP2 where memory is short: checkpointed blocks, and one row at a time."""
    kind = type(subject.blocks(model)[0])
    apply_activation_checkpointing(model, check_fn=lambda module: isinstance(module, kind))
    for module in list(model.modules()):
        if isinstance(module, CheckpointWrapper):
            fully_shard(module)
    fully_shard(model)
    optimizer = adam(list(model.parameters()))

    def step(batch: Batch) -> Tensor:
        mine, count = job.rows(batch), ROWS // job.size
        total = torch.zeros(())
        for row in range(count):
            loss = subject.loss(model, share(mine, row, count)) / count
            loss.backward()
            total += loss.detach()
        optimizer.step()
        optimizer.zero_grad()
        return total

    return Running(step)


def _accelerated(subject: Subject, model: nn.Module, job: Job, accelerator: object) -> Running:
    runner, optimizer = accelerator.prepare(model, adam(list(model.parameters())))  # type: ignore[attr-defined]

    def step(batch: Batch) -> Tensor:
        loss = subject.loss(runner, job.rows(batch))
        accelerator.backward(loss)  # type: ignore[attr-defined]
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    return Running(step, type(runner).__name__)


def accelerate(subject: Subject, model: nn.Module, job: Job) -> Running:
    """Accelerate with its defaults."""
    from accelerate import Accelerator
    from accelerate.state import AcceleratorState

    AcceleratorState._reset_state(reset_partial_state=True)  # one job runs several of its scripts
    return _accelerated(subject, model, job, Accelerator(cpu=True))


def accelerate_fsdp2(subject: Subject, model: nn.Module, job: Job) -> Running:
    """Accelerate's FSDP2 plugin, wrapping the class of the blocks.

    It heeds the plugin on accelerators alone, and gives CPU ranks DDP without a word: its state is
    told what it would have found there.

    Raises:
        RuntimeError: it wrapped the model in something else.
    """
    from accelerate import Accelerator, FullyShardedDataParallelPlugin
    from accelerate.state import AcceleratorState
    from accelerate.utils import DistributedType

    AcceleratorState._reset_state(reset_partial_state=True)
    plugin = FullyShardedDataParallelPlugin(
        fsdp_version=2,
        auto_wrap_policy="transformer_based_wrap",
        transformer_cls_names_to_wrap=[subject.block],
    )
    accelerator = Accelerator(cpu=True, fsdp_plugin=plugin)
    accelerator.state.distributed_type = DistributedType.FSDP
    accelerator.state.fsdp_plugin = plugin
    try:
        running = _accelerated(subject, model, job, accelerator)
    finally:
        os.environ.pop("ACCELERATE_USE_FSDP", None)  # it would speak to the scripts after it
    if not running.plan.startswith("FSDP"):
        raise RuntimeError(f"on CPU ranks its FSDP plugin gives {running.plan}")
    return running


def _deepspeed(stage: int, subject: Subject, model: nn.Module, job: Job) -> Running:
    os.environ.setdefault("DS_ACCELERATOR", "cpu")
    import deepspeed

    # Its default bucket is 5e8 elements, 2 GB whatever the model; one that holds the whole gradient
    # is as fast.
    bucket = sum(parameter.numel() for parameter in model.parameters())
    engine, *_ = deepspeed.initialize(
        model=model,
        optimizer=adam(list(model.parameters())),
        config={
            "train_micro_batch_size_per_gpu": ROWS // job.size,
            "gradient_clipping": 0.0,  # its default clips, and trains another model
            "zero_optimization": {"stage": stage, "reduce_bucket_size": bucket},
            "zero_allow_untested_optimizer": True,
        },
        dist_init_required=False,
    )

    def step(batch: Batch) -> Tensor:
        loss = subject.loss(engine, job.rows(batch))
        engine.backward(loss)
        engine.step()
        return loss.detach()

    return Running(step)


def _pretrained(subject: Subject, model: nn.Module, job: Job, **sizes: object) -> nn.Module:
    """The model from a folder, placed by Transformers as it reads it.

    Raises:
        RuntimeError: it is not one of its classes.
    """
    from transformers import PreTrainedModel
    from transformers.distributed import DistributedConfig

    if not isinstance(model, PreTrainedModel):
        raise RuntimeError("it has plans for its own classes alone")

    folder = job.folder / f"{type(model).__name__}-{'-'.join(sizes)}"
    if job.rank == 0:
        model.save_pretrained(folder)
    dist.barrier()
    kind = type(model)
    placed: nn.Module = kind.from_pretrained(  # type: ignore[attr-defined]
        folder, distributed_config=DistributedConfig(**sizes), local_files_only=True
    )
    return placed.train()


def transformers_tp(subject: Subject, model: nn.Module, job: Job) -> Running:
    """Transformers' own plan, `tp_plan="auto"` over all ranks, which have the same rows."""
    placed = _pretrained(subject, model, job, tp_plan="auto")
    optimizer = adam(list(placed.parameters()))

    def step(batch: Batch) -> Tensor:
        loss = subject.loss(placed, batch)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    return Running(step)


def transformers_fsdp(subject: Subject, model: nn.Module, job: Job) -> Running:
    """Transformers' FSDP2; over nodes a replica a node, as `DistributedConfig` suggests."""
    sizes = {"fsdp_size": job.size // job.nodes}
    if job.nodes > 1:
        sizes["dp_replicate_size"] = job.nodes
    placed = _pretrained(subject, model, job, **sizes)
    return _loop(subject, placed, placed, job)


def ours(subject: Subject, model: nn.Module, job: Job, **options: object) -> Running:
    """`auto_parallelize` on facts that were measured by this job."""
    from advisor import auto_parallelize

    parallel = auto_parallelize(
        model,
        sample=job.rows(subject.batch(0)),
        loss_fn=subject.loss_fn,
        optimizer=adam,
        global_batch_size=ROWS,
        cluster=job.cluster,
        learns=False,
        **options,
    )

    def step(batch: Batch) -> Tensor:
        return parallel.train_step(share(batch, parallel.data_rank, parallel.data_world_size))

    return Running(step, str(parallel.plan))


OURS, OURS_FASTEST, OURS_LOSSY = "ours", "ours, objective=time", "ours, lossy allowed"
PLAIN, FRUGAL = "DDP by hand", "FSDP2 by hand, checkpointed rows"
SCRIPTS: dict[str, Script] = {
    OURS: ours,
    OURS_FASTEST: functools.partial(ours, objective="time"),
    OURS_LOSSY: functools.partial(ours, allow_lossy=True),
    PLAIN: ddp,
    "DDP by hand, fp16 hook": ddp_fp16,
    "DDP by hand, PowerSGD hook": ddp_powersgd,
    "FSDP2 by hand": fsdp2,
    FRUGAL: fsdp2_frugal,
    "Accelerate": accelerate,
    "Accelerate FSDP2": accelerate_fsdp2,
    "DeepSpeed ZeRO-2": functools.partial(_deepspeed, 2),
    "DeepSpeed ZeRO-3": functools.partial(_deepspeed, 3),
    "Transformers tp_plan=auto": transformers_tp,
    "Transformers FSDP2": transformers_fsdp,
}
LOSSY = (OURS_LOSSY, "DDP by hand, fp16 hook", "DDP by hand, PowerSGD hook")
"""They round gradients: compared among themselves, and with a wider bound of the loss."""
NEEDS = {
    "Accelerate": "accelerate",
    "DeepSpeed": "deepspeed",
    "Transformers": "transformers",
}
"""Packages by the first word of a script."""
