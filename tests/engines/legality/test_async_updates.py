"""Plans that allow asynchronous updates."""

from __future__ import annotations

import pytest

from engines.legality import problems
from engines.plan import Plan
from profiles.model.flow import Flow
from profiles.model.profile import ModelProfile
from tests.engines.cases import cpu_ranks
from tests.engines.legality.test_legality import model


def rules_of(plan: str, profile: ModelProfile | None = None) -> list[str]:
    parsed = Plan.parse(plan)
    refusals = problems(parsed, profile or model(), cpu_ranks(parsed.world_size))
    assert all(problem.hint for problem in refusals)
    return [problem.rule for problem in refusals]


@pytest.mark.parametrize(
    "plan",
    [
        "dp_replicate=3 servers=1",
        "servers=1",
        "dp_replicate=2 servers=2 updates=asynchronous max_staleness=0",
        "dp_replicate=2 servers=1 backup_workers=1",
        "dp_replicate=2 servers=2 backup_workers=1",
        "dp_replicate=4 updates=local",
        "dp_replicate=4 updates=diloco sync_every=500 recompute=full accumulation=2",
    ],
)
def test_whole_replicas_may_update_asynchronously(plan: str) -> None:
    assert rules_of(plan) == []


@pytest.mark.parametrize(
    ("plan", "rules"),
    [
        ("dp_replicate=4 updates=asynchronous", ["updates-servers"]),
        ("dp_replicate=3 updates=local servers=1", ["updates-servers"]),
        ("dp_replicate=4 sync_every=8", ["updates-period"]),
        ("dp_replicate=3 backup_workers=1", ["updates-backup"]),
        ("dp_replicate=2 servers=1 backup_workers=1 updates=asynchronous", ["updates-backup"]),
        ("dp_replicate=3 servers=1 max_staleness=2", ["updates-staleness"]),
        ("dp_replicate=4 zero=1 updates=local", ["updates-replicas"]),
        ("dp_shard=4 updates=diloco", ["updates-replicas"]),
        ("updates=local", ["updates-replicas"]),
        ("dp_replicate=2 updates=local sync_batch_norm=true", ["updates-batch-norm"]),
    ],
)
def test_incompatible_update_settings_are_refused_with_a_hint(plan: str, rules: list[str]) -> None:
    assert rules_of(plan) == rules


def test_a_split_model_has_no_whole_replicas() -> None:
    assert "updates-replicas" in rules_of("tp=2 dp_replicate=2 updates=local tensor_styles=a:row")


def test_servers_run_no_forwards_and_send_flat_messages() -> None:
    normed = model(batch_norms=("stem.1",))
    assert rules_of("servers=1", normed) == ["updates-batch-norm"]
    assert rules_of("dp_replicate=2 updates=local", normed) == []
    sparse = model(sparse_gradients=("embed.weight",))
    assert rules_of("servers=1", sparse) == ["updates-sparse"]
    written = model(flow=Flow(written=("scale",)))
    assert rules_of("dp_replicate=2 updates=diloco", written) == ["updates-written"]


def test_ranks_that_are_missing_are_counted_with_servers_and_backups() -> None:
    plan = Plan.parse("dp_replicate=2 servers=1 backup_workers=1")
    (problem,) = problems(plan, model(), cpu_ranks(8))
    assert problem.what == (
        "plan needs 4 ranks (dp_replicate=2 + servers=1 + backup_workers=1), 8 CPU ranks has 8"
    )
