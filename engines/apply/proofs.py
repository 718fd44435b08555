"""Proofs that a split computes what the whole model computes."""

from __future__ import annotations

from engines.apply.build import Build
from engines.context.proof import SequenceProof, prove
from engines.tensor.split_proof import SplitProof, prove_split
from profiles.capture.batch import Batch
from profiles.errors import PlanError
from profiles.record import Record


class Proofs(Record):
    """Splits that are proved, to be applied without a second proof."""

    layers: SplitProof | None = None
    sequence: SequenceProof | None = None


def prove_layers(build: Build, sample: Batch | None, known: SplitProof | None) -> SplitProof | None:
    """The proof that split layers compute the same: the `known` one if it is of this split."""
    plan = build.plan
    if plan.tp == 1:
        return None
    if known is not None and known.covers(build.model, plan.tensor_styles, size=plan.tp):
        return known
    return prove_split(
        build.model,
        _require_sample(sample, f"tp={plan.tp}: the split of layers"),
        plan.tensor_styles,
        size=plan.tp,
        profile=build.profile,
        has_target=build.loss_fn is not None,
    )


def prove_sequence(
    build: Build, sample: Batch | None, known: SequenceProof | None
) -> SequenceProof | None:
    """The proof that ranks may share a sequence: the `known` one if it is of as many ranks."""
    size = build.plan.cp
    if size == 1:
        return None
    if known is not None and known.size == size:
        return known
    sample = _require_sample(sample, f"cp={size}: the split of sequences")
    return prove(build.model, sample, build.loss_fn, size=size)


def _require_sample(sample: Batch | None, split: str) -> Batch:
    if sample is None:
        raise PlanError(
            f"{split} is proved on a sample before it is used, and none was given",
            hints=["give `apply_plan(..., sample=batch)`"],
        )
    return sample
