"""Rules of gradient aggregation and compression. No torch here."""

from __future__ import annotations

from collections.abc import Iterator

from engines.legality.problem import Problem
from engines.plan import Aggregation, Compression, DataParallel, Plan
from profiles.machine.cluster import ClusterProfile
from profiles.model.profile import ModelProfile


def aggregation(plan: Plan, model: ModelProfile, cluster: ClusterProfile) -> Iterator[Problem]:
    """DDP's communication hook takes buckets of dense gradients of a whole model."""
    named = plan.said("aggregation", "compression")
    if plan.compression_rank > 1 and plan.compression is not Compression.POWERSGD:
        yield Problem(
            rule="rank-without-powersgd",
            what=f"compression_rank={plan.compression_rank} is PowerSGD's, compression is"
            f" {plan.compression}",
            hint="add compression=powersgd, or leave compression_rank out",
        )
    if plan.said("bucket_mib") and (
        plan.data_parallel is not DataParallel.REPLICATE or plan.pp > 1
    ):
        yield Problem(
            rule="bucket-without-ddp",
            what=f"bucket_mib={plan.bucket_mib} is for DDP without stages, data_parallel is"
            f" {plan.data_parallel}, pp={plan.pp}",
            hint="leave bucket_mib out, or replicate (dp_replicate)",
        )
    if not named:
        return
    is_ddp = plan.data_parallel is DataParallel.REPLICATE and plan.dp_replicate > 1
    if not is_ddp or plan.pp * plan.tp * plan.cp > 1:
        cut = plan.said("pp", "tp", "cp")
        yield Problem(
            rule="aggregation-without-ddp",
            what=f"{named} is for DDP of a whole model, data_parallel is {plan.data_parallel}"
            + (f", {cut}" if cut else ""),
            hint=f"leave it out, or replicate (dp_replicate={max(plan.world_size, 2)} alone)",
        )
    if not plan.updates_in_step:
        how = plan.said("updates", "servers")
        yield Problem(
            rule="aggregation-of-async-updates",
            what=f"{named} is for gradients that DDP averages in every step, {how} averages none",
            hint=f"leave out {named}, or {how}",
        )
    if model.sparse_gradients:
        yield Problem(
            rule="sparse-gradients",
            what=f"`{model.sparse_gradients[0]}` has sparse gradients; {named} needs dense ones",
            hint="build the embedding with sparse=False, or leave it out",
        )
    yield from _nodes(plan, cluster)
    yield from _lossy(plan, model)


def _nodes(plan: Plan, cluster: ClusterProfile) -> Iterator[Problem]:
    """Without several nodes of several devices there is no hierarchy."""
    if (
        plan.aggregation is Aggregation.HIERARCHICAL
        and min(cluster.num_nodes, cluster.devices_per_node) < 2
    ):
        yield Problem(
            rule="hierarchy-without-nodes",
            what="aggregation=hierarchical goes inside nodes and then between them,"
            f" {cluster.name} has {cluster.num_nodes} x {cluster.devices_per_node} devices",
            hint="leave it out: the backend's own is a ring already",
        )


def _lossy(plan: Plan, model: ModelProfile) -> Iterator[Problem]:
    if plan.compression is Compression.POWERSGD and plan.aggregation is not Aggregation.BACKEND:
        yield Problem(
            rule="powersgd-own-sums",
            what="compression=powersgd sums up its factors by the backend, aggregation is"
            f" {plan.aggregation}",
            hint="leave aggregation out",
        )
    if plan.compression is not Compression.NONE and model.dtype != "float32":
        yield Problem(
            rule="compression-dtype",
            what=f"compression={plan.compression} wants fp32 gradients, those of {model.name} are"
            f" {model.dtype}",
            hint="leave it out, or build the model in float32 (precision=bf16 may still compute)",
        )
