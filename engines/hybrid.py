"""The order in which a plan is applied: one readable function."""

from __future__ import annotations

from collections.abc import Callable
from itertools import chain
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

from engines.batch_norm import synchronise_batch_norms, warn_of_microbatches
from engines.ddp import replicate
from engines.failures import together
from engines.footprint import whole_because
from engines.fsdp import shard
from engines.legality import numerics, require_legal
from engines.materialise import Materials, materials_of
from engines.optimizer import (
    OptimizerFactory,
    build_optimizer,
    names_of,
    send_from_rank_zero,
)
from engines.parallel import LossFn, ParallelModel
from engines.plan import DataParallel, Plan
from engines.recompute import recompute_blocks
from engines.weights import Weights
from engines.world import World, data_mesh, in_contact, join_world, require_same_plan
from profiles.batch import Batch
from profiles.cluster import ClusterProfile
from profiles.errors import ModelError
from profiles.model import ModelProfile, Numerics

if TYPE_CHECKING:
    from engines.pipeline.pipeline import Pipeline


@in_contact("applying the plan")
def apply_plan(
    model: nn.Module,
    plan: Plan,
    *,
    profile: ModelProfile,
    cluster: ClusterProfile,
    loss_fn: LossFn | None = None,
    optimizer: torch.optim.Optimizer | OptimizerFactory | None = None,
    count: Callable[[Batch], float | Tensor] | None = None,
    max_grad_norm: float | None = None,
    weights: Weights | None = None,
    world: World | None = None,
    seed: int = 0,
) -> ParallelModel:
    """Spread `model` as `plan` says, in place; all ranks call it with the same plan.

    Nothing is chosen here: the plan says everything, the profile says which modules are units, and
    what cannot be done is refused before any work. Rank 0's parameters and buffers are sent to all
    ranks, so the ranks may have built the model from different seeds.

    Args:
        model: any module; its class, names and code stay as they are. One on the meta device needs
            `weights`.
        profile: of this model, from `profiles.capture`.
        cluster: the devices of this job.
        loss_fn: loss_fn(output, target) for tuple batches, loss_fn(output, batch) for dicts; None
            where the model returns its loss.
        optimizer: a factory, an optimizer built on `model`, or None for AdamW.
        count: what a microbatch's mean loss is a mean over, where that is not its rows:
            `lambda batch: (batch["labels"] != -100).sum()`.
        max_grad_norm: clip gradients in `train_step`.
        weights: of a model on the meta device: init(module), which fills the parameters and buffers
            that a module holds itself and draws from torch's generator only; tensors by name; or a
            path to safetensors files. A rank takes what it holds, and nothing else is read.
        seed: of the shuffling in `ParallelModel.shard`, and of an init function.

    Raises:
        PlanError: the plan is not possible for this model on these ranks.
        PlanMismatchError, RankError: ranks disagree, or one is missing.
        ModelError: parameters without values (meta device, and no `weights`), or nothing to train.
    """
    world = world or join_world()
    require_same_plan(plan, world)
    whole = whole_because(optimizer) if plan.data_parallel.is_sharded else ""
    require_legal(plan, profile, cluster, whole_because=whole)
    _require_plain(model)
    materials = materials_of(model, weights, world=world, seed=seed)
    if world.rank == 0:
        warn_of_microbatches(model, plan)
    mixed = numerics(plan, profile) is not Numerics.AS_BUILT
    names_before = names_of(model)
    model.zero_grad(set_to_none=True)  # gradients of an earlier life would be added to ours

    if world.size > 1:
        send_from_rank_zero(chain(model.parameters(), model.buffers()), world.device)
    if plan.sync_batch_norm and world.size > 1:
        model = synchronise_batch_norms(model, world.device)
    recompute_blocks(model, plan.recompute, profile=profile)
    pipeline = _pipeline(model, plan, profile=profile, world=world, loss_fn=loss_fn)
    kept = pipeline.kept if pipeline is not None else None
    if materials is not None and (pipeline is not None or not plan.data_parallel.is_sharded):
        with together("reading the weights", timeout_s=world.timeout_s):
            materials.fill(model, kept=kept, device=world.device)
    runner = _data_parallel(
        model, plan, profile=profile, world=world, mixed=mixed, materials=materials
    )
    built = build_optimizer(optimizer, model=model, names_before=names_before, kept=kept)

    return ParallelModel(
        model,
        runner,
        plan=plan,
        profile=profile,
        world=world,
        optimizer=built,
        loss_fn=loss_fn,
        count=count,
        max_grad_norm=max_grad_norm,
        runs_autocast=mixed and not plan.data_parallel.is_sharded,
        seed=seed,
        pipeline=pipeline,
    )


def _pipeline(
    model: nn.Module, plan: Plan, *, profile: ModelProfile, world: World, loss_fn: LossFn | None
) -> Pipeline | None:
    """This rank's stages. Those of the others are freed here, before anything is moved."""
    if plan.pp == 1:
        return None
    from engines.pipeline.pipeline import Pipeline  # torch's pipelining takes a while to import

    return Pipeline(
        model,
        plan,
        flow=profile.flow,
        device=world.device,
        timeout_s=world.timeout_s,
        loss_fn=loss_fn,
    )


def _data_parallel(
    model: nn.Module,
    plan: Plan,
    *,
    profile: ModelProfile,
    world: World,
    mixed: bool,
    materials: Materials | None = None,
) -> Callable[..., object]:
    """Replicate or shard; what to call for a forward."""
    mesh = data_mesh(plan, world)
    if mesh is not None and plan.data_parallel.is_sharded:
        # FSDP2 moves unit by unit, so the whole model never sits on the device.
        fill = materials.fill if materials is not None else None
        with together("sharding", timeout_s=world.timeout_s):
            shard(model, plan, profile=profile, mesh=mesh, mixed=mixed, fill=fill)
        return model
    model.to(world.device)
    if plan.data_parallel is DataParallel.REPLICATE:
        return replicate(model, profile=profile, world=world)
    return model


def _require_plain(model: nn.Module) -> None:
    wrapped = (ParallelModel, FSDPModule, DistributedDataParallel)
    if isinstance(model, wrapped) or any(isinstance(p, DTensor) for p in model.parameters()):
        raise ModelError(
            f"the model is parallel already (a {type(model).__name__})",
            hints=["build it anew, and apply the plan to the plain module"],
        )
