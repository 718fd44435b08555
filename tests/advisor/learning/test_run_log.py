"""Runs of training that are saved on this machine, and correct the next prediction."""

from __future__ import annotations

import gc
import os
import statistics
import subprocess
import sys
from collections.abc import Sequence
from math import hypot, log
from pathlib import Path
from unittest.mock import patch

import pytest
import torch

from advisor import auto_parallelize
from advisor.cost import estimate
from advisor.decide.decision import Decision
from advisor.inputs.bundled.gpt import GPT, GPTConfig, loss
from advisor.learning.learning import refit
from advisor.learning.run_log import keep_run, with_runs
from engines.parallel import ParallelModel
from profiles.machine.cluster import ClusterProfile, Constant
from profiles.machine.probe import probe
from profiles.timing.runs import TrainingRun, machine_of, runs_on
from tests.engines.cases import CASES, token_loss
from tests.factories import cpus
from tests.workers import Pool

SHAPE = GPTConfig(vocab_size=64, context=16, num_layers=2, num_heads=2, width=32)


@pytest.fixture
def _own_cache(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))


def train(steps: int, *, by_hand: bool = False, **options: object) -> Sequence[TrainingRun]:
    """Runs saved after so many steps of a small GPT."""
    ids = torch.randint(0, 64, (4, 16))
    cluster = cpus(1)
    parallel = auto_parallelize(
        GPT(SHAPE),
        sample=(ids, ids),
        loss_fn=loss,
        cluster=cluster,
        **options,  # type: ignore[arg-type]
    )
    for _ in range(steps):
        parallel.train_step((ids, ids))
    if by_hand:
        assert keep_run(parallel, peak_bytes=5e8) is not None
    del parallel
    gc.collect()
    return runs_on(machine_of(cluster))


@pytest.mark.usefixtures("_own_cache")
def test_a_run_is_saved_after_training_and_corrects_the_next_prediction() -> None:
    (run,) = train(25)
    assert run.step.repeats == 22
    assert run.plan.startswith("microbatch_size=4")
    corrected = with_runs(cpus(1), dtype="float32")
    assert corrected.learned is not None
    assert Constant.PRODUCTS in corrected.learned.runs or Constant.LAUNCH in corrected.learned.runs
    ids = torch.randint(0, 64, (4, 16))
    parallel = auto_parallelize(GPT(SHAPE), sample=(ids, ids), loss_fn=loss, cluster=cpus(1))
    assert isinstance(parallel.decision, Decision)
    assert parallel.decision.facts.cluster.learned is not None
    assert parallel.decision.facts.cluster.learned.runs == corrected.learned.runs


PROGRAM = """
import torch
from advisor import auto_parallelize
from advisor.inputs.bundled.gpt import GPT, GPTConfig, loss
from tests.factories import cpus

ids = torch.randint(0, 64, (4, 16))
model = GPT(GPTConfig(vocab_size=64, context=16, num_layers=1, num_heads=2, width=32))
parallel = auto_parallelize(model, sample=(ids, ids), loss_fn=loss, cluster=cpus(1))
for _ in range(25):
    parallel.train_step((ids, ids))
"""


def test_a_run_is_saved_when_its_process_ends(tmp_path: Path) -> None:
    root = str(Path(__file__).parents[3])
    environment = {**os.environ, "XDG_CACHE_HOME": str(tmp_path), "PYTHONPATH": root}
    command = [sys.executable, "-W", "error", "-c", PROGRAM]
    ended = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=180)
    assert (ended.returncode, ended.stderr) == (0, "")
    (path,) = (tmp_path / "parallel-advisor").glob("runs-*.json")
    assert TrainingRun.load(path).step.repeats == 22


@pytest.mark.usefixtures("_own_cache")
@pytest.mark.parametrize(("steps", "options"), [(10, {}), (25, {"learns": False})])
def test_short_runs_and_runs_with_learns_false_are_not_saved(
    steps: int, options: dict[str, object]
) -> None:
    assert train(steps, **options) == ()


@pytest.mark.usefixtures("_own_cache")
def test_a_run_saved_by_hand_is_not_saved_again() -> None:
    (run,) = train(25, by_hand=True)
    assert run.peak is not None
    assert run.peak.measured_bytes == 5e8


def _steps_of(width: int, rows: int, cluster: ClusterProfile) -> tuple[ParallelModel, TrainingRun]:
    ids = torch.randint(0, 256, (rows, 64))
    shape = GPTConfig(vocab_size=256, context=64, num_layers=3, num_heads=4, width=width)
    parallel = auto_parallelize(
        GPT(shape),
        sample=(ids, ids),
        loss_fn=loss,
        plan=f"microbatch_size={rows}",
        cluster=cluster,
        learns=False,
    )
    for _ in range(20):
        parallel.train_step((ids, ids))
    run = keep_run(parallel)
    assert run is not None
    return parallel, run


@pytest.mark.timed
@pytest.mark.usefixtures("_own_cache")
@pytest.mark.parametrize(("width", "rows"), [(192, 16), (320, 4)], ids=["more rows", "wider"])
def test_a_run_of_one_model_improves_the_estimate_of_another(width: int, rows: int) -> None:
    """If the first estimate is within the scatter of the steps, as on a busy machine, there is
    nothing to learn, and nothing is asserted."""
    closer = []
    for _ in range(3):
        cluster = probe(measure=True)
        _, first = _steps_of(192, 4, cluster)
        parallel, other = _steps_of(width, rows, cluster)
        assert isinstance(parallel.decision, Decision)
        corrected = refit(cluster, [first], dtype="float32")
        facts_then = parallel.decision.facts.model_copy(update={"cluster": corrected})
        measured_s = other.step.median_s
        before = abs(log(measured_s / parallel.decision.estimate.step_s))
        after = abs(log(measured_s / estimate(parallel.plan, facts_then).step_s))
        if before > hypot(first.step.relative_error, other.step.relative_error):
            closer.append(before - after)
    if not closer:
        pytest.skip("every first estimate was as near as the steps scatter")
    assert statistics.median(closer) > 0, closer


def _runs_after_training(folder: str) -> tuple[int, float]:
    case = CASES["gpt"]
    with patch.dict(os.environ, {"XDG_CACHE_HOME": folder}):
        parallel = auto_parallelize(
            case.build(),
            sample=case.batch(4),
            loss_fn=token_loss,
            plan="dp_replicate=2",
            cluster=cpus(2),
        )
        for _ in range(10):
            parallel.train_step(case.batch(4))
        run = keep_run(parallel, peak_bytes=1e9)
        runs = runs_on(machine_of(cpus(2)))
    return len(runs) if run else 0, run.parts[Constant.INTRA].seconds if run else 0.0


@pytest.mark.dist
def test_rank_0_saves_the_run_with_a_part_for_links(pool: Pool, tmp_path: Path) -> None:
    (first, link_s), (second, _) = pool.run(_runs_after_training, str(tmp_path), world_size=2)
    assert (first, second) == (1, 0)
    assert link_s > 0
