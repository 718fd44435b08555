"""Stragglers: measured in saved training runs, and known to later decisions."""

from __future__ import annotations

import statistics
from pathlib import Path

import numpy as np
import pytest
import torch

from advisor.auto.facts_from_module import facts_from_module
from advisor.cost.estimates.stragglers import waiting_s
from advisor.cost.estimates.updates import Served
from advisor.decide.choose import choose
from advisor.decide.decision import Decision
from advisor.inputs.facts import Facts
from advisor.learning.learning import undisturbed_s
from advisor.learning.run_log import fingerprint_of, run_of
from advisor.report.basis import basis
from engines.plan import PartialPlan, Plan
from engines.runtime.rank_times import Imbalance, RankTime, _spread
from profiles.machine.cluster import ClusterProfile, Constant
from profiles.model.profile import ModelProfile
from profiles.provenance import Timing
from profiles.timing.runs import ConstantShare, Machine, TrainingRun, keep_run, machine_of
from profiles.timing.straggler_stats import Pace, usual
from tests.factories import chain, cpus, facts

STEP = Timing(median_s=1.0, low_s=0.9, high_s=1.1, repeats=20)
SLOW = Pace(scatter=0.02, straggling=0.6, slowest=3)


@pytest.fixture(autouse=True)
def _own_cache(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))


def save_run(pace: Pace | None, *, machine: Machine, fingerprint: str = "another") -> None:
    """Save an earlier run without parts: it corrects no constant."""
    run = TrainingRun.build(
        {
            "machine": machine,
            "model": "of before",
            "fingerprint": fingerprint,
            "plan": "dp_replicate=4",
            "dtype": "float32",
            "predicted_s": 1.0,
            "step": STEP,
            "pace": pace,
            "ended_at": "2026-01-01T00:00:00+00:00",
        }
    )
    keep_run(run)


def looked(
    cluster: ClusterProfile, *, imbalance: float | None = None, learns: bool = True
) -> Facts:
    model = torch.nn.Sequential(*(torch.nn.Linear(256, 256) for _ in range(3)))
    sample = torch.zeros(64, 256), torch.zeros(64, 256)
    return facts_from_module(
        model,
        sample,
        loss_fn=torch.nn.functional.mse_loss,
        cluster=cluster,
        global_batch_size=192,
        imbalance=imbalance,
        learns=learns,
    )


def sources(decision: Decision) -> dict[str, str]:
    """Sources that the report names."""
    return {each.what: each.source for each in basis(decision)}


def test_a_straggler_of_earlier_runs_is_known_to_the_next_decision_with_its_source() -> None:
    cluster = cpus(4)
    machine = machine_of(cluster)
    for straggling in (0.5, 0.6, 4.0):  # one on a busy machine
        save_run(SLOW.model_copy(update={"straggling": straggling}), machine=machine)
    save_run(None, machine=machine)  # its ranks were not compared
    elsewhere = machine.model_copy(update={"torch": "1"})
    save_run(SLOW.model_copy(update={"scatter": 9.0}), machine=elsewhere)
    work = looked(cluster).workload
    assert (work.imbalance, work.straggling, work.slow_rank, work.pace_runs) == (0.0, 0.6, 3, 3)
    decision = choose(looked(cluster))
    by_name = sources(decision)
    assert by_name["rank 3 computes 60% longer than the others"] == "measured (3 runs)"
    assert decision.estimate.time.straggling_s == pytest.approx(
        0.6 * (decision.estimate.time.compute_s + decision.estimate.time.launch_s)
    )


def test_a_given_imbalance_takes_precedence_and_learns_false_ignores_runs() -> None:
    cluster = cpus(4)
    save_run(SLOW, machine=machine_of(cluster))
    said = looked(cluster, imbalance=0.3)
    assert (said.workload.imbalance, said.workload.straggling) == (0.3, 0.0)
    (what,) = (what for what in sources(choose(said)) if "scatter by 30%" in what)
    assert sources(choose(said))[what] == "you"
    none = looked(cluster, imbalance=0.0).workload
    assert (none.imbalance, none.straggling, none.pace_runs) == (0.0, 0.0, 0)
    assert looked(cluster, learns=False).workload.straggling == 0


def test_runs_of_the_same_model_take_precedence() -> None:
    cluster = cpus(4)
    machine = machine_of(cluster)
    mine: ModelProfile = looked(cluster).model
    save_run(SLOW, machine=machine)
    assert looked(cluster).workload.straggling == 0.6
    save_run(
        Pace(scatter=0.25, straggling=0.01, slowest=0),
        machine=machine,
        fingerprint=fingerprint_of(mine),
    )
    work = looked(cluster).workload
    assert (work.imbalance, work.straggling, work.slow_rank) == (0.25, 0.0, None)


def test_a_straggler_leads_to_offers_of_backup_workers_or_asynchronous_updates() -> None:
    """On fast links nothing is offered without a straggler. Local steps wait for it as well."""
    known = facts(chain(tokens=4096), cpus(8), batch=168, precision="fp32")
    assert choose(known).offers == ()
    workload = known.workload.model_copy(update={"straggling": 2.0})
    slow = known.model_copy(update={"workload": workload})
    decision = choose(slow)
    assert any("backup_workers=1" in offer or "asynchronous" in offer for offer in decision.offers)
    assert not any("updates=local" in offer for offer in decision.offers)


@pytest.mark.parametrize("needed", [4, 3])
def test_waiting_for_a_straggler_matches_a_simulation(needed: int) -> None:
    """Draw three ranks around 1 and one around 1.5, and take the one that is waited for."""
    drawn = np.random.default_rng(1).normal(1.0, 0.05, (200_000, 4))
    drawn[:, 3] += 0.5
    expected = np.sort(drawn, axis=1)[:, needed - 1].mean() - 1.0
    backups = f" servers=1 backup_workers={4 - needed}" if needed < 4 else ""
    plan = Plan.parse(f"dp_replicate={needed}{backups}")
    waited_s = waiting_s(plan, computing_s=1.0, imbalance=0.05, straggling=0.5)
    assert waited_s == pytest.approx(expected, abs=3e-3)


def test_synchronous_and_bounded_stale_updates_wait_for_a_straggler() -> None:
    def waits(text: str) -> float:
        return waiting_s(Plan.parse(text), computing_s=2.0, imbalance=0.0, straggling=0.5)

    assert waits("dp_replicate=4") == waits("dp_replicate=4 updates=local sync_every=16") == 1.0
    assert waits("dp_replicate=3 servers=1 updates=asynchronous") == 0.0
    assert waits("dp_replicate=3 servers=1 updates=asynchronous max_staleness=4") == 1.0
    assert waits("dp_replicate=3 servers=2 backup_workers=1") == 0.0


def test_workers_send_to_a_server_while_it_waits_for_the_straggler() -> None:
    """Three times 10 MB over 10 MB/s: only the straggler's 10 MB are left when it arrives."""
    served = Served.of(Plan.parse("dp_replicate=3 servers=1"), cpus(4), payload_bytes=1e7)
    even, late = (
        served.charge(_ledger(cpus(4)), update_s=0.0, computing_s=1.0, waiting_s=waiting)
        for waiting in (0.0, 100.0)
    )
    assert even - late == pytest.approx(served.in_s - served.worker_s)


def _ledger(cluster: ClusterProfile):  # type: ignore[no-untyped-def]
    from advisor.cost import CostModel

    return CostModel(facts(chain(), cluster, batch=12, precision="fp32")).ledger()


def test_pace_is_computed_from_the_times_of_the_ranks() -> None:
    """Three ranks of 100 ms, 90 of them computing, and one that is 45 ms late."""
    usual_rank = RankTime(outside_s=0.01, computing_s=0.09, waiting_s=0.05, spread_s=0.009)
    slow = RankTime(outside_s=0.03, computing_s=0.115, waiting_s=0.0, spread_s=0.009)
    pace = Imbalance(ranks=(usual_rank, slow, usual_rank, usual_rank), steps=20).pace
    assert pace.slowest == 1
    assert pace.straggling == pytest.approx(0.045 / 0.09)
    assert pace.scatter == pytest.approx(0.1)


def test_the_spread_is_the_deviation_of_normal_times_and_ignores_pauses() -> None:
    drawn = np.random.default_rng(2).normal(1.0, 0.1, 20_000).tolist()
    assert _spread(drawn) == pytest.approx(0.1, rel=0.02)
    assert _spread([*drawn, *[50.0] * 100]) == pytest.approx(statistics.pstdev(drawn), rel=0.05)


def test_the_usual_pace_is_the_median_of_runs_and_small_stragglers_count_as_none() -> None:
    paces = [Pace(scatter=s, straggling=0.05, slowest=n) for n, s in enumerate((0.2, 0.3, 5.0))]
    assert usual(paces) == Pace(scatter=0.3, straggling=0.0, slowest=None, runs=3)
    assert usual([SLOW, SLOW]).slowest == 3


def test_a_run_with_a_straggler_does_not_make_the_machine_look_slow() -> None:
    """Runs are saved with the prediction for even ranks, and with the share of the step that is
    even."""
    known = facts(chain(), cpus(4), batch=192, precision="fp32")
    decision = choose(known, partial=PartialPlan(dp_replicate=4))
    machine = Machine(
        device="cpu", processor="x", threads=1, ranks_per_node=4, torch="2.13", ours="1"
    )
    run = run_of(decision, machine, step=STEP, pace=SLOW)
    time = decision.estimate.time
    even, late = time.total, 0.6 * (time.compute_s + time.launch_s)
    assert run.predicted_s == pytest.approx(even)
    assert run.even_share == pytest.approx(even / (even + late))
    plain = run_of(decision, machine, step=STEP)
    assert undisturbed_s(run) == pytest.approx(undisturbed_s(plain) * run.even_share)
    assert run.parts.keys() == plain.parts.keys()
    assert isinstance(run.parts[Constant.PRODUCTS], ConstantShare)
    assert TrainingRun.model_validate_json(run.model_dump_json()) == run
