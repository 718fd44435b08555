"""The gradient noise scale: known gradients give the known value, whatever holds them."""

from __future__ import annotations

from math import inf

import pytest
import torch
from torch import Tensor, nn

from engines.data.loader import split_rows_evenly
from engines.data.noise_scale import NoiseScale
from engines.parallel import ParallelModel
from engines.plan import Plan
from profiles.capture.batch.rows import split_rows
from profiles.errors import InputError, PlanError
from tests.engines.cases import CASES, Case
from tests.engines.parity import alone, local_rows, reference_loss, spread
from tests.workers import Pool

WIDTH = 32
MEAN = 0.5


class TwoLines(nn.Module):
    """Its output is linear in its parameters: a sample is its own gradient."""

    def __init__(self) -> None:
        super().__init__()
        self.left, self.right = (nn.Linear(WIDTH, 1, bias=False) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.left(x[:, :WIDTH]) + self.right(x[:, WIDTH:])
        return out


def _mean(output: Tensor, target: Tensor) -> Tensor:
    return output.mean()


def _samples(rows: int, generator: torch.Generator | None = None) -> tuple[Tensor, Tensor]:
    """Normal with a known mean, and 1 for the variance of each of 64 elements."""
    x = torch.randn(rows, 2 * WIDTH, generator=generator) + MEAN
    return x, torch.zeros(rows)


LINES = Case(TwoLines, _samples, _mean)


def _known(plan: str, rows: int, steps: int) -> tuple[float, float, float]:
    _, parallel = spread(LINES, plan, measure_noise=True)
    draws = torch.Generator().manual_seed(3)
    for _ in range(steps):
        parallel.train_step(local_rows(parallel, _samples(rows, draws), rows))
    noise_scale = parallel.noise_scale
    assert (noise_scale.steps, noise_scale.batch) == (steps, rows)
    return noise_scale.covariance_trace, noise_scale.gradient_square, noise_scale.critical_batch


@pytest.mark.dist
@pytest.mark.parametrize("plan", ["dp_replicate=2", "dp_shard=2 accumulation=2"])
def test_a_known_covariance_gives_the_known_value_within_a_tenth(pool: Pool, plan: str) -> None:
    """tr(Sigma) = 64 x 1; |G|^2 = 64 x 0.5^2 = 16; their ratio is 4 samples."""
    results = pool.run(_known, plan, 16, 150, world_size=2)
    assert results[0] == results[1]
    trace, square, critical = results[0]
    assert trace == pytest.approx(64, rel=0.1)
    assert square == pytest.approx(16, rel=0.1)
    assert critical == pytest.approx(4, rel=0.1)


def _squares(plan: str, rows: int) -> tuple[float, float, float, float]:
    """As measured in one step, and as one process computes it from each small batch's gradient."""
    case = CASES["gpt"]
    reference, parallel = spread(case, plan, measure_noise=True)
    batch = case.batch(rows)
    parallel.train_step(local_rows(parallel, batch, rows))
    noise_scale = parallel.noise_scale
    smalls = [
        piece
        for part in split_rows(batch, split_rows_evenly(rows, parallel.data_world_size))
        for piece in split_rows(part, split_rows_evenly(len(part[0]), _looked_at(parallel)))
    ]
    squares = [_square(reference, case, piece) for piece in smalls]
    small = sum(squares) / len(squares)
    inverse = sum(1 / len(piece[0]) for piece in smalls) / len(smalls)
    large = _square(reference, case, batch)
    trace = (small - large) / (inverse - 1 / rows)
    return noise_scale.covariance_trace, trace, noise_scale.gradient_square, large - trace / rows


def _looked_at(parallel: ParallelModel) -> int:
    """Small batches that a replica's rows are seen as: shards are reduced after each microbatch."""
    kind = parallel.plan.data_parallel
    return parallel.plan.forwards if kind.is_sharded and kind.value != "zero1" else 1


def _square(model: nn.Module, case: Case, batch: object) -> float:
    model.zero_grad()
    reference_loss(model, case, batch).backward()  # type: ignore[arg-type]
    return sum(float(p.grad.square().sum()) for p in model.parameters() if p.grad is not None)


@pytest.mark.dist
@pytest.mark.parametrize(
    ("plan", "rows"),
    [
        ("dp_replicate=2", 8),
        ("dp_replicate=2", 7),  # 4 and 3
        ("dp_replicate=2 accumulation=2", 8),
        ("dp_replicate=2 zero=1 accumulation=2", 8),
        ("dp_replicate=2 zero=2 accumulation=2", 8),
        ("dp_shard=2", 8),
        ("dp_shard=2 accumulation=2", 7),
        ("dp_replicate=2 dp_shard=2 accumulation=2", 16),
    ],
)
def test_every_kind_of_data_parallelism_sees_the_same_gradients(
    pool: Pool, plan: str, rows: int
) -> None:
    size = Plan.parse(plan).world_size
    for trace, wanted_trace, square, wanted_square in pool.run(
        _squares, plan, rows, world_size=size
    ):
        assert trace == pytest.approx(wanted_trace, rel=1e-3)
        assert square == pytest.approx(wanted_square, rel=1e-3, abs=1e-3 * wanted_trace / rows)


def test_one_rank_compares_its_first_microbatch_with_all_of_them() -> None:
    plan = Plan.parse("accumulation=4")
    case = CASES["gpt"]
    model, parallel = alone("gpt", plan=plan, measure_noise=True)
    batch = case.batch(8)
    first = split_rows(batch, [2, 6])[0]
    small, large = (_square(model, case, part) for part in (first, batch))
    model.zero_grad()
    parallel.train_step(batch)
    assert parallel.noise_scale.covariance_trace == pytest.approx(
        (small - large) / (1 / 2 - 1 / 8), rel=1e-3
    )


def test_gradients_of_an_earlier_batch_are_not_taken_for_this_ones() -> None:
    _, parallel = alone("gpt", plan=Plan.parse("accumulation=2"), measure_noise=True)
    batch = CASES["gpt"].batch(4)
    parallel.train_step(batch)
    parallel.forward_backward(batch)
    parallel.forward_backward(batch)  # adds to the one before
    assert parallel.noise_scale.steps == 2


@pytest.mark.parametrize(
    ("plan", "said"),
    [
        ("pp=2", "pp=2 spreads it"),
        ("tp=2 dp_replicate=2", "tp=2 spreads it"),
        ("dp_replicate=2 ep=2", "those of experts are sums over 2 replicas"),
        ("dp_replicate=1", "one replica with one microbatch has one size"),
    ],
)
def test_plans_that_cannot_measure_the_noise_scale_are_refused(plan: str, said: str) -> None:
    from engines.data.noise_scale import require_measurable

    with pytest.raises(PlanError, match=said):
        require_measurable(Plan.parse(plan))


def test_noise_scale_is_measured_on_request_only() -> None:
    _, parallel = alone("gpt")
    with pytest.raises(InputError, match="`measure_noise` is off"):
        _ = parallel.noise_scale
    _, parallel = alone("gpt", plan=Plan.parse("accumulation=2"), measure_noise=True)
    with pytest.raises(InputError, match="no step was taken yet"):
        _ = parallel.noise_scale


def test_a_gradient_hidden_by_noise_has_no_critical_batch() -> None:
    actual = NoiseScale(covariance_trace=5.0, gradient_square=-0.1, batch=8, steps=3)
    assert actual.critical_batch == inf
    assert "noise hides the gradient (3 steps at batch 8)" in str(actual)
    seen = NoiseScale(covariance_trace=64.0, gradient_square=0.5, batch=8, steps=1)
    assert str(seen).startswith("critical batch 128 samples (1 step at batch 8)")
