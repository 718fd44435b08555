"""Split a model over the model axes: stages, layers, experts and sequences."""

from __future__ import annotations

from engines.apply.build import Build
from engines.context.context import Context
from engines.data.batch_norm import synchronise_batch_norms
from engines.experts.experts import Experts
from engines.pipeline.recording import Shares
from engines.pipeline.stage_trial import require_own_units_suffice
from engines.plan import Recompute
from engines.runtime.failures import all_ranks_succeed
from engines.tensor.collectives import SEQUENCE
from engines.tensor.split import split_over
from profiles.capture.batch.call import Batch
from profiles.capture.batch.rows import batch_size, split_rows


def make_stages(build: Build, sample: Batch | None) -> None:
    """Keep this rank's pipeline stages and free the parameters of the others.

    Stages that cannot run, that need more than tensors of the others, or microbatches of several
    sizes, are refused on `sample`, where one is given.
    """
    if build.plan.pp == 1:
        return
    from engines.pipeline.pipeline import Pipeline  # torch's pipelining takes a while to import

    if sample is not None and not build.world.is_fake:
        with all_ranks_succeed("trying the stages", timeout_s=build.world.timeout_s):
            if build.world.rank == 0:
                require_own_units_suffice(
                    build.model, build.plan, sample, build.loss_fn, profile=build.profile
                )
    layers = build.layers
    build.pipeline = Pipeline(
        build.model,
        build.plan,
        profile=build.profile,
        numerics=build.numerics,
        mixed=build.mixed,
        mesh=build.mesh,
        device=build.world.device,
        loss_fn=build.loss_fn,
        shares=Shares(layers.hand_on_shares, SEQUENCE.dim, layers.size) if layers else Shares(),
    )
    if sample is not None:
        with all_ranks_succeed("recording the stages", timeout_s=build.world.timeout_s):
            build.pipeline.require_stages(sample)
            build.pipeline.require_equal_pieces(_pieces(sample, build))


def _pieces(sample: Batch, build: Build) -> list[Batch]:
    """Microbatches of the sample with as many rows each; of one row where it has too few."""
    dims = build.profile.batch_dims or None
    rows = batch_size(sample, dims)
    each = max(1, rows // build.plan.forwards)
    count = min(build.plan.forwards, rows // each)
    return split_rows(sample, [each] * count + [rows - each * count], dims)[:count]


def leave_out(build: Build) -> None:
    """Drop other stages' parameters of a model on the meta device; this rank's get their values
    once they are sharded."""
    if build.weights is not None and build.local is not None:
        build.weights.leave_out(build.model, build.local, device=build.world.device)


def split(build: Build) -> None:
    """Split layers over tp, experts over ep and sequences over cp."""
    model, plan, mesh, world = build.model, build.plan, build.mesh, build.world
    if build.layers is not None:
        build.tensor = split_over(
            model,
            build.layers.by_module,
            build.layers.partial,
            group=mesh.tp.group,
            lengths=build.pipeline.shares.lengths if build.pipeline is not None else None,
        )
    if plan.ep > 1:
        with all_ranks_succeed("sharding the experts over ep", timeout_s=world.timeout_s):
            build.experts = Experts(
                model,
                mesh.ep,
                mesh.expert_copies,
                replicas=mesh.replicas.size,
                local=build.local,
            )
    build.layout.lay_out(stages=build.pipeline, split=build.tensor, experts=build.experts)
    if build.sequence is not None:
        build.context = Context(model, build.sequence, mesh.cp)
        if plan.recompute is not Recompute.NONE:
            build.context.wrap(model.get_submodule(unit.name) for unit in build.profile.blocks())
    if plan.sync_batch_norm and mesh.data.size > 1:
        build.model = synchronise_batch_norms(model, world.device, group=mesh.data.group)
