"""Build a rank's side of asynchronous or periodic updates: server, worker or replica."""

from __future__ import annotations

from datetime import timedelta
from itertools import product

import torch
import torch.distributed as dist
from torch import nn

from engines.optional.async_updates.agreement import FIRST
from engines.optional.async_updates.exchange import UpdateExchange
from engines.optional.async_updates.link import links
from engines.optional.async_updates.partition import partition
from engines.optional.async_updates.periodic import PeriodicExchange, nesterov
from engines.optional.async_updates.server import ParameterServer
from engines.optional.async_updates.server_rank import ServerExchange
from engines.optional.async_updates.worker_rank import WorkerExchange
from engines.plan import Plan, Updates
from engines.runtime.world import World
from engines.state.optimizer import OptimizerFactory
from profiles.errors import PlanError
from profiles.model.profile import ModelProfile


def served_parameters(plan: Plan, model: nn.Module, world: World) -> frozenset[str] | None:
    """Names of the parameters that this rank serves; None where it serves none.

    Raises:
        PlanError: there are more servers than tensors.
    """
    if world.rank >= plan.servers:
        return None
    names = [name for name, parameter in model.named_parameters() if parameter.requires_grad]
    if plan.servers > len(names):
        raise PlanError(
            f"servers={plan.servers} partition whole tensors, the model trains {len(names)}",
            where=f"plan: {plan}",
            hints=[f"set servers to {len(names)} or less"],
        )
    return frozenset(names[number] for number in _partition(plan, model)[world.rank])


def build_exchange(
    plan: Plan,
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    *,
    outer: OptimizerFactory | None,
    profile: ModelProfile,
    world: World,
) -> UpdateExchange | None:
    """Build this rank's side of the plan's updates; None where replicas exchange gradients in every
    step, which the other engines do. All ranks call it.

    Args:
        optimizer: of this rank; on a server of the parameters that it serves.
        outer: makes the outer optimizer of DiLoCo; None is the paper's.
    """
    if plan.updates_in_step:
        return None
    if plan.updates.is_periodic:
        is_diloco = plan.updates is Updates.DILOCO
        return PeriodicExchange(
            model.parameters(),
            optimizer,
            outer=(outer or nesterov) if is_diloco else None,
            every=plan.sync_every,
            buffers=model.buffers() if profile.batch_norms else (),
            world=world,
        )
    trainable = [p for p in model.parameters() if p.requires_grad]
    parts = [[trainable[number] for number in part] for part in _partition(plan, model)]
    serving, working = range(plan.servers), range(plan.servers, world.size)
    worker_links = links(product(serving, working), world, servers=plan.servers)
    agree = plan.backup_workers > 0 and plan.servers > 1
    pairs = [(FIRST, server) for server in serving[1:] if agree]
    peers = links(pairs, world, servers=plan.servers)
    bound = timedelta(seconds=world.timeout_s)
    servers = dist.new_group(list(range(plan.servers)), backend="gloo", timeout=bound)
    is_synchronous = plan.updates is Updates.SYNCHRONOUS
    if world.rank < plan.servers:
        core = ParameterServer(
            parts[world.rank],
            optimizer,
            workers=worker_links,
            needed=plan.data_degree if is_synchronous else None,
            max_staleness=plan.max_staleness,
            decides=not agree,
        )
        in_step = is_synchronous and not plan.backup_workers
        return ServerExchange(
            core,
            worker_links,
            peers=peers,
            in_step=in_step,
            parts=parts,
            servers=servers,
            world=world,
        )
    return WorkerExchange(
        worker_links,
        dict(enumerate(parts)),
        optimizer,
        replica=world.rank - plan.servers,
        replicas=plan.data_degree + plan.backup_workers,
        skips=plan.backup_workers > 0,
        shares_loss=is_synchronous,
        world=world,
    )


def _partition(plan: Plan, model: nn.Module) -> list[list[int]]:
    sizes = [parameter.nbytes for parameter in model.parameters() if parameter.requires_grad]
    return partition(sizes, plan.servers)
