"""Prepare a model: what its plan needs is opened, its splits are proved, its ranks are equal."""

from __future__ import annotations

from itertools import chain

from engines.apply.build import Build
from engines.apply.proofs import (
    Proofs,
    agree_on_parts,
    prove_layers,
    prove_sequence,
    see_parts,
)
from engines.blocks.compile import require_unchanged
from engines.data.batch_norm import warn_of_microbatches
from engines.offload.pool import Folder, open_pool
from engines.optional.data_parallel import one_process_plan
from engines.optional.manual_placement import target_to_output, world_of_parts
from engines.plan import DataParallel
from engines.runtime.broadcast import send_from_first
from engines.runtime.failures import all_ranks_succeed
from engines.runtime.mesh import Mesh
from engines.state.layout import Layout
from engines.state.materialise import deferred_weights_of
from engines.state.optimizer import names_of
from engines.state.weights import Weights
from profiles.capture.batch.call import Batch


def prepare(
    build: Build,
    sample: Batch | None,
    weights: Weights | None,
    folder: Folder | None,
    proofs: Proofs,
) -> None:
    """Open what the plan needs, prove its splits, and give all ranks the same parameters."""
    model, world = build.model, build.world
    if build.plan.data_parallel is DataParallel.THREADS:
        build.plan = one_process_plan(build.plan)
    plan = build.plan
    with all_ranks_succeed("opening the folder of offloaded tensors", timeout_s=world.timeout_s):
        build.pool = open_pool(plan, world.device, folder)
    with all_ranks_succeed("opening the weights", timeout_s=world.timeout_s):
        build.weights = deferred_weights_of(model, weights, world=world, seed=build.training.seed)
    with all_ranks_succeed("proving the split of layers", timeout_s=world.timeout_s):
        build.layers = prove_layers(build, sample, proofs.layers)
    with all_ranks_succeed("proving the split of sequences", timeout_s=world.timeout_s):
        build.sequence = prove_sequence(build, sample, proofs.sequence)
    if plan.compile:
        with all_ranks_succeed("looking at compiled blocks", timeout_s=world.timeout_s):
            has_target = build.loss_fn is not None
            require_unchanged(model, sample, plan, profile=build.profile, has_target=has_target)
    with all_ranks_succeed("comparing the loss of parts", timeout_s=world.timeout_s):
        seen = see_parts(build, sample)
    build.parts = agree_on_parts(build, sample, seen)
    if world.rank == 0:
        warn_of_microbatches(model, plan)
    if build.is_placed:
        build.world = world = world_of_parts(model, world)
        build.loss_fn = target_to_output(build.loss_fn)
    build.names = names_of(model)
    model.zero_grad(set_to_none=True)  # gradients of an earlier training would be added to ours
    build.mesh = Mesh(plan, world) if plan.updates_in_step else Mesh.of_one(world)
    build.layout = Layout(model, build.mesh, device=world.device)
    if world.size > 1:
        send_from_first(chain(model.parameters(), model.buffers()), world.device)
