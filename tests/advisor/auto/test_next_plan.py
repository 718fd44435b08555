"""Plans after a shortage of memory: lighter ones that compute the same, and none that failed."""

from __future__ import annotations

import logging
import os
import re
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from click.testing import CliRunner

from advisor import auto_parallelize
from advisor.auto.facts_from_module import facts_from_module
from advisor.auto.next_plan import NextPlans, lighter
from advisor.cli.main import cli
from advisor.cost import estimate
from advisor.decide.choose import choose
from advisor.inputs.facts import Facts
from advisor.learning.shortages import below, failed_here, failed_plan, keep_failed
from advisor.search.ranking import fits_device
from engines.plan import PartialPlan, Plan
from engines.runtime.shortage import Shortage
from profiles.workload.workload import Workload
from tests.engines.cases import CASES, cpu_ranks, profile_of
from tests.engines.hungry import HUNGRY, NO_LIMIT_MIB, TensorLimit, hungry_batch, memory_limit
from tests.engines.parity import local_rows, reference_loss, relative
from tests.workers import Pool

ROWS = 32
GIB = 2**30


def facts_of(name: str, *, batch: int = 16) -> Facts:
    case = CASES[name]
    workload = Workload(global_batch_size=batch, precision="fp32")
    return Facts(model=profile_of(case, case.build()), cluster=cpu_ranks(1), workload=workload)


def test_smaller_microbatches_come_before_more_recompute() -> None:
    plans = list(map(str, lighter(Plan.parse("microbatch_size=4 accumulation=2"), facts_of("gpt"))))
    assert plans[:3] == [
        "microbatch_size=2 accumulation=4",
        "microbatch_size=1 accumulation=8",
        "microbatch_size=4 accumulation=2 recompute=selective",
    ]
    assert plans[-1] == "microbatch_size=1 accumulation=8 recompute=full"
    assert len(plans) == 8


def test_recompute_of_all_blocks_comes_before_a_stronger_one() -> None:
    some = Plan.parse("microbatch_size=1 recompute=selective recompute_blocks=1")
    plans = list(map(str, lighter(some, facts_of("gpt"))))
    assert plans == [
        "microbatch_size=1 recompute=selective",
        "microbatch_size=1 recompute=full",
    ]


def test_with_batch_norms_more_recompute_comes_first() -> None:
    plans = list(map(str, lighter(Plan.parse("microbatch_size=4"), facts_of("resnet-batch-norm"))))
    assert plans[0] == "microbatch_size=4 recompute=selective"
    assert plans[-1] == "microbatch_size=1 accumulation=4"


@pytest.mark.parametrize("needed_gib", [0.001, 0.5, 3.9, 4.5])
def test_what_failed_does_not_fit_again(needed_gib: float) -> None:
    """It needed more than was predicted, or there was less than the device has."""
    facts = facts_of("gpt")
    decision = choose(facts, partial=PartialPlan.parse("microbatch_size=16"))
    assert fits_device(decision.plan, decision.estimate, facts, decision.policy) is None
    failed = failed_plan(decision.plan, facts, needed_bytes=needed_gib * GIB)
    lower = below(facts, [failed])
    again = NextPlans(decision, learns=False)
    answer = again(decision.plan, Shortage(rank=0, held_bytes=needed_gib * GIB))
    assert answer.plan != decision.plan
    assert fits_device(decision.plan, estimate(decision.plan, lower), lower, decision.policy)


@pytest.mark.parametrize(("days", "is_known"), [(29, True), (31, False)])
def test_a_failure_is_forgotten_after_a_month(
    days: int, is_known: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    facts = facts_of("gpt")
    failed = failed_plan(Plan(), facts, needed_bytes=GIB)
    ended_at = (datetime.now(UTC) - timedelta(days=days)).isoformat(timespec="seconds")
    keep_failed(failed.model_copy(update={"ended_at": ended_at}))
    assert bool(failed_here(facts)) == is_known


def test_the_command_stays_below_what_failed_in_a_training_and_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The memory that a plan failed with is all there is, 5 % of it free."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr("advisor.cli.options.resolve", lambda text, *, bench: cpu_ranks(1))
    trained = facts_from_module(
        HUNGRY.build(), hungry_batch(2), loss_fn=HUNGRY.loss_fn, cluster=cpu_ranks(1)
    )
    failed = failed_plan(Plan.parse("microbatch_size=32"), trained, needed_bytes=2 * GIB)
    command = ["plan", "tests.engines.hungry:build", "--global-batch", "32"]
    before = CliRunner().invoke(cli, command).stdout
    keep_failed(failed)
    after = CliRunner().invoke(cli, command).stdout
    assert "of 3.80 usable" in before
    assert "of 1.90 usable" in after
    assert "ran out of memory here" not in before
    assert "note: `microbatch_size=32` ran out of memory here" in after
    assert re.search(r"plan +microbatch_size=32 +1 of", before)
    assert not re.search(r"plan +microbatch_size=32 +1 of", after)


def _train(short: int, folder: str) -> tuple[float, str, str, list[str]]:
    """Two steps under a decided plan with a limit on rank `short`; the plan that a second start
    takes, and what was logged."""
    messages: list[str] = []

    class Listener(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            messages.append(record.getMessage())

    logger = logging.getLogger("engines.parallel.recovery")
    listener = Listener()
    logger.addHandler(listener)
    ranks = dist.get_world_size() if dist.is_initialized() else 1
    rank = dist.get_rank() if dist.is_initialized() else 0
    rows = ROWS * ranks
    batch = hungry_batch(rows)
    options: dict[str, Any] = {
        "sample": hungry_batch(2),
        "loss_fn": HUNGRY.loss_fn,
        "optimizer": lambda params: torch.optim.SGD(params, lr=0.05),
        "global_batch_size": rows,
        "plan": "recompute=none data_parallel=replicate" if ranks > 1 else "recompute=none",
        "cluster": cpu_ranks(ranks),
    }
    torch.manual_seed(1)
    reference = HUNGRY.build()
    torch.manual_seed(1)
    with patch.dict(os.environ, {"XDG_CACHE_HOME": folder}):
        parallel = auto_parallelize(HUNGRY.build(), **options)
        assert parallel.plan.microbatch_size == ROWS
        part = local_rows(parallel, batch, rows)
        # A step of 32 rows takes 192 MiB, one of 16 half of it.
        limit = TensorLimit(144 if rank == short else NO_LIMIT_MIB)
        with memory_limit(150) if ranks == 1 else limit:
            losses = [parallel.train_step(part) for _ in range(2)]
        again = auto_parallelize(HUNGRY.build(), **options)
    logger.removeHandler(listener)
    optimizer = torch.optim.SGD(reference.parameters(), lr=0.05)
    for loss in losses:
        optimizer.zero_grad()
        wanted = reference_loss(reference, HUNGRY, batch)
        wanted.backward()
        optimizer.step()
        assert relative(loss, wanted.detach()) < 1e-5
    after = parallel.state_dict()
    error = max(relative(after[name], value) for name, value in reference.state_dict().items())
    return error, str(parallel.plan), str(again.plan), messages


def test_a_training_goes_on_and_the_next_one_begins_with_a_lighter_plan(tmp_path: Path) -> None:
    error, plan, again, messages = _train(0, str(tmp_path))
    assert error < 1e-5
    assert plan == "microbatch_size=16 accumulation=2"
    assert Plan.parse(again).microbatch_size == 16
    assert len(messages) == 1
    assert "rank 0 ran out of memory" in messages[0]
    assert "the next plan is predicted" in messages[0]


@pytest.mark.dist
def test_two_ranks_go_on_when_one_runs_out(pool: Pool, tmp_path: Path) -> None:
    results = pool.run(_train, 1, str(tmp_path), world_size=2)
    for error, plan, again, _ in results:
        assert error < 1e-5
        assert plan == "dp_replicate=2 microbatch_size=16 accumulation=2"
        assert Plan.parse(again).microbatch_size == 16
    (message,) = results[0][3]
    assert "rank 1 ran out of memory" in message
    assert results[1][3] == []
