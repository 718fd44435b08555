"""Shard or replicate a model over the data axes."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from functools import partial
from itertools import chain

from torch import Tensor, nn

from engines.apply.build import Build
from engines.data.ddp import replicate
from engines.data.dense_gradients import make_gradients_dense
from engines.data.fsdp import shard as shard_units
from engines.data.fsdp import shard_experts
from engines.offload.shards import offload_shards
from engines.optional.aggregation.hooks import register_gradient_hook
from engines.optional.data_parallel import data_parallel
from engines.plan import DataParallel, OffloadTo
from engines.runtime.failures import all_ranks_succeed


def shard(build: Build) -> None:
    """Shard or replicate over the data axes; experts over the ranks that hold the same ones.

    Parameters on the meta device get their values once they are sharded.
    """
    build.runner = build.model
    make_gradients_dense(build.model, build.requested)
    if build.mesh.expert_shards is not None:
        _shard_experts(build)
    if build.mesh.shards is not None:
        _shard_parameters(build)
        _fill(build)
        return
    _allocate(build, _tensors(build.model))
    _fill(build)
    if not build.is_placed:
        build.model.to(build.world.device)
    # Replicas of a pipeline average their gradients at the end of a step. So do those of models
    # with unused parameters and sharded logits: to find the former DDP flattens outputs.
    averages_itself = build.pipeline is not None or (
        build.plan.tp * build.plan.loss_chunks > 1 and build.profile.may_skip_parameters
    )
    if build.mesh.replicas.size > 1 and not averages_itself:
        _replicate(build)
    if build.requested.data_parallel is DataParallel.THREADS:
        build.runner = data_parallel(build.model, build.requested, build.world, build.mixed)


def _allocate(build: Build, tensors: Iterable[Tensor]) -> None:
    """Give memory to tensors of the model that have none."""
    if build.weights is not None:
        build.weights.allocate(build.model, tensors, device=build.world.device)


def _tensors(module: nn.Module) -> Iterator[Tensor]:
    return chain(module.parameters(), module.buffers())


def _fill(build: Build) -> None:
    weights, timeout_s = build.weights, build.world.timeout_s
    if weights is not None:
        with all_ranks_succeed("filling the weights", timeout_s=timeout_s):
            weights.fill(build.model, build.layout.placed)
    build.weights = None


def _shard_experts(build: Build) -> None:
    experts, mesh = build.experts, build.mesh
    assert experts is not None
    assert mesh.expert_shards is not None
    modules = experts.release()
    with all_ranks_succeed("sharding the experts", timeout_s=build.world.timeout_s):
        for module in modules:
            _allocate(build, _tensors(module))
        shard_experts(
            modules,
            build.plan,
            mesh=mesh.expert_shards,
            replicas=mesh.replicas.size,
            mixed=build.mixed,
        )


def _shard_parameters(build: Build) -> None:
    """Shard parameters unit by unit: the whole model is never on the device."""
    plan, mesh, pool = build.plan, build.mesh, build.pool
    assert mesh.shards is not None
    in_files = plan.offload.states and plan.offload_to is OffloadTo.DISK
    with all_ranks_succeed("sharding", timeout_s=build.world.timeout_s):
        whole = build.experts.parameters if build.experts is not None else set()
        _allocate(build, whole)
        shard_units(
            build.model,
            plan,
            profile=build.profile,
            mesh=mesh.shards,
            mixed=build.mixed,
            local=build.local,
            read_later=build.profile.units[-2].name if plan.loss_chunks > 1 else None,
            ignored=build.experts.parameters if build.experts is not None else (),
            allocate=partial(_allocate, build),
            offload=partial(offload_shards, pool=pool) if pool is not None and in_files else None,
        )


def _replicate(build: Build) -> None:
    plan, mesh, model = build.plan, build.mesh, build.model
    group = mesh.replicas.group
    assert group is not None  # there are several
    ignored = build.experts.parameters if build.experts is not None else set()
    runner = replicate(
        model,
        profile=build.profile,
        device=None if build.is_placed else build.world.device,
        group=group,
        ignored=[name for name, parameter in model.named_parameters() if parameter in ignored],
        bucket_mib=plan.bucket_mib if plan.said("bucket_mib") else None,
    )
    per_node = build.cluster.ranks_per_node(mesh.replicas.size, plan.tp)
    register_gradient_hook(runner, plan, group=group, per_node=per_node)
    build.runner = runner
