"""`advise check`: the steps that it runs, the terms it compares, and the anchor that it saves."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from click.testing import CliRunner, Result
from torch import Tensor, nn

import advisor.auto.check
from advisor import auto_parallelize
from advisor.auto.check import Checked, CheckRequest, check
from advisor.cli.main import cli
from advisor.cost import CostModel
from advisor.cost.estimates.process_memory import process_memory
from advisor.decide.decision import Decision
from advisor.inputs.bundled.gpt import GPT, GPTConfig, loss
from advisor.inputs.facts import Facts
from advisor.learning.anchor import Anchor, Term, anchored
from advisor.learning.residuals import StepMeasurement, anchor_of, terms_of
from advisor.learning.run_log import keep_anchor
from engines.plan import Plan
from profiles.errors import InputError, PlanError, UnknownNameError
from profiles.machine.cluster import Collective
from profiles.machine.clusters import to_toml
from profiles.provenance import Timing
from profiles.timing.runs import machine_of, runs_on
from tests.factories import chain, cpus, facts, gpus
from tests.workers import Pool

MODEL = "tests.advisor.auto.test_check:build"
SHAPE = GPTConfig(vocab_size=64, context=16, num_layers=2, num_heads=2, width=32)


def build() -> tuple[nn.Module, tuple[Tensor, Tensor], object]:
    ids = torch.arange(32).view(2, 16)
    return GPT(SHAPE), (ids, ids), loss


@pytest.fixture
def _own_cache(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))


def checked(settings: str) -> Checked:
    asked = CheckRequest(MODEL, settings, global_batch_size=8, steps=3)
    return check(asked, cpus(2))


@pytest.mark.parametrize("settings", ["dp_replicate=2", "dp_shard=2", "tp=2"])
def test_the_busy_time_of_a_rank_is_a_part_of_the_step(settings: str, pool: Pool) -> None:
    for outcome in pool.run(checked, settings, world_size=2, timeout_s=120):
        assert str(outcome.plan).startswith(settings)
        assert outcome.measured.step is not None
        assert outcome.measured.alone is not None
        assert outcome.measured.step.repeats == outcome.measured.alone.repeats == 3
        assert outcome.measured.alone.median_s < outcome.measured.step.median_s
        terms = terms_of(outcome.plan, outcome.facts, outcome.measured)
        assert list(terms) == [
            Term.COMPUTING,
            Term.PRODUCTS,
            Term.UPDATE,
            Term.SENDING,
            Term.STEP,
            Term.PEAK,
        ]
        step, update = terms[Term.STEP].measured, terms[Term.UPDATE].measured
        assert 0 < update < step
        assert 0 < terms[Term.PRODUCTS].measured < terms[Term.COMPUTING].measured


def checked_with_links() -> Checked:
    asked = CheckRequest(MODEL, "dp_replicate=2", global_batch_size=8, steps=3, times_links=True)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(advisor.auto.check, "LINKS_S", 1.0)
        return check(asked, cpus(2))


def test_links_are_timed_on_request_and_enter_the_anchor(pool: Pool) -> None:
    for outcome in pool.run(checked_with_links, world_size=2, timeout_s=120):
        timed = outcome.measured.links
        assert timed is not None
        assert timed.intra is not None
        assert set(timed.intra.fits) == set(Collective)
        anchor = anchor_of(
            outcome.plan, outcome.facts, outcome.measured, machine_of(outcome.facts.cluster)
        )
        assert anchored(outcome.facts, anchor).cluster.axes != outcome.facts.cluster.axes


def test_stages_are_not_timed_one_rank_at_a_time(pool: Pool) -> None:
    for outcome in pool.run(checked, "pp=2", world_size=2, timeout_s=120):
        assert outcome.measured.step is not None
        assert outcome.measured.alone is None
        terms = terms_of(outcome.plan, outcome.facts, outcome.measured)
        assert list(terms) == [Term.UPDATE, Term.STEP, Term.PEAK]


def test_one_rank_of_a_larger_plan_runs_its_shard_in_one_process(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    stepped = []
    run = advisor.auto.check.run

    def noted(parallel: object, *args: object, **options: object) -> StepMeasurement:
        optimizer = parallel.optimizer  # type: ignore[attr-defined]
        parameters = [p for group in optimizer.param_groups for p in group["params"]]
        stepped.append(sum(p.to_local().numel() for p in parameters))
        return run(parallel, *args, **options)  # type: ignore[arg-type]

    monkeypatch.setattr(advisor.auto.check, "run", noted)
    asked = CheckRequest(MODEL, "dp_shard=8", global_batch_size=8, steps=3)
    outcome = check(asked, cpus(8))
    assert (outcome.measured.step, outcome.plan.world_size) == (None, 8)
    assert outcome.measured.alone is not None
    whole = sum(parameter.numel() for parameter in GPT(SHAPE).parameters())
    assert stepped == [pytest.approx(whole / 8, rel=0.01)]
    assert not torch.distributed.is_initialized()
    anchor = anchor_of(
        outcome.plan, outcome.facts, outcome.measured, machine_of(outcome.facts.cluster)
    )
    assert anchor.is_one_rank
    assert list(anchor.terms) == [
        Term.COMPUTING,
        Term.PRODUCTS,
        Term.UPDATE,
        Term.PEAK,
    ]


def test_plans_that_cannot_run_here_are_refused_before_anything_runs() -> None:
    with pytest.raises(InputError, match="the plan is for H100-like, this machine has cpu"):
        check(CheckRequest(MODEL), gpus())
    with pytest.raises(UnknownNameError, match="unknown optimizer `adamv`"):
        check(CheckRequest(MODEL, optimizer="adamv"))
    with pytest.raises(PlanError, match="one of 4 ranks cannot be run by itself: stages"):
        check(CheckRequest(MODEL, "pp=2", global_batch_size=8), cpus(4))


def three_ranks_for_four() -> str:
    with pytest.raises(PlanError) as error:
        check(CheckRequest(MODEL), cpus(4))
    return str(error.value)


def test_a_job_with_too_few_ranks_is_refused(pool: Pool) -> None:
    said = pool.run(three_ranks_for_four, world_size=3)[0]
    assert "the plan is for 4 devices, this job has 3 ranks" in said
    assert "start 4 ranks: all are run" in said


def advise(*words: str) -> Result:
    return CliRunner().invoke(cli, list(words))


def predicted_exactly(factor: float) -> Checked:
    """Return the check of a plan whose step took `factor` times the prediction."""
    known: Facts = facts(chain(), cpus(1), batch=2, precision="fp32")
    plan = Plan.parse("microbatch_size=2")
    costs = CostModel(known)
    cost = costs.estimate(plan)

    def took(seconds: float) -> Timing:
        return Timing(median_s=seconds, low_s=seconds, high_s=seconds, repeats=10)

    step = took(factor * cost.step_s)
    update = took(factor * cost.time.optimizer_s)
    peak = process_memory(costs, plan, cost).nbytes
    return Checked(known, plan, StepMeasurement(step, step, update, peak))


@pytest.mark.usefixtures("_own_cache")
@pytest.mark.parametrize(("factor", "code"), [(1.0, 0), (3.0, 1)])
def test_it_exits_with_one_where_a_term_is_outside_its_range(
    factor: float, code: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(advisor.auto.check, "check", lambda *_: predicted_exactly(factor))
    result = advise("check", "chain")
    assert result.exit_code == code, result.stderr
    assert ("All within the predicted ranges." in result.stdout) == (code == 0)
    said = "Outside the predicted range: forward and backward, update, step."
    assert (said in result.stdout) == (code == 1)
    ratios = [line.split()[-1] for line in result.stdout.splitlines() if "GiB" in line]
    assert ratios == ["1.00"]


@pytest.mark.usefixtures("_own_cache")
@pytest.mark.parametrize("limit", [128, 1_000_000])
def test_risks_of_the_machine_are_listed(limit: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """A process with torch alone has more open files than 128 with its data and a group."""
    monkeypatch.setattr(advisor.auto.check, "check", lambda *_: predicted_exactly(1.0))
    monkeypatch.setattr("resource.getrlimit", lambda _: (limit, limit))
    stdout = " ".join(advise("check", "chain").stdout.split())
    assert ("Preflight: a rank may have 128 open files" in stdout) == (limit == 128)
    assert ("`ulimit -n 65536` before the start." in stdout) == (limit == 128)
    assert ("are no risk to the plan" in stdout) == (limit > 128)


@pytest.mark.usefixtures("_own_cache")
def test_a_saved_anchor_is_used_unless_disabled(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(advisor.auto.check, "check", lambda *_: predicted_exactly(3.0))
    path = tmp_path / "anchor.json"
    assert advise("check", "chain", "--anchor", "-o", str(path)).exit_code == 1
    assert Anchor.load(path).terms[Term.STEP].ratio == pytest.approx(3.0)
    again = advise("check", "chain")
    assert again.exit_code == 0, again.stdout
    assert "Predicted with the step of microbatch_size=2" in again.stdout
    assert advise("check", "chain", "--no-anchor").exit_code == 1


@pytest.mark.usefixtures("_own_cache")
def test_later_plans_use_the_anchor_of_a_step_that_was_run(tmp_path: Path) -> None:
    path, machines = tmp_path / "anchor.json", tmp_path / "cluster.toml"
    machines.write_text(to_toml(cpus(1)))
    asked = (MODEL, "--cluster", str(machines), "--global-batch", "2")
    result = advise("check", *asked, "--steps", "3", "-o", str(path))
    assert result.exit_code in (0, 1), result.stderr
    assert f"wrote {path}" in result.stderr
    anchor = Anchor.load(path)
    plain = json.loads(advise("plan", *asked, "--json").stdout)
    with_it = advise("plan", *asked, "--json", "--anchor", str(path))
    assert with_it.exit_code == 0, with_it.stderr
    decision = Decision.from_json(with_it.stdout)
    measured_s = anchor.terms[Term.STEP].measured
    assert decision.plan == Plan.parse(anchor.plan)
    assert decision.estimate.step_s == pytest.approx(measured_s, rel=1e-3)
    assert plain["estimate"]["step_s"] != pytest.approx(measured_s, rel=1e-3)
    assert f"each term, as in a step of {anchor.plan}" in str(decision)
    both = advise("plan", *asked, "--anchor", str(path), "--no-anchor")
    assert both.exit_code == 2
    assert "contradict each other" in both.stderr


@pytest.mark.usefixtures("_own_cache")
def test_a_training_saves_its_anchor_and_the_next_one_uses_it() -> None:
    module, sample, loss_fn = build()
    options = {"sample": sample, "loss_fn": loss_fn, "cluster": cpus(1)}
    parallel = auto_parallelize(module, learns=False, anchors=True, **options)  # type: ignore[arg-type]
    for _ in range(8):
        parallel.train_step(sample)
    timing = parallel.steps.timing()
    assert timing is not None
    del parallel
    following = auto_parallelize(build()[0], **options)  # type: ignore[arg-type]
    assert isinstance(following.decision, Decision)
    assert following.decision.estimate.step_s == pytest.approx(timing.median_s, rel=1e-3)
    learned = following.decision.facts.cluster.learned
    assert learned is not None
    assert learned.anchored is not None
    assert runs_on(machine_of(cpus(1))) == ()  # `learns=False` saves no run


@pytest.mark.usefixtures("_own_cache")
def test_an_anchor_can_be_given_by_its_file(tmp_path: Path) -> None:
    outcome = predicted_exactly(3.0)
    anchor = anchor_of(outcome.plan, outcome.facts, outcome.measured, machine_of(cpus(1)))
    keep_anchor(anchor)  # of another model than the GPT
    path = tmp_path / "anchor.json"
    anchor.save(path)
    module, sample, loss_fn = build()
    options = {"sample": sample, "loss_fn": loss_fn, "cluster": cpus(1)}
    with pytest.raises(InputError, match="whose units are of other kinds than those of GPT"):
        auto_parallelize(module, anchor=path, **options)  # type: ignore[arg-type]
    decision = auto_parallelize(module, **options).decision  # type: ignore[arg-type]
    assert isinstance(decision, Decision)
    assert decision.facts.cluster.learned is None
