"""Rules of context parallelism. No torch here; that a model's code allows it is proved on it."""

from __future__ import annotations

from collections.abc import Iterator

from engines.legality.problem import Problem
from engines.plan import Plan
from profiles.machine.cluster import ClusterProfile
from profiles.model.profile import ModelProfile


def context(plan: Plan, model: ModelProfile, cluster: ClusterProfile) -> Iterator[Problem]:
    """The cp axis shards the sequence: samples have tokens, in equal chunks."""
    if plan.cp == 1:
        return
    tokens = model.tokens_per_sample
    if tokens is None:
        yield Problem(
            rule="context-without-tokens",
            what=f"cp={plan.cp} shards the sequence dimension; samples of {model.name} have none",
            hint="set cp=1, and use dp_replicate or dp_shard",
        )
    elif tokens % (2 * plan.cp):
        yield Problem(
            rule="context-chunks",
            what=f"cp={plan.cp} cuts a sequence into {2 * plan.cp} equal chunks, it has {tokens}"
            f" tokens: {tokens} % {2 * plan.cp} = {tokens % (2 * plan.cp)}",
            hint=f"make sequences of a multiple of {2 * plan.cp} tokens, or set cp=1",
        )
    if plan.pp > 1:
        yield Problem(
            rule="context-in-stages",
            what=f"a pipeline replays the forward over whole sequences: pp={plan.pp}, cp={plan.cp}",
            hint="set pp=1 and shard instead (dp_shard), or set cp=1",
        )
    if plan.compile:
        yield Problem(
            rule="context-compiled",
            what=f"torch.compile does not see the ring in place of attention (cp={plan.cp})",
            hint="set compile=false",
        )
    if model.batch_norms:
        yield Problem(
            rule="context-batch-norm",
            what=f"`{model.batch_norms[0]}` is a batch norm: a rank would normalise over its own"
            " tokens",
            hint="set cp=1",
        )
