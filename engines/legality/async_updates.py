"""Rules of asynchronous and periodic updates. No torch here."""

from __future__ import annotations

from collections.abc import Iterator

from engines.legality.problem import Problem
from engines.plan import MODEL_AXES, DataParallel, Plan, Updates
from profiles.machine.cluster import ClusterProfile
from profiles.model.profile import ModelProfile

_WHOLE = (DataParallel.NONE, DataParallel.REPLICATE)


def updates(plan: Plan, model: ModelProfile, cluster: ClusterProfile) -> Iterator[Problem]:
    """Ranks that update on their own are whole replicas; servers hold whole tensors."""
    yield from _settings(plan)
    if plan.updates_in_step:
        return
    how = plan.said("updates", "servers")
    yield from _replicas(plan, how)
    yield from _model(plan, model, how)


def _settings(plan: Plan) -> Iterator[Problem]:
    """Settings go with the kind of update that they are for."""
    kind, servers = plan.updates, plan.servers
    if kind.is_periodic and servers:
        yield Problem(
            rule="updates-servers",
            what=f"updates={kind} has no servers: replicas average among themselves, servers is"
            f" {servers}",
            hint="leave servers out, or take updates=asynchronous",
        )
    if kind is Updates.ASYNCHRONOUS and not servers:
        yield Problem(
            rule="updates-servers",
            what="asynchronous updates need a server that applies them, servers is 0",
            hint="set servers=1, or take updates=local, which needs none",
        )
    if plan.sync_every > 1 and not kind.is_periodic:
        yield Problem(
            rule="updates-period",
            what=f"sync_every={plan.sync_every} is for replicas that update on their own, updates"
            f" is {kind}",
            hint=f"set updates=local or updates=diloco, or accumulation={plan.sync_every} to send"
            " as rarely with replicas in step",
        )
    if plan.backup_workers and (kind is not Updates.SYNCHRONOUS or not servers):
        yield Problem(
            rule="updates-backup",
            what=f"backup_workers={plan.backup_workers} replace the slowest of a synchronous"
            f" step on servers; updates is {kind}, servers is {servers}",
            hint="set updates=synchronous servers=1, or leave backup_workers out",
        )
    if plan.max_staleness is not None and kind is not Updates.ASYNCHRONOUS:
        yield Problem(
            rule="updates-staleness",
            what=f"max_staleness={plan.max_staleness} bounds asynchronous updates, updates is"
            f" {kind}",
            hint="leave it out, or set updates=asynchronous",
        )


def _replicas(plan: Plan, how: str) -> Iterator[Problem]:
    """Whole replicas, one a rank."""
    cut = plan.said(*MODEL_AXES)
    if cut:
        yield Problem(
            rule="updates-replicas",
            what=f"{how} needs the whole model on every rank, the plan says {cut}",
            hint="leave the degree out: dp_replicate alone",
        )
    if plan.data_parallel not in _WHOLE:
        yield Problem(
            rule="updates-replicas",
            what=f"{how} needs the whole model on every rank, data_parallel is"
            f" {plan.data_parallel}",
            hint=f"write dp_replicate={plan.data_degree} and leave zero and dp_shard out",
        )
    if plan.updates.is_periodic and plan.data_degree < 2:
        yield Problem(
            rule="updates-replicas",
            what=f"{how} averages replicas, there is one",
            hint="leave updates out, or set dp_replicate",
        )
    if plan.sync_batch_norm:
        yield Problem(
            rule="updates-batch-norm",
            what=f"sync_batch_norm needs all replicas in every forward, which {how} does not have",
            hint="set sync_batch_norm=false",
        )


def _model(plan: Plan, model: ModelProfile, how: str) -> Iterator[Problem]:
    """Refuse models that servers cannot hold or step."""
    if plan.servers and model.batch_norms:
        yield Problem(
            rule="updates-batch-norm",
            what=f"`{model.batch_norms[0]}` is a batch norm: its running statistics are made by"
            " forwards, which servers do not run",
            hint="take updates=local or diloco, or group norms",
        )
    if model.sparse_gradients:
        yield Problem(
            rule="updates-sparse",
            what=f"`{model.sparse_gradients[0]}` has sparse gradients, {how} sends flat messages",
            hint="build the embedding with sparse=False, or leave updates and servers out",
        )
    if model.flow.written:
        yield Problem(
            rule="updates-written",
            what=f"the forward changes its own parameter `{model.flow.written[0]}`, which {how}"
            " would overwrite",
            hint="make it a buffer, or leave updates and servers out",
        )
