"""A split that was proved is applied without a second proof; another one is proved."""

from __future__ import annotations

import pytest

from engines.apply import Proofs, apply_plan, proofs
from engines.context.proof import SequenceProof
from engines.plan import Plan
from engines.tensor.proposal import propose_styles
from engines.tensor.split_proof import SplitProof
from profiles.capture.batch.call import Batch
from profiles.model.profile import ModelProfile
from tests.engines.cases import CASES, cpu_ranks, profile_of
from tests.workers import Pool


class _Proved(Exception):
    """A proof was begun."""


def _apply(split_over: int, size_of_proof: int) -> list[str]:
    """Apply a plan with a proof, where any other proof raises."""
    case = CASES["gpt"]
    model, sample = case.build(), case.batch(2)
    profile = profile_of(case, model)
    has_target = case.loss_fn is not None
    proposals = {
        size: propose_styles(model, sample, size=size, profile=profile, has_target=has_target)
        for size in {split_over, size_of_proof}
    }
    plan = Plan.build({"tp": split_over, "tensor_styles": proposals[split_over].styles})
    known = Proofs(layers=proposals[size_of_proof].proof)

    def refuse(*args: object, **kwargs: object) -> SplitProof:
        raise _Proved

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(proofs, "prove_split", refuse)
        try:
            parallel = apply_plan(
                model,
                plan,
                profile=profile,
                cluster=cpu_ranks(split_over),
                loss_fn=case.loss_fn,
                sample=sample,
                proofs=known,
            )
        except _Proved:
            return ["proved again"]
    parallel.train_step(case.batch(2))
    return sorted(parallel._split.slices) if parallel._split is not None else []


@pytest.mark.dist
def test_a_known_proof_is_reused(pool: Pool) -> None:
    for split in pool.run(_apply, 2, 2, world_size=2):
        assert split
        assert split != ["proved again"]


@pytest.mark.dist
def test_a_proof_of_another_size_is_not_reused(pool: Pool) -> None:
    assert pool.run(_apply, 2, 4, world_size=2) == [["proved again"]] * 2


def test_a_sequence_proof_counts_for_as_many_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    build = _Build(Plan.parse("cp=4"))
    made: list[int] = []

    def prove(model: object, sample: Batch, loss_fn: object, *, size: int) -> SequenceProof:
        made.append(size)
        return KNOWN.model_copy(update={"size": size})

    monkeypatch.setattr(proofs, "prove", prove)
    sample = CASES["gpt"].batch(2)
    assert proofs.prove_sequence(build, sample, KNOWN.model_copy(update={"size": 4})).size == 4  # type: ignore[arg-type, union-attr]
    assert made == []
    assert proofs.prove_sequence(build, sample, KNOWN).size == 4  # type: ignore[arg-type, union-attr]
    assert made == [4]


class _Build:
    """The state as `prove_sequence` reads it."""

    model = None
    loss_fn = None
    profile: ModelProfile | None = None

    def __init__(self, plan: Plan) -> None:
        self.plan = plan


KNOWN = SequenceProof.model_validate(
    {
        "size": 2,
        "way": {
            "gives_positions": True,
            "gives_mask": False,
            "shifts_labels": True,
            "has_target": False,
        },
        "outputs": (1, None),
    }
)
