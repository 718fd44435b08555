"""Structures that are no blocks: they train like one process, or are refused by name."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from engines.plan import Plan
from profiles.capture.capture import capture
from tests.fuzz_modules.results import Outcome
from tests.fuzz_modules.run import PLANS, cases_of, plan_of
from tests.fuzz_modules.several_models import adversaries_drift, averaged_drift
from tests.fuzz_modules.structures import STRUCTURES, Structure
from tests.workers import Pool, RankFailure

TENSOR, PIPELINE = PLANS[2:]
ACROSS = "takes a gradient across units"
NOT_FOLLOWED = "is not known"
REFUSED: dict[tuple[str, str], str] = {
    ("TorchScript", TENSOR): NOT_FOLLOWED,
    ("TorchScript", PIPELINE): NOT_FOLLOWED,
    ("gradient penalty", TENSOR): "no layer that tensor parallelism could split",
    ("gradient penalty", PIPELINE): ACROSS,
    ("inner step", TENSOR): ACROSS,
    ("inner step", PIPELINE): ACROSS,
    ("backward in forward", TENSOR): ACROSS,
    ("backward in forward", PIPELINE): ACROSS,
    ("teacher", TENSOR): "the forward changes its own parameter",
    ("teacher", PIPELINE): "the forward changes its own parameter",
    # Observed ranges are those of all rows.
    ("quantisation-aware", PIPELINE): "act on each other",
}
"""And the words that say so. Everything else trains."""


@pytest.mark.dist
@pytest.mark.parametrize("name", STRUCTURES)
def test_a_structure_trains_like_one_process_or_is_refused_by_name(pool: Pool, name: str) -> None:
    plans = PLANS[:2] if name == "torch.compile" else PLANS
    require_allowed(name, plans, pool)


@pytest.mark.dist
@pytest.mark.nightly
def test_a_compiled_part_is_split_too(pool: Pool) -> None:
    """Dynamo follows our own hooks: ten seconds and more."""
    require_allowed("torch.compile", PLANS[2:], pool)


def require_allowed(name: str, plans: Sequence[str], pool: Pool) -> None:
    for case in cases_of(Structure(name), plans, pool):  # type: ignore[arg-type]
        because = REFUSED.get((name, case.plan))
        assert case.outcome is (Outcome.REFUSED if because else Outcome.TRAINED), case
        assert (because or "") in case.text, case


@pytest.mark.dist
@pytest.mark.parametrize("plan", ["dp_replicate=2", "dp_shard=2"])
def test_two_models_with_an_optimizer_each_train_against_each_other(pool: Pool, plan: str) -> None:
    drifts = pool.run(adversaries_drift, plan, world_size=2)
    assert max(drifts) < 1e-5


@pytest.mark.dist
def test_two_models_in_pipelines_are_refused_since_no_rank_has_the_whole_of_one(pool: Pool) -> None:
    with pytest.raises(RankFailure, match="a pipeline runs the loss on its last stage"):
        pool.run(adversaries_drift, f"{PIPELINE} stages=2", world_size=2)


@pytest.mark.dist
@pytest.mark.parametrize("text", PLANS)
def test_an_average_of_parameters_follows_a_training(pool: Pool, text: str) -> None:
    structure = Structure("plain")
    profile = capture(structure.build(), structure.batch(0), loss_fn=structure.loss_fn)
    plan: Plan = plan_of(text, structure, profile)  # type: ignore[arg-type]
    assert max(pool.run(averaged_drift, plan, profile, world_size=2)) < 1e-5
