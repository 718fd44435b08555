"""`auto_parallelize` end to end with local and asynchronous updates."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist

from advisor import auto_parallelize
from advisor.decide.decision import Decision
from engines.optional.async_updates.report import UpdateReport
from tests.advisor.auto.test_parallelize import sgd
from tests.engines.cases import CASES, cpu_ranks, token_loss
from tests.engines.parity import local_rows
from tests.workers import Pool

Trained = tuple[str, float, float, UpdateReport | None, dict[str, torch.Tensor]]


def _train(plan: str, steps: int) -> Trained:
    case = CASES["gpt"]
    parallel = auto_parallelize(
        case.build(),
        sample=case.batch(4),
        loss_fn=token_loss,
        optimizer=sgd,
        plan=plan,
        cluster=cpu_ranks(dist.get_world_size()),
        learns=False,
    )
    assert isinstance(parallel.decision, Decision)
    rows = 4 * parallel.data_world_size
    first = last = 0.0
    for step in range(steps):
        batch = local_rows(parallel, case.batch(rows), rows)
        last = parallel.train_step(batch).item()
        first = last if step == 0 else first
    state = {name: value.clone() for name, value in parallel.state_dict().items()}
    return str(parallel.plan), first, last, parallel.update_report, state


@pytest.mark.dist
@pytest.mark.parametrize(
    ("plan", "wanted"),
    [
        ("updates=diloco sync_every=3", "dp_replicate=2 microbatch_size=4 updates=diloco"),
        ("servers=1", "servers=1"),
        ("updates=asynchronous servers=1", "updates=asynchronous servers=1"),
    ],
)
def test_given_updates_are_planned_applied_and_trained(pool: Pool, plan: str, wanted: str) -> None:
    """The same script on every rank, servers too; all end with the same weights."""
    (text, first, last, report, state), other = pool.run(_train, plan, 9, world_size=2)
    assert wanted in text
    assert other[0] == text
    assert last < first
    assert report is not None
    assert report.updates == 9
    assert all(torch.equal(value, other[4][name]) for name, value in state.items())
