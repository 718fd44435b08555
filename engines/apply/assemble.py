"""Assemble the parallel model: optimizer, exchange of updates, and what its user calls."""

from __future__ import annotations

from dataclasses import replace

import torch

from engines.apply.build import Build
from engines.data.loss_scale import NAME as LOSS_SCALE
from engines.data.loss_scale import LossScaler
from engines.data.noise_scale import NoiseMeter
from engines.offload.pool import steps_offloaded
from engines.offload.states import OffloadedStates
from engines.optional.async_updates.build import build_exchange, served_parameters
from engines.parallel import ParallelModel
from engines.runtime.failures import all_ranks_succeed
from engines.runtime.module_generators import share_generators
from engines.runtime.rank_agreement import require_agreement
from engines.state.local_step import step_local_parts
from engines.state.optimizer import build_optimizer
from engines.state.optimizer_settings import optimizer_topics
from engines.state.sharded_step import require_steps_shards


def assemble(build: Build) -> ParallelModel:
    """The optimizer of what this rank holds, the exchange of updates, and the parallel model."""
    model, plan, world, training = build.model, build.plan, build.world, build.training
    served = served_parameters(plan, model, world)
    with all_ranks_succeed("building the optimizer", timeout_s=world.timeout_s):
        optimizer = build_optimizer(
            training.optimizer,
            model=model,
            names_before=build.names,
            layout=build.layout,
            served=served,
        )
        if not step_local_parts(optimizer):
            require_steps_shards(optimizer, plan=plan)
    part = f"stage {build.mesh.pp.position}" if served is None else f"server {world.rank}"
    require_agreement(optimizer_topics(optimizer, part=part), world)
    if build.pool is not None:
        if steps_offloaded(plan):
            OffloadedStates(optimizer, build.pool)
        build.pool.is_training = True
    exchange = build_exchange(
        plan, model, optimizer, outer=training.outer_optimizer, profile=build.profile, world=world
    )
    if exchange is not None and exchange.outer is not None:
        outer = optimizer_topics(exchange.outer, part="", noun="outer optimizer")
        require_agreement(outer, world)
    scaler = LossScaler(model, is_on=build.mixed is torch.float16)
    parallel = ParallelModel(
        model,
        build.runner,
        plan=plan,
        profile=build.profile,
        world=world if exchange is None else replace(world, size=1),
        job=world,
        mesh=build.mesh,
        layout=build.layout,
        optimizer=optimizer,
        loss_fn=build.loss_fn,
        loss_weight=training.loss_weight,
        loss_parts=build.parts,
        max_grad_norm=training.max_grad_norm,
        on_nonfinite=training.on_nonfinite,
        check_replicas_every=training.check_replicas_every,
        autocast_to=None if plan.data_parallel.is_sharded else build.mixed,
        scaler=scaler,
        seed=training.seed,
        pipeline=build.pipeline,
        split=build.tensor,
        noise=NoiseMeter(model, plan, device=world.device) if training.measure_noise else None,
        exchange=exchange,
        context=build.context,
        experts=build.experts,
        offload_pool=build.pool,
    )
    if not world.is_fake:
        share_generators(model, build.mesh.tp, world.device)
    parallel.plan = build.requested
    if scaler.is_on:
        parallel.register(**{LOSS_SCALE: scaler})
    if training.scheduler is not None:
        with all_ranks_succeed("building the scheduler", timeout_s=world.timeout_s):
            parallel.follow_schedule(training.scheduler)
    return parallel
