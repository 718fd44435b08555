"""The order in which a plan is applied: one readable function.

It makes every combination of stages (pp), split layers (tp) and replicas or shards, by the names
that papers and manuals give them:

    PP + TP + DP                 pp=2 tp=2 dp_replicate=2: "3D parallelism"; DDP of a model that
                                 itself spans devices
    DP + PP + TP + ZeRO-1        the same with zero=1: optimizer states sharded over the replicas
    PP x TP x ZeRO-3 or HSDP     dp_shard, or dp_replicate and dp_shard

From the outside in: stages first, so that nothing else is done to parameters that a rank will not
keep. Then layers are split, then blocks recompute and are compiled as they will run, and what is
left on the rank is replicated or sharded over the data axes. Where ranks update apart (servers,
local SGD) each is a job of its own, but for its exchange. Recordings of a pipeline are made of the
model as it was before all this.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from itertools import chain
from typing import TYPE_CHECKING

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

from engines.blocks.compile import compile_blocks, require_compilable
from engines.blocks.recompute import recompute_blocks
from engines.context.context import Context
from engines.context.proof import Proof, prove
from engines.data.batch_norm import synchronise_batch_norms, warn_of_microbatches
from engines.data.ddp import replicate
from engines.data.fsdp import shard, shard_experts
from engines.data.microbatches import Count
from engines.data.noise_scale import NoiseMeter, require_measurable
from engines.experts.experts import Experts
from engines.legality import numerics, require_legal
from engines.offload.activations import offload_activations
from engines.offload.room import Folder, Room, room_of, steps_away
from engines.offload.shards import keep_shards
from engines.offload.states import AwayStates
from engines.optional.aggregation.hooks import send_as_planned
from engines.optional.async_updates.build import exchange_of, served_by
from engines.optional.data_parallel import driven, over_threads, require_devices
from engines.optional.manual_placement import as_placed, beside_output, world_of
from engines.parallel import LossFn, ParallelModel
from engines.plan import DataParallel, OffloadTo, Plan, Recompute
from engines.runtime.failures import together
from engines.runtime.mesh import Mesh
from engines.runtime.world import World, in_contact, join_world, require_same_plan
from engines.state.layout import Layout
from engines.state.materialise import materials_of
from engines.state.optimizer import OptimizerFactory, build_optimizer, names_of, send_from_first
from engines.state.optimizer_footprint import together_because, whole_because
from engines.state.weights import Weights
from engines.tensor.proved import proved
from engines.tensor.split import split_over
from engines.tensor.variants import Styles
from profiles.batch import Batch
from profiles.cluster import ClusterProfile
from profiles.errors import ModelError, PlanError
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
    count: Count | None = None,
    max_grad_norm: float | None = None,
    sample: Batch | None = None,
    weights: Weights | None = None,
    outer_optimizer: OptimizerFactory | None = None,
    world: World | None = None,
    seed: int = 0,
    measure_noise: bool = False,
    offload_folder: Folder | None = None,
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
        sample: one local batch, as for `capture`; with tp or cp > 1 what is split is proved on it.
        weights: of a model on the meta device: init(module), which fills the parameters and buffers
            that a module holds itself and draws from torch's generator only; tensors by name; or a
            path to safetensors files. A rank takes what it holds, and nothing else is read.
        outer_optimizer: a factory, for `updates=diloco`; None is the paper's Nesterov momentum.
        seed: of the shuffling in `ParallelModel.shard`, and of an init function.
        measure_noise: the gradient noise scale, for `ParallelModel.noise_scale`: reads the
            gradients twice more in every step.
        offload_folder: on a fast local disk, where the plan says `offload_to=disk`. Its files have
            no names, and are gone when the process ends.

    Raises:
        PlanError: the plan is not possible for this model on these ranks.
        PlanMismatchError, RankError: ranks disagree, or one is missing.
        ModelError: parameters without values (meta device, and no `weights`), or nothing to train.
    """
    world = world or join_world()
    require_same_plan(plan, world)
    profile = as_placed(profile, model)
    cuts_up = plan.data_parallel.is_sharded or plan.tp * plan.ep > 1
    whole = whole_because(optimizer) if cuts_up else ""
    require_legal(plan, profile, cluster, whole_because=whole)
    of_all, by_threads = plan, plan.data_parallel is DataParallel.THREADS
    if by_threads:
        require_devices(plan.dp_replicate, world, where=f"plan: {plan}")
        plan = driven(plan)
    if steps_away(plan):
        _require_apart(plan, together_because(optimizer))
    with together("opening the folder of what is offloaded", timeout_s=world.timeout_s):
        room = room_of(plan, world.device, offload_folder)
    if measure_noise:
        require_measurable(plan)
    _require_plain(model)
    materials = materials_of(model, weights, world=world, seed=seed)
    require_compilable(model, plan, profile=profile, device=world.device)
    with together("proving the split of layers", timeout_s=world.timeout_s):
        styles = _proved(
            model, plan, profile=profile, sample=sample, has_target=loss_fn is not None
        )
    with together("proving the parts of a sequence", timeout_s=world.timeout_s):
        proof = _proved_context(model, plan, sample=sample, loss_fn=loss_fn)
    if world.rank == 0:
        warn_of_microbatches(model, plan)
    stays = len(profile.devices) > 1
    if stays:
        world, loss_fn = world_of(model, world), beside_output(loss_fn)
    held = numerics(plan, profile)
    mixed = held is not Numerics.AS_BUILT
    names_before = names_of(model)
    model.zero_grad(set_to_none=True)  # gradients of an earlier life would be added to ours

    mesh = Mesh(plan, world) if plan.updates_in_step else Mesh.of_one(world)
    layout = Layout(model, mesh, device=world.device)
    if world.size > 1:
        send_from_first(chain(model.parameters(), model.buffers()), world.device)
    stages = _stages(
        model, plan, profile=profile, numerics=held, mesh=mesh, world=world, loss_fn=loss_fn
    )
    kept = stages.kept if stages is not None else None
    fill = None
    cuts_whole = stages is not None or plan.tp > 1 or plan.ep > 1
    if materials is not None and (cuts_whole or mesh.shards is None):
        with together("reading the weights", timeout_s=world.timeout_s):
            materials.fill(model, kept=kept, device=world.device)
    elif materials is not None:
        fill = materials.fill  # unit by unit, as they are sharded
    split = split_over(model, *styles, group=mesh.tp.group) if styles is not None else None
    experts = None
    if plan.ep > 1:
        with together("sharing out the experts", timeout_s=world.timeout_s):
            experts = Experts(model, mesh.ep, mesh.expert_copies, replicas=mesh.replicas.size)
    layout.lay_out(stages=stages, split=split, experts=experts)
    context = Context(model, proof, mesh.cp) if proof is not None else None
    if context is not None and plan.recompute is not Recompute.NONE:
        context.dress(model.get_submodule(unit.name) for unit in profile.blocks())
    if plan.sync_batch_norm and mesh.data.size > 1:
        model = synchronise_batch_norms(model, world.device, group=mesh.data.group)
    recompute_blocks(model, plan.recompute, profile=profile)
    if room is not None and plan.offload.activations:
        offload_activations(model, room, profile=profile)
    if plan.compile:
        compile_blocks(model, profile=profile, kept=kept)
    runner = _over_data_axes(
        model,
        plan,
        profile=profile,
        cluster=cluster,
        mesh=mesh,
        world=world,
        mixed=mixed,
        kept=kept,
        fill=fill,
        experts=experts,
        stays=stays,
        room=room if plan.offload.states and plan.offload_to is OffloadTo.DISK else None,
    )
    served = served_by(plan, model, world)
    if by_threads:
        runner = over_threads(model, of_all, world)
    built = build_optimizer(
        optimizer, model=model, names_before=names_before, layout=layout, served=served
    )
    if room is not None:
        if steps_away(plan):
            AwayStates(built, room)
        room.is_underway = True
    exchange = exchange_of(plan, model, built, outer=outer_optimizer, profile=profile, world=world)

    parallel = ParallelModel(
        model,
        runner,
        plan=plan,
        profile=profile,
        world=world if exchange is None else replace(world, size=1),
        job=world,
        mesh=mesh,
        layout=layout,
        optimizer=built,
        loss_fn=loss_fn,
        count=count,
        max_grad_norm=max_grad_norm,
        runs_autocast=mixed and not plan.data_parallel.is_sharded,
        seed=seed,
        pipeline=stages,
        split=split,
        noise=NoiseMeter(model, plan, device=world.device) if measure_noise else None,
        exchange=exchange,
        context=context,
        experts=experts,
        away=room,
    )
    parallel.plan = of_all
    return parallel


def _require_apart(plan: Plan, because: str) -> None:
    if because:
        raise PlanError(
            because,
            where=f"plan: {plan}",
            hints=["leave its states on the device (offload=none), or take AdamW"],
        )


def _proved_context(
    model: nn.Module, plan: Plan, *, sample: Batch | None, loss_fn: LossFn | None
) -> Proof | None:
    """How the model runs over a part of the tokens, after it was shown that it can."""
    if plan.cp == 1:
        return None
    if sample is None:
        raise PlanError(
            f"cp={plan.cp}: that tokens meet in attention alone is proved on a sample, and none was"
            " given",
            hints=["give `apply_plan(..., sample=batch)`"],
        )
    return prove(model, sample, loss_fn, size=plan.cp)


def _proved(
    model: nn.Module,
    plan: Plan,
    *,
    profile: ModelProfile,
    sample: Batch | None,
    has_target: bool,
) -> tuple[Styles, frozenset[str]] | None:
    """How every layer is split, after it was shown on copies that nothing else is computed."""
    if plan.tp == 1:
        return None
    if sample is None:
        raise PlanError(
            f"tp={plan.tp}: a split is proved on a sample before it is used, and none was given",
            hints=["give `apply_plan(..., sample=batch)`"],
        )
    return proved(
        model,
        sample,
        plan.tensor_styles,
        size=plan.tp,
        profile=profile,
        has_target=has_target,
    )


def _stages(
    model: nn.Module,
    plan: Plan,
    *,
    profile: ModelProfile,
    numerics: Numerics,
    mesh: Mesh,
    world: World,
    loss_fn: LossFn | None,
) -> Pipeline | None:
    """This rank's stages. Those of the others are freed here, before anything is moved."""
    if plan.pp == 1:
        return None
    from engines.pipeline.pipeline import Pipeline  # torch's pipelining takes a while to import

    return Pipeline(
        model,
        plan,
        profile=profile,
        numerics=numerics,
        mesh=mesh,
        device=world.device,
        loss_fn=loss_fn,
    )


def _over_data_axes(
    model: nn.Module,
    plan: Plan,
    *,
    profile: ModelProfile,
    cluster: ClusterProfile,
    mesh: Mesh,
    world: World,
    mixed: bool,
    kept: frozenset[str] | None,
    fill: Callable[[nn.Module], None] | None,
    experts: Experts | None,
    stays: bool,
    room: Room | None,
) -> Callable[..., object]:
    """Replicate or shard, but for `experts`; what to call for a forward. A model that `stays` is
    not moved: its author has put its parts where they are."""
    if experts is not None and mesh.expert_shards is not None:
        with together("sharding the experts", timeout_s=world.timeout_s):
            shard_experts(
                experts.hand_over(),
                plan,
                mesh=mesh.expert_shards,
                replicas=mesh.replicas.size,
                mixed=mixed,
            )
    apart = experts.parameters if experts is not None else set()
    if mesh.shards is not None:
        # FSDP2 moves unit by unit, so the whole model never sits on the device.
        with together("sharding", timeout_s=world.timeout_s):
            shard(
                model,
                plan,
                profile=profile,
                mesh=mesh.shards,
                mixed=mixed,
                kept=kept,
                apart=apart,
                fill=fill,
                keep=partial(keep_shards, room=room) if room is not None else None,
            )
        return model
    if not stays:
        model.to(world.device)
    if mesh.replicas.size == 1 or kept is not None:
        return model  # the replicas of a pipeline average their gradients when a step is over
    if plan.tp > 1 and profile.unused:
        return (
            model  # so do these: to find what is unused DDP takes outputs apart, split logits too
        )
    group = mesh.replicas.group
    assert group is not None  # there are several
    runner = replicate(
        model,
        profile=profile,
        device=None if stays else world.device,
        group=group,
        apart=[name for name, parameter in model.named_parameters() if parameter in apart],
    )
    per_node = cluster.ranks_per_node(mesh.replicas.size, plan.tp)
    send_as_planned(runner, plan, group=group, per_node=per_node)
    return runner


def _require_plain(model: nn.Module) -> None:
    wrapped = (ParallelModel, FSDPModule, DistributedDataParallel)
    if isinstance(model, wrapped) or any(isinstance(p, DTensor) for p in model.parameters()):
        raise ModelError(
            f"the model is parallel already (a {type(model).__name__})",
            hints=["build it anew, and apply the plan to the plain module"],
        )
