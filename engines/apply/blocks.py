"""Change how parts run on this rank: products in 8 bits, chunked loss, recompute, offloaded
activations, compile."""

from __future__ import annotations

from engines.apply.build import Build
from engines.blocks.chunked_loss import chunk_loss
from engines.blocks.compile import compile_blocks
from engines.blocks.eight_bits import multiply_in_eight_bits
from engines.blocks.recompute import recompute_blocks, recomputed
from engines.offload.activations import offload_activations
from engines.plan import Precision
from engines.runtime.failures import all_ranks_succeed
from profiles.workload.losses import head_of


def narrow(build: Build) -> None:
    """Multiply in 8 bits, where the plan does."""
    world = build.world
    if build.plan.precision is Precision.FP8:
        with all_ranks_succeed("multiplying in 8 bits", timeout_s=world.timeout_s):
            multiply_in_eight_bits(
                build.model, tp=build.plan.tp, profile=build.profile, device=world.device
            )


def chunk(build: Build) -> None:
    """Compute head and loss together, a part of the tokens at a time."""
    if build.plan.loss_chunks > 1:
        head = head_of(build.profile.units)
        assert head is not None  # the plan is legal
        with all_ranks_succeed("chunking the loss", timeout_s=build.world.timeout_s):
            chunk_loss(build.model, build.plan, head.name)


def recompute(build: Build) -> None:
    """Checkpoint blocks, and offload the activations that they keep."""
    plan = build.plan
    names = recomputed(plan, build.profile)
    recompute_blocks(build.model, names, plan, draws=build.parts.draws)
    if build.pool is not None and build.plan.offload.activations:
        offload_activations(build.model, build.pool, profile=build.profile)


def compile_(build: Build) -> None:
    """Let torch.compile take every block of this rank."""
    if build.plan.compile:
        compile_blocks(build.model, profile=build.profile, local=build.local)
