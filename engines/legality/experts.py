"""Rules of expert parallelism. No torch here; that a module allows it is tried on it."""

from __future__ import annotations

from collections.abc import Iterator

from engines.legality.problem import Problem
from engines.plan import Offload, Plan
from profiles.machine.cluster import ClusterProfile
from profiles.model.profile import ModelProfile


def experts(plan: Plan, model: ModelProfile, cluster: ClusterProfile) -> Iterator[Problem]:
    """The ranks of the ep axis are replicas, and there are experts to shard."""
    if plan.ep == 1:
        return
    if plan.data_degree % plan.ep:
        yield Problem(
            rule="experts-outside-data",
            what=f"ep={plan.ep} lies inside the data axes, which have {plan.data_degree} ranks:"
            f" {plan.data_degree} % {plan.ep} = {plan.data_degree % plan.ep}",
            hint="let ep divide dp_replicate x dp_shard",
        )
    counts = {n for unit in model.blocks() for n in unit.experts}
    uneven = sorted(count for count in counts if count % plan.ep)
    if not counts:
        yield Problem(
            rule="experts-none",
            what=f"ep={plan.ep} shards experts, and no block of {model.name} has weights with a"
            " dimension of experts",
            hint="set ep=1; experts in a list (nn.ModuleList) are called one by one by their"
            " block's own code: stack their weights, as transformers does",
        )
    elif uneven:
        yield Problem(
            rule="experts-uneven",
            what=f"{uneven[0]} experts cannot be sharded over ep={plan.ep} ranks:"
            f" {uneven[0]} % {plan.ep} = {uneven[0] % plan.ep}",
            hint=f"let ep divide {uneven[0]}",
        )
    if plan.compile:
        yield Problem(
            rule="experts-compiled",
            what=f"token counts of experts depend on values: ep={plan.ep} cannot be compiled",
            hint="set compile=false",
        )
    if plan.offload is not Offload.NONE:
        yield Problem(
            rule="experts-offloaded",
            what=f"experts are not offloaded (offload={plan.offload})",
            hint="set offload=none, or ep=1",
        )
