"""What a ParallelModel does besides one plain step."""

from __future__ import annotations

import copy
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from engines.hybrid import apply_plan
from engines.parallel import ParallelModel
from engines.plan import Plan
from profiles.errors import BatchError, InputError, ModelError, PlanError
from profiles.model import ModelProfile
from tests.engines.cases import CASES, cpu_ranks, profile_of
from tests.engines.parity import local_rows, parallelize, reference_loss, relative
from tests.golden import check
from tests.workers import Pool

KINDS = ("dp_replicate=2", "dp_replicate=2 zero=1", "dp_replicate=2 zero=2", "dp_shard=2")


def alone(name: str, **options: Any) -> tuple[nn.Module, ParallelModel]:
    """A plan of 1 in this process, without a launcher or a process group."""
    case = CASES[name]
    model = case.build()
    plan = options.pop("plan", Plan())
    options.setdefault("loss_fn", case.loss_fn)
    profile = profile_of(case, model)
    return model, apply_plan(model, plan, profile=profile, cluster=cpu_ranks(1), **options)


def test_one_process_without_a_launcher_is_a_plan_of_one() -> None:
    torch.manual_seed(0)
    _, parallel = alone("gpt")
    batch = CASES["gpt"].batch(4)
    first = parallel.train_step(batch).item()
    for _ in range(20):
        last = parallel.train_step(batch).item()
    assert last < first
    assert (parallel.data_rank, parallel.data_world_size) == (0, 1)


def test_names_are_those_of_the_unwrapped_model() -> None:
    model, parallel = alone("gpt")
    assert list(parallel.state_dict()) == list(CASES["gpt"].build().state_dict())
    assert [n for n, _ in parallel.named_parameters()] == [n for n, _ in model.named_parameters()]


def test_more_rows_than_the_plan_holds_are_refused_with_the_limit() -> None:
    _, parallel = alone("gpt", plan=Plan(microbatch_size=2, accumulation=2))
    parallel.train_step(CASES["gpt"].batch(4))
    with pytest.raises(BatchError, match="microbatches of 3, the plan holds 2"):
        parallel.train_step(CASES["gpt"].batch(5))


def test_a_model_on_the_meta_device_is_refused_with_the_remedy() -> None:
    case = CASES["gpt"]
    with torch.device("meta"):
        model = case.build()
    with pytest.raises(ModelError, match="on the meta device"):
        apply_plan(model, Plan(), profile=profile_of(case, model), cluster=cpu_ranks(1))


def test_a_plan_for_another_world_is_refused_before_any_work() -> None:
    with pytest.raises(PlanError, match=r"needs 4 ranks \(dp_shard=4\).* has 1"):
        alone("gpt", plan=Plan.parse("dp_shard=4"))


def test_an_optimizer_of_another_model_is_refused() -> None:
    stranger = torch.optim.SGD(nn.Linear(3, 3).parameters(), lr=0.1)
    with pytest.raises(InputError, match=r"shape \(3, 3\) that is not in the model"):
        alone("gpt", optimizer=stranger)


def _clip(plan: str) -> tuple[float, float, float]:
    """The norm that clipping reports, the true one, and the error of the clipped gradients."""
    case, reference, parallel = parallelize("gpt", plan)
    batch = case.batch(8)
    reference_loss(reference, case, batch).backward()
    expected = nn.utils.clip_grad_norm_(reference.parameters(), 0.1).item()
    parallel.forward_backward(local_rows(parallel, batch, 8))
    norm = parallel.clip_grad_norm_(0.1).item()
    got = parallel.full_gradients()
    error = max(
        relative(got[n], p.grad) for n, p in reference.named_parameters() if p.grad is not None
    )
    return norm, expected, error


@pytest.mark.dist
@pytest.mark.parametrize("plan", [*KINDS, "dp_replicate=2 dp_shard=2", "dp_shard=2 offload=states"])
def test_clipping_sees_the_norm_over_all_shards(pool: Pool, plan: str) -> None:
    for norm, expected, error in pool.run(_clip, plan, world_size=Plan.parse(plan).world_size):
        assert norm == pytest.approx(expected, rel=1e-5)
        assert expected > 0.1
        assert error < 1e-5


class _Collectives(TorchDispatchMode):
    """Counts the collective operations that run under it."""

    def __init__(self) -> None:
        super().__init__()
        self.counts: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.namespace in ("c10d", "_c10d_functional"):
            self.counts[func.__name__.split(".")[0].strip("_")] += 1
        return func(*args, **(kwargs or {}))


def _count_collectives(plan: str) -> Counter[str]:
    case, _, parallel = parallelize("gpt", plan)
    batch = local_rows(parallel, case.batch(8), 8)
    parallel.train_step(batch)
    with _Collectives() as mode:
        parallel.train_step(batch)
    return mode.counts


@pytest.mark.dist
def test_accumulation_exchanges_gradients_no_more_often_than_sharding_needs(pool: Pool) -> None:
    once = pool.run(_count_collectives, "dp_replicate=2 zero=1", world_size=2)[0]
    four = pool.run(_count_collectives, "dp_replicate=2 zero=1 accumulation=4", world_size=2)[0]
    assert once == four  # parameters gathered once, gradients scattered once
    zero2 = pool.run(_count_collectives, "dp_replicate=2 zero=2 accumulation=4", world_size=2)[0]
    scatter = next(name for name in once if "reduce_scatter" in name)
    gather = next(name for name in once if "allgather" in name)
    assert zero2[gather] == once[gather]
    assert zero2[scatter] == 4 * once[scatter]


def _ddp_reductions(accumulation: int) -> int:
    """Gradient buckets all-reduced in one step, counted by a communication hook."""
    import torch.distributed as dist
    from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook

    case, _, parallel = parallelize("gpt", f"dp_replicate=2 accumulation={accumulation}")
    seen = []

    def counting(state: object, bucket: Any) -> Any:
        seen.append(bucket.index())
        return allreduce_hook(None, bucket)

    counting.__annotations__ = {"bucket": dist.GradBucket, "return": torch.futures.Future[Tensor]}
    parallel._runner.register_comm_hook(None, counting)  # type: ignore[attr-defined]
    parallel.train_step(local_rows(parallel, case.batch(8), 8))
    return len(seen)


@pytest.mark.dist
def test_ddp_reduces_gradients_once_however_many_microbatches(pool: Pool) -> None:
    assert pool.run(_ddp_reductions, 4, world_size=2) == pool.run(_ddp_reductions, 1, world_size=2)


def _classic_loop(plan: str) -> float:
    case, reference, parallel = parallelize("gpt", plan)
    assert case.loss_fn is not None
    optimizer = torch.optim.SGD(reference.parameters(), lr=0.05, momentum=0.9)
    for step in range(3):
        batch = case.batch(4 + 4 * step)
        inputs, targets = local_rows(parallel, batch, 4 + 4 * step)
        case.loss_fn(parallel(inputs), targets).backward()
        parallel.optimizer.step()
        parallel.optimizer.zero_grad()
        reference_loss(reference, case, batch).backward()
        optimizer.step()
        optimizer.zero_grad()
    after = parallel.state_dict()
    return max(relative(after[n], value) for n, value in reference.state_dict().items())


@pytest.mark.dist
@pytest.mark.parametrize("plan", KINDS)
def test_a_classic_loop_trains_like_one_process(pool: Pool, plan: str) -> None:
    assert max(pool.run(_classic_loop, plan, world_size=2)) < 1e-5


def _eval_between_steps(plan: str) -> tuple[float, float]:
    """Eval loss against one process, before and after a step that follows it."""
    case, reference, parallel = parallelize("gpt", plan)
    errors = []
    optimizer = torch.optim.SGD(reference.parameters(), lr=0.05, momentum=0.9)
    for rows in (7, 8):
        batch = case.batch(rows)
        part = local_rows(parallel, batch, rows)
        expected = reference_loss(reference, case, batch)
        errors.append(abs(parallel.eval_step(part).item() - expected.item()) / expected.item())
        parallel.train_step(part)
        optimizer.zero_grad()
        expected.backward()
        optimizer.step()
    return errors[0], errors[1]


@pytest.mark.dist
@pytest.mark.parametrize("plan", KINDS)
def test_eval_steps_see_the_newest_parameters(pool: Pool, plan: str) -> None:
    assert max(max(pair) for pair in pool.run(_eval_between_steps, plan, world_size=2)) < 1e-5


def _carry_over(plan: str) -> tuple[bool, float, list[float]]:
    """Train alone with momentum, carry the optimizer over, train on: error against one process."""
    case = CASES["gpt"]
    torch.manual_seed(1)
    model = case.build()
    profile = profile_of(case, model)

    def optimizer_of(module: nn.Module) -> torch.optim.Optimizer:
        decayed = [p for p in module.parameters() if p.dim() > 1]
        rest = [p for p in module.parameters() if p.dim() == 1]
        groups = [{"params": decayed, "weight_decay": 0.1}, {"params": rest, "lr": 0.02}]
        return torch.optim.SGD(groups, lr=0.05, momentum=0.9)

    optimizer = optimizer_of(model)
    _steps(case, model, optimizer, range(2))
    reference = copy.deepcopy(model)
    reference_optimizer = optimizer_of(reference)
    reference_optimizer.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, step_size=1, gamma=0.5)

    parallel = apply_plan(
        model,
        Plan.parse(plan),
        profile=profile,
        cluster=cpu_ranks(2),
        loss_fn=case.loss_fn,
        optimizer=optimizer,
    )
    for step in range(2, 4):
        batch = case.batch(4 + step)
        parallel.train_step(local_rows(parallel, batch, 4 + step))
    _steps(case, reference, reference_optimizer, range(2, 4))
    optimizer.step()  # tells the scheduler that the optimizer runs
    scheduler.step()
    after = parallel.state_dict()
    error = max(relative(after[n], value) for n, value in reference.state_dict().items())
    return parallel.optimizer is optimizer, error, [g["lr"] for g in optimizer.param_groups]


def _steps(case: Any, model: nn.Module, optimizer: torch.optim.Optimizer, steps: range) -> None:
    for step in steps:
        optimizer.zero_grad()
        reference_loss(model, case, case.batch(4 + step)).backward()
        optimizer.step()


@pytest.mark.dist
@pytest.mark.parametrize("plan", KINDS)
def test_an_optimizer_that_was_already_built_is_carried_over(pool: Pool, plan: str) -> None:
    for same, error, rates in pool.run(_carry_over, plan, world_size=2):
        assert same
        assert error < 1e-5
        assert rates == [0.025, 0.01]  # groups and the scheduler's hold on them


def _different_seeds(plan: str) -> float:
    import torch.distributed as dist

    case = CASES["gpt"]
    torch.manual_seed(dist.get_rank())
    model = case.build()
    torch.manual_seed(0)
    rank_zero = case.build().state_dict()
    parallel = apply_plan(
        model,
        Plan.parse(plan),
        profile=profile_of(case, model),
        cluster=cpu_ranks(2),
        loss_fn=case.loss_fn,
    )
    state = parallel.state_dict()
    return max((state[n] - value).abs().max().item() for n, value in rank_zero.items())


@pytest.mark.dist
@pytest.mark.parametrize("plan", KINDS)
def test_ranks_that_built_from_different_seeds_all_start_as_rank_zero(
    pool: Pool, plan: str
) -> None:
    assert pool.run(_different_seeds, plan, world_size=2) == [0.0, 0.0]


def _statistics_after_steps(plan: str) -> tuple[list[Tensor], int]:
    case, _, parallel = parallelize("resnet-batch-norm", plan)
    for rows in (8, 6):
        parallel.train_step(local_rows(parallel, case.batch(rows), rows))
    norm = parallel.module.get_submodule("stem.1")
    assert isinstance(norm, nn.BatchNorm2d)
    assert norm.running_mean is not None
    assert norm.num_batches_tracked is not None
    return [norm.running_mean], int(norm.num_batches_tracked)


@pytest.mark.dist
@pytest.mark.parametrize("recompute", ["none", "full", "selective"])
def test_recompute_counts_batch_statistics_once(pool: Pool, recompute: str) -> None:
    plain, _ = pool.run(_statistics_after_steps, "dp_replicate=2", world_size=2)[0]
    found = pool.run(_statistics_after_steps, f"dp_replicate=2 recompute={recompute}", world_size=2)
    assert found[0][1] == 2
    assert torch.equal(found[0][0][0], plain[0])


def _bf16(plan: str) -> tuple[float, set[torch.dtype], torch.dtype]:
    from engines.optimizer import full_gradients

    case = CASES["gpt"]
    torch.manual_seed(1)
    reference = case.build()
    model = copy.deepcopy(reference)
    parallel = apply_plan(
        model,
        Plan.parse(plan),
        profile=profile_of(case, model),
        cluster=cpu_ranks(2),
        loss_fn=case.loss_fn,
    )
    batch = case.batch(8)
    part = local_rows(parallel, batch, 8)
    output = parallel(part[0])
    expected = reference_loss(reference, case, batch).item()
    loss = parallel.train_step(part).item()
    dtypes = {p.dtype for p in parallel.parameters()}
    assert full_gradients(parallel.module) == {}
    return abs(loss - expected) / expected, dtypes, output.dtype


@pytest.mark.dist
@pytest.mark.parametrize("plan", KINDS)
def test_bf16_keeps_fp32_masters_and_hands_out_fp32(pool: Pool, plan: str) -> None:
    for error, dtypes, output in pool.run(_bf16, f"{plan} precision=bf16", world_size=2):
        # bf16 has 8 bits of mantissa: half a unit is 2^-9 = 0.2 %; equality would mean no bf16.
        assert 0 < error < 1e-2
        assert dtypes == {torch.float32}
        assert output == torch.float32


def _shard_bytes(plan: str) -> int:
    from torch.distributed.tensor import DTensor

    _, _, parallel = parallelize("gpt", plan)
    held = 0
    for parameter in parallel.parameters():
        local = parameter.to_local() if isinstance(parameter, DTensor) else parameter
        held += local.numel() * local.element_size()
    return held


@pytest.mark.dist
def test_each_rank_holds_its_shard_between_steps(pool: Pool) -> None:
    whole = sum(p.numel() * 4 for p in CASES["gpt"].build().parameters())
    assert pool.run(_shard_bytes, "dp_replicate=4", world_size=4) == [whole] * 4
    held = pool.run(_shard_bytes, "dp_shard=4", world_size=4)
    assert sum(held) == whole
    assert max(held) < 0.3 * whole


def _save(plan: str, folder: str) -> tuple[dict[str, Tensor], float]:
    case, _, parallel = parallelize("tied-frozen-unused", plan)
    for rows in (8, 6):
        parallel.train_step(local_rows(parallel, case.batch(rows), rows))
    parallel.save(folder)
    state = {name: value.clone() for name, value in parallel.state_dict().items()}
    loss = parallel.train_step(local_rows(parallel, case.batch(8), 8)).item()
    return state, loss


def _load(plan: str, folder: str) -> tuple[dict[str, Tensor], float]:
    case, _, parallel = parallelize("tied-frozen-unused", plan)
    parallel.load(folder)
    state = {name: value.clone() for name, value in parallel.state_dict().items()}
    parallel.train_step(local_rows(parallel, case.batch(8), 8))
    return state, parallel.eval_step(local_rows(parallel, case.batch(4), 4)).item()


@pytest.mark.dist
@pytest.mark.parametrize(
    ("saved", "loaded"),
    [
        ("dp_replicate=2", "dp_shard=4"),
        ("dp_shard=4", "dp_replicate=2 zero=1"),
        ("dp_replicate=2 dp_shard=2", "dp_replicate=1"),
        ("dp_replicate=1", "dp_replicate=2 zero=2"),
    ],
)
def test_what_one_plan_saved_another_loads(
    pool: Pool, tmp_path: Path, saved: str, loaded: str
) -> None:
    folder = str(tmp_path / "checkpoint")
    state, _ = pool.run(_save, saved, folder, world_size=Plan.parse(saved).world_size)[0]
    same = pool.run(_load, saved, folder, world_size=Plan.parse(saved).world_size)
    other = pool.run(_load, loaded, folder, world_size=Plan.parse(loaded).world_size)
    for back, loss in (*same, *other):
        assert back.keys() == state.keys()
        assert all(torch.equal(back[n], state[n]) for n in state)
        # One more step with the loaded momentum ends at the same place.
        assert loss == pytest.approx(same[0][1], rel=1e-5)


def test_an_interrupted_save_leaves_the_old_checkpoint(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import engines.checkpoint
    from profiles.errors import FileError

    _, parallel = alone("gpt")
    parallel.save(tmp_path / "checkpoint")
    before = parallel.state_dict()["head.weight"].clone()
    parallel.train_step(CASES["gpt"].batch(4))

    def no_space(*args: object, **kwargs: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(engines.checkpoint.dcp, "save", no_space)
    with pytest.raises(FileError, match="No space left"):
        parallel.save(tmp_path / "checkpoint")
    parallel.load(tmp_path / "checkpoint")
    assert torch.equal(parallel.state_dict()["head.weight"], before)


def test_a_folder_without_a_checkpoint_is_an_error(tmp_path: Path) -> None:
    from profiles.errors import FileError

    _, parallel = alone("gpt")
    with pytest.raises(FileError, match="holds no complete checkpoint"):
        parallel.load(tmp_path)


def _disagree() -> str:
    import torch.distributed as dist

    from engines.world import join_world, require_same_plan

    plan = Plan.parse("dp_shard=3" if dist.get_rank() == 1 else "dp_replicate=3")
    try:
        require_same_plan(plan, join_world())
    except PlanError as error:
        return str(error)
    return "no error"


@pytest.mark.dist
def test_ranks_with_different_plans_are_told_apart_before_the_first_collective(pool: Pool) -> None:
    texts = pool.run(_disagree, world_size=3)
    assert len(set(texts)) == 1
    check("error_plans_differ.txt", f"error: {texts[0]}\n")


def _late() -> str:
    import time

    import torch.distributed as dist

    from engines.world import World, require_same_plan
    from profiles.errors import RankError

    if dist.get_rank() == 2:
        time.sleep(3)
        return "late"
    world = World(rank=dist.get_rank(), size=3, device=torch.device("cpu"), timeout_s=1.0)
    try:
        require_same_plan(Plan(), world)
    except RankError as error:
        return error.what
    return "no error"


@pytest.mark.dist
def test_a_rank_that_does_not_answer_is_named(pool: Pool) -> None:
    texts = pool.run(_late, world_size=3)
    assert texts[:2] == ["rank 2 did not answer within 1 s"] * 2


def _all_frozen() -> str:
    case, model = CASES["gpt"], CASES["gpt"].build()
    profile: ModelProfile = profile_of(case, model)
    model.requires_grad_(False)
    try:
        apply_plan(model, Plan.parse("dp_replicate=2"), profile=profile, cluster=cpu_ranks(2))
    except ModelError as error:
        return error.what
    return "no error"


@pytest.mark.dist
def test_a_model_with_nothing_to_train_is_refused(pool: Pool) -> None:
    assert "no trainable parameter" in pool.run(_all_frozen, world_size=2)[0]
