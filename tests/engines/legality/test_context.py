"""Plans that cannot share sequences out."""

from __future__ import annotations

import pytest

from engines.legality import problems
from engines.plan import Plan
from tests.engines.cases import CASES, cpu_ranks, profile_of


@pytest.mark.parametrize(
    ("plan", "case", "rule"),
    [
        ("cp=4", "gpt", "context-chunks"),
        ("cp=2", "resnet-batch-norm", "context-without-tokens"),
        ("cp=2 pp=2 schedule=gpipe stages=blocks.1", "gpt", "context-in-stages"),
        ("cp=2 compile=true", "gpt", "context-compiled"),
    ],
)
def test_plans_that_cannot_share_sequences_are_refused_by_name(
    plan: str, case: str, rule: str
) -> None:
    subject = CASES[case]
    profile = profile_of(subject, subject.build())
    parsed = Plan.parse(plan)
    assert rule in [p.rule for p in problems(parsed, profile, cpu_ranks(parsed.world_size))]
