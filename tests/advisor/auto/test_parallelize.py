"""`auto_parallelize` and `advise` end to end, in one process and on two ranks."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any, NoReturn
from unittest import mock
from unittest.mock import patch

import pytest
import torch

from advisor import advise, auto_parallelize
from advisor.auto.rank_zero import from_rank_zero
from advisor.decide.decision import Decision
from engines.plan import Plan
from engines.runtime.world import join_world
from profiles.errors import AdvisorError, InputError, ModelError, NoPlanError, PlanError
from profiles.machine.bench import bench
from profiles.machine.cluster import ClusterProfile
from tests.engines.cases import CASES, cpu_ranks, token_loss
from tests.workers import Pool


def sgd(params: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(params, lr=0.1)


def test_one_process_trains_on_one_device() -> None:
    torch.manual_seed(0)
    case = CASES["gpt"]
    parallel = auto_parallelize(
        case.build(), sample=case.batch(4), loss_fn=token_loss, optimizer=sgd
    )
    assert parallel.plan.world_size == 1
    assert isinstance(parallel.decision, Decision)
    losses = [parallel.train_step(case.batch(4)).item() for _ in range(15)]
    assert losses[-1] < losses[0]


def test_advise_does_not_change_the_model() -> None:
    case = CASES["gpt"]
    model = case.build()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    decision = advise(model, sample=case.batch(2), loss_fn=token_loss, cluster=cpu_ranks(4))
    assert decision.plan.world_size == 4
    assert decision.plan.global_batch_size == 8
    assert all(torch.equal(before[name], value) for name, value in model.state_dict().items())
    assert str(decision.plan)[:2] in decision._repr_html_()


def test_a_named_cluster_is_looked_up_and_a_wrong_one_names_the_near_miss() -> None:
    case = CASES["gpt"]
    options = {"sample": case.batch(2), "loss_fn": token_loss}
    decision = advise(case.build(), cluster="2x8xH100-SXM-80GB", **options)
    assert decision.plan.world_size == 16
    with pytest.raises(AdvisorError, match="H100-SMX-80GB"):
        advise(case.build(), cluster="2x8xH100-SMX-80GB", **options)


@pytest.mark.parametrize("batch", [0, -4])
def test_a_batch_of_zero_or_less_is_refused(batch: int) -> None:
    case = CASES["gpt"]
    with pytest.raises(InputError, match=f"`global_batch_size` = {batch}: more than 0 is wanted"):
        advise(
            case.build(),
            sample=case.batch(2),
            loss_fn=token_loss,
            cluster=cpu_ranks(2),
            global_batch_size=batch,
        )


def test_a_sample_that_does_not_fit_the_model_is_explained() -> None:
    with pytest.raises(ModelError):
        advise(CASES["gpt"].build(), sample=CASES["lstm"].batch(2), loss_fn=token_loss)


def test_pinned_settings_are_never_changed() -> None:
    case = CASES["gpt"]
    for settings in ("dp_shard=4 recompute=full", "dp_replicate=4 zero=2", "accumulation=2"):
        decision = advise(
            case.build(),
            sample=case.batch(4),
            loss_fn=token_loss,
            cluster=cpu_ranks(4),
            plan=settings,
        )
        wanted = Plan.parse(settings)
        for name in ("recompute", "accumulation"):
            if f"{name}=" in settings:
                assert getattr(decision.plan, name) == getattr(wanted, name)
        if "dp_" in settings:
            assert decision.plan.data_parallel is wanted.data_parallel


def test_a_pinned_degree_that_does_not_divide_the_ranks_is_refused() -> None:
    case = CASES["gpt"]
    with pytest.raises(PlanError, match=r"3|4"):
        advise(
            case.build(),
            sample=case.batch(2),
            loss_fn=token_loss,
            cluster=cpu_ranks(4),
            plan="dp_shard=3",
        )


def _tiny_memory(cluster: ClusterProfile) -> ClusterProfile:
    small = cluster.device.memory_bytes.model_copy(update={"value": 3.001e8})
    device = cluster.device.model_copy(update={"memory_bytes": small})
    return cluster.model_copy(update={"device": device})


def test_nothing_fits_is_an_answer_with_exit_code_one() -> None:
    case = CASES["gpt"]
    with pytest.raises(NoPlanError) as caught:
        advise(
            case.build(),
            sample=case.batch(2),
            loss_fn=token_loss,
            cluster=_tiny_memory(cpu_ranks(2)),
        )
    assert caught.value.exit_code == 1


def _train(plan: str | None, budget_s: float = 2.0) -> tuple[str, float, float, int]:
    """Of a bench a tenth of what a user's takes."""
    with mock.patch.dict(bench.__kwdefaults__, budget_s=budget_s):
        return _trained(plan)


def _trained(plan: str | None) -> tuple[str, float, float, int]:
    case = CASES["gpt"]
    torch.manual_seed(torch.distributed.get_rank())
    parallel = auto_parallelize(
        case.build(),
        sample=case.batch(4),
        loss_fn=token_loss,
        optimizer=sgd,
        plan=plan,
        timeout_s=60,
    )
    from tests.engines.parity import local_rows

    losses = [parallel.train_step(local_rows(parallel, case.batch(8), 8)).item() for _ in range(10)]
    assert isinstance(parallel.decision, Decision)
    text = parallel.decision.to_json()
    return text, losses[0], losses[-1], parallel.data_rank


@pytest.mark.dist
def test_two_ranks_measure_decide_and_train_together(pool: Pool) -> None:
    (text, first, last, rank), (other, other_first, other_last, other_rank) = pool.run(
        _train, None, world_size=2, timeout_s=120
    )
    assert text == other
    assert (first, last) == (other_first, other_last)
    assert last < first
    decision = Decision.from_json(text)
    assert (rank, other_rank) == ((0, 1) if decision.plan.data_degree == 2 else (0, 0))
    assert decision.facts.cluster.intra is not None


@pytest.mark.dist
def test_a_plan_given_by_file_is_obeyed(pool: Pool, tmp_path: Path) -> None:
    path = tmp_path / "plan.json"
    Plan.parse("dp_shard=2 recompute=full").save(path)
    text = pool.run(_train, str(path), world_size=2, timeout_s=120)[1][0]
    plan = Decision.from_json(text).plan
    assert str(plan).startswith("dp_shard=2")
    assert plan.recompute == "full"


def _refused(*plans: str) -> str:
    """Return the error of this rank; `plans` are one for each rank, or one for all."""
    try:
        _train(plans[torch.distributed.get_rank() % len(plans)])
    except AdvisorError as error:
        return f"{type(error).__name__} {error.what}"
    return "no error"


@pytest.mark.dist
def test_an_error_of_rank_zero_reaches_every_rank_instead_of_a_hang(pool: Pool) -> None:
    first, second = pool.run(_refused, "ep=2", world_size=2, timeout_s=60)
    assert first.startswith("PlanError")
    assert second.startswith("InputError rank 0 found no plan")


def _given_up() -> str:
    """Return the error of this rank where rank 0 ends while it decides."""

    def decide() -> NoReturn:
        raise SystemExit(3)

    try:
        from_rank_zero(decide, join_world())
    except BaseException as error:
        return f"{type(error).__name__} {error}".splitlines()[0]
    return "no error"


@pytest.mark.dist
def test_a_rank_zero_that_ends_while_it_decides_has_failed(pool: Pool) -> None:
    first, second = pool.run(_given_up, world_size=2)
    assert first == "SystemExit 3"
    assert second == "RankError rank 0 failed while deciding: SystemExit: 3"


@pytest.mark.dist
def test_a_plan_for_another_world_is_refused_before_anything_is_timed(
    pool: Pool, tmp_path: Path
) -> None:
    path = tmp_path / "plan.json"
    Plan.parse("dp_shard=4").save(path)
    texts = pool.run(_refused, str(path), world_size=2, timeout_s=60)
    assert texts == ["PlanError dp_shard=4 needs 4 ranks, this job has 2"] * 2
    texts = pool.run(_refused, "dp_shard=3", world_size=2, timeout_s=60)
    assert texts == ["PlanError dp_shard=3 needs a multiple of 3 ranks, this job has 2"] * 2


@pytest.mark.dist
def test_ranks_that_ask_for_different_plans_are_refused(pool: Pool) -> None:
    first, second = pool.run(_refused, "zero=1", "zero=2", world_size=2, timeout_s=60)
    assert first == second
    assert first.startswith("PlanMismatchError ranks disagree on the settings: rank 0 has ")


def test_the_model_is_profiled_in_the_precision_of_the_plan() -> None:
    case = CASES["gpt"]
    decision = advise(
        case.build(),
        sample=case.batch(4),
        loss_fn=token_loss,
        cluster="2xH100-SXM-80GB",
        plan="precision=bf16",
    )
    assert decision.plan.precision == "bf16"


def _timed(plan: str, folder: str) -> tuple[float, int, int]:
    case = CASES["gpt"]
    with patch.dict(os.environ, {"XDG_CACHE_HOME": folder}):
        parallel = auto_parallelize(
            case.build(),
            sample=case.batch(4),
            loss_fn=token_loss,
            optimizer=sgd,
            plan=plan,
            timed=True,
        )
    assert isinstance(parallel.decision, Decision)
    (times,) = parallel.decision.facts.model.times
    saved = len(list((Path(folder) / "parallel-advisor").glob("times-*.json")))
    return parallel.decision.estimate.measured_share, times.threads, saved


@pytest.mark.dist
@pytest.mark.nightly
def test_ranks_time_their_blocks_and_cache_the_times(pool: Pool, tmp_path: Path) -> None:
    for share, threads, saved in pool.run(_timed, "dp_replicate=2", str(tmp_path), world_size=2):
        assert share > 0.5
        assert (threads, saved) == (1, 1)
