"""Change how blocks run on this rank: recompute, offloaded activations, torch.compile."""

from __future__ import annotations

from engines.apply.build import Build
from engines.blocks.compile import compile_blocks
from engines.blocks.recompute import recompute_blocks
from engines.offload.activations import offload_activations


def recompute(build: Build) -> None:
    """Checkpoint blocks, and offload the activations that they keep."""
    recompute_blocks(build.model, build.plan.recompute, profile=build.profile)
    if build.pool is not None and build.plan.offload.activations:
        offload_activations(build.model, build.pool, profile=build.profile)


def compile_(build: Build) -> None:
    """Let torch.compile take every block of this rank."""
    if build.plan.compile:
        compile_blocks(build.model, profile=build.profile, local=build.local)
