"""Rules of tensor parallelism. No torch here; that a split is right is proved on the model."""

from __future__ import annotations

from collections.abc import Iterator

from engines.legality.problem import Problem
from engines.plan import Plan
from engines.tensor.styles import Style
from engines.tensor.token_rules import splits_tokens, why_whole_tokens
from profiles.errors import UnknownNameError
from profiles.machine.cluster import ClusterProfile
from profiles.model.profile import ModelProfile


def tensor(plan: Plan, model: ModelProfile, cluster: ClusterProfile) -> Iterator[Problem]:
    """A tensor plan says how every layer is split, in styles that exist."""
    if plan.tp == 1:
        return
    if not plan.tensor_styles:
        yield Problem(
            rule="tensor-without-styles",
            what=f"tp={plan.tp} splits layers, and `tensor_styles` names none",
            hint="`auto_parallelize` names those that divide and that it proves on the model; where"
            " it finds none, leave tp at 1: replicate, or shard parameters (dp_shard)",
        )
    elif plan.sequence_parallel and not splits_tokens(plan.tensor_styles):
        yield Problem(
            rule="sequence-parallel-without-blocks",
            what=f"sequence_parallel=true, and {why_whole_tokens(model, plan.tp)}",
            hint="leave sequence_parallel out",
        )
    elif splits_tokens(plan.tensor_styles) and not plan.sequence_parallel:
        yield Problem(
            rule="sequence-styles",
            what="`tensor_styles` split blocks by tokens, and sequence_parallel is false",
            hint="write sequence_parallel=true, or leave `sequence` out of `tensor_styles`",
        )
    for pattern, text in plan.tensor_styles:
        try:
            Style.parse(text)
        except UnknownNameError as error:
            yield Problem(
                rule="tensor-style",
                what=f"`{pattern}` has the tensor style `{text}`, which does not exist",
                hint=error.hints[0] if error.hints else "",
            )
