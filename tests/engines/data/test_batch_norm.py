"""Statistics of batch norms: rank 0's where they are used or written, or those of all ranks."""

from __future__ import annotations

import copy
import warnings
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from engines.data.batch_norm import synchronise_batch_norms
from profiles.capture.batch.call import Batch
from profiles.capture.batch.rows import split_rows
from tests.engines.cases import CASES, Case
from tests.engines.parity import alone, local_rows, parallelize, reference_loss, relative, spread
from tests.workers import Pool

NAME = "resnet-batch-norm"


def _still(parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
    """Never moves the weights, so that statistics depend on the data alone."""
    return torch.optim.SGD(parameters, lr=0.0)


def _rank_zeros_statistics(plan: str, folder: str, classic: bool) -> dict[str, float]:
    """Errors against one process that saw rank 0's rows: after steps, of an evaluation, of states
    and of what is saved; and how far one that saw rank 1's is from it."""
    case, reference, parallel = parallelize(NAME, plan, optimizer=_still)
    reference.train()
    other = copy.deepcopy(reference)
    assert case.loss_fn is not None
    for rows in (8, 6):
        batch = case.batch(rows)
        mine = local_rows(parallel, batch, rows)
        if classic:
            case.loss_fn(parallel(mine[0]), mine[1]).backward()  # type: ignore[index]
            parallel.optimizer.step()
            parallel.optimizer.zero_grad()
        else:
            parallel.train_step(mine)
        for replica, part in zip(
            (reference, other), split_rows(batch, [rows // 2] * 2), strict=True
        ):
            replica(part[0])  # type: ignore[index]
    wanted = {n: v.clone() for n, v in reference.named_buffers() if v.is_floating_point()}
    own = {n: v.clone() for n, v in parallel.named_buffers()}
    others = dict(other.named_buffers())

    parallel.eval()
    reference.eval()
    batch = case.batch(5)
    expected = reference_loss(reference, case, batch).item()
    actual = parallel.eval_step(local_rows(parallel, batch, 5)).item()
    parallel.train()

    parallel(local_rows(parallel, case.batch(8), 8)[0])  # type: ignore[index]  # apart again
    reference.train()
    reference(case.batch(8)[0][:4])  # type: ignore[index]
    after = {n: v.clone() for n, v in reference.named_buffers() if v.is_floating_point()}
    parallel.save(folder)
    state = parallel.state_dict()
    parallel.load(folder)
    loaded = dict(parallel.named_buffers())
    return {
        "trained": max(relative(own[n], value) for n, value in wanted.items()),
        "evaluated": abs(actual - expected) / expected,
        "state": max(relative(state[n], value) for n, value in after.items()),
        "saved": max(relative(loaded[n], value) for n, value in after.items()),
        "other": max(relative(others[n], value) for n, value in wanted.items()),
    }


@pytest.mark.dist
@pytest.mark.parametrize(
    ("plan", "classic"),
    [("dp_replicate=2", False), ("dp_shard=2", False), ("dp_replicate=2", True)],
)
def test_statistics_are_those_of_rank_zero(
    pool: Pool, tmp_path: Path, plan: str, classic: bool
) -> None:
    folder = str(tmp_path / "checkpoint")
    for errors in pool.run(_rank_zeros_statistics, plan, folder, classic, world_size=2):
        assert max(errors["evaluated"], errors["state"], errors["saved"]) < 1e-5
        assert errors["other"] > 1e-2  # else the ranks never differed and nothing was shown
        if not classic:  # whose forwards send nothing
            assert errors["trained"] < 1e-5


def test_a_plan_of_one_keeps_the_models_own_statistics() -> None:
    _, parallel = alone(NAME)
    twin = copy.deepcopy(parallel.module)
    inputs, targets = CASES[NAME].batch(8)  # type: ignore[misc]
    twin(inputs)
    parallel.forward_backward((inputs, targets))
    assert all(
        torch.equal(got, wanted)
        for got, wanted in zip(parallel.module.buffers(), twin.buffers(), strict=True)
    )


class Averaging(nn.Module):
    """Keeps a running mean of its inputs, and is no batch norm."""

    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(6, 5)
        self.register_buffer("seen", torch.zeros(6))

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            self.seen.lerp_(x.mean((0, 1)), 0.5)
        logits: Tensor = self.head(x[:, -1])
        return logits


def _other_buffers(plan: str) -> tuple[Tensor, Tensor]:
    case = Case(Averaging, CASES["lstm"].batch, CASES["lstm"].loss_fn)
    _, parallel = spread(case, plan)
    batch: Batch = case.batch(8)
    before = parallel.state_dict()["seen"].clone()
    parallel.train_step(local_rows(parallel, batch, 8))
    rank_zeros, _ = split_rows(batch, [4, 4])[0]  # type: ignore[misc]
    return parallel.state_dict()["seen"], torch.lerp(before, rank_zeros.mean((0, 1)), 0.5)


@pytest.mark.dist
@pytest.mark.parametrize("plan", ["dp_replicate=2", "dp_shard=2"])
def test_other_buffers_are_written_out_as_rank_zero_has_them(pool: Pool, plan: str) -> None:
    for got, wanted in pool.run(_other_buffers, plan, world_size=2):
        assert relative(got, wanted) < 1e-5


def _synchronised(dtype: torch.dtype) -> tuple[torch.dtype, float, float, float]:
    """One norm over both ranks' rows in `dtype` against torch's over all rows in fp32.

    Errors of the running mean, the running variance and of the output.
    """
    generator = torch.Generator().manual_seed(3)
    rows = (torch.randn(14, 3, 9, 11, generator=generator) * 2 + 5).to(dtype)
    mine = rows[:9] if dist.get_rank() == 0 else rows[9:]  # 891 and 495 elements a channel
    norm, plain = nn.BatchNorm2d(3), nn.BatchNorm2d(3)
    wanted = plain(rows.float()).to(dtype)
    wanted = wanted[:9] if dist.get_rank() == 0 else wanted[9:]
    got = synchronise_batch_norms(norm, torch.device("cpu"))(mine)
    for each in (norm.running_mean, norm.running_var, plain.running_mean, plain.running_var):
        assert each is not None
    return (
        got.dtype,
        relative(norm.running_mean, plain.running_mean),  # type: ignore[arg-type]
        relative(norm.running_var, plain.running_var),  # type: ignore[arg-type]
        relative(got.float(), wanted.float()),
    )


@pytest.mark.dist
@pytest.mark.parametrize(
    # Both round the same fp32 value to bf16, 8 bits of mantissa: at most one unit apart.
    ("dtype", "output_tolerance"),
    [(torch.float32, 1e-5), (torch.bfloat16, 2**-8)],
)
def test_synchronised_statistics_are_counted_in_fp32(
    pool: Pool, dtype: torch.dtype, output_tolerance: float
) -> None:
    for result, mean, variance, output in pool.run(_synchronised, dtype, world_size=2):
        assert result == dtype
        assert max(mean, variance) < 1e-5  # counting 1386 in bf16 gives 1384: 1e-3
        assert output <= output_tolerance


def _bf16_training() -> list[float]:
    case, _, parallel = parallelize(NAME, "dp_replicate=2 precision=bf16 sync_batch_norm=true")
    batch = local_rows(parallel, case.batch(8), 8)
    losses = [parallel.train_step(batch).item() for _ in range(6)]
    assert {p.dtype for p in parallel.parameters()} == {torch.float32}
    return losses


@pytest.mark.dist
def test_synchronised_norms_train_under_bf16(pool: Pool) -> None:
    for losses in pool.run(_bf16_training, world_size=2):
        assert losses[-1] < losses[0]


def told_of_microbatches(plan: str) -> list[str]:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        case, _, parallel = parallelize("resnet-batch-norm", plan)
        parallel.train_step(local_rows(parallel, case.batch(8), 8))
    return [str(warning.message) for warning in caught if warning.category is UserWarning]


@pytest.mark.dist
@pytest.mark.parametrize(
    ("plan", "microbatches"),
    [
        ("pp=2 schedule=gpipe microbatches=2 stages=layers.1", 2),
        ("dp_replicate=2 microbatches=2 accumulation=2", 4),
        ("dp_replicate=2", 0),
    ],
)
def test_batch_norms_over_microbatches_are_warned_of_once(
    pool: Pool, plan: str, microbatches: int
) -> None:
    first, other = pool.run(told_of_microbatches, plan, world_size=2)
    assert other == []
    assert len(first) == bool(microbatches)
    for text in first:
        assert text.startswith(
            f"`stem.1` is a batch norm: it normalises each of the {microbatches} microbatches"
        )
