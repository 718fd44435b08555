"""Owners of parameters in a pipeline: a rank holds those of its own stages, of others the shape."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch
from torch import nn

from engines.pipeline.segments import Segment, rank_of_stage
from engines.plan import Plan
from profiles.model.flow import Flow


def owners_of(plan: Plan, segments: Sequence[Segment]) -> dict[str, tuple[int, ...]]:
    """Positions on the pp axis that hold each parameter, ascending, by its first name."""
    owners: dict[str, set[int]] = {}
    for segment in segments:
        for name in segment.parameters:
            owners.setdefault(name, set()).add(rank_of_stage(plan, segment.index))
    return {name: tuple(sorted(ranks)) for name, ranks in owners.items()}


def buffer_owners(
    plan: Plan, segments: Sequence[Segment], flow: Flow, model: nn.Module
) -> dict[str, int]:
    """The position whose copy of a buffer counts: the first to run the unit which holds it."""
    runs_first = {}
    for segment in reversed(segments):
        for call in flow.calls[segment.first : segment.last]:
            runs_first[call.unit] = rank_of_stage(plan, segment.index)
    for unit, caller in flow.inside:
        runs_first.setdefault(unit, runs_first.get(caller, 0))
    owners = {}
    for name, _ in model.named_buffers(remove_duplicate=False):
        holders = [unit for unit in runs_first if not unit or f"{name}.".startswith(f"{unit}.")]
        owners[name] = runs_first[max(holders, key=len)] if holders else 0
    return owners


@torch.no_grad()
def release_others(model: nn.Module, local: Iterable[str], *, device: torch.device) -> None:
    """Free the parameters that are not in `local` (first names), in place.

    They stay the same objects with the same shape and dtype, on the device that the others will be
    on, so code that reads these still works; their memory is one element, zero everywhere. On the
    meta device they have none; `engines.state.materialise` handles those.
    """
    local = frozenset(local)
    for name, parameter in model.named_parameters():
        if name not in local and not parameter.is_meta:
            one = torch.zeros((), dtype=parameter.dtype, device=device)
            parameter.data = one.expand(parameter.shape)
            parameter.grad = None
