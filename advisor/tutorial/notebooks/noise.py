"""Noise scale: the batch size above which more samples are wasted, measured and then tested."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from itertools import islice

import torch
from torch import Tensor, nn

from advisor.auto.parallelize import auto_parallelize
from engines.parallel import ParallelModel
from profiles.machine.probe import probe
from profiles.units import format_percent

DIMENSIONS = 64
TRUE_CRITICAL_BATCH = 32.0
FLATTEST = 0.02
MEASURED_STEPS, MEASURED_BATCH = 200, 64
TARGET = 0.25
"""Of the loss at the start: where a training is over."""
MOST_STEPS = 2000


class Bowl(nn.Module):
    """A quadratic whose gradients have a known mean and covariance; its loss at the optimum is 0.

    Curvatures l go from `FLATTEST` to 1, and x begins at 1 / l, so that every element of the
    gradient is 1: |G|^2 is `DIMENSIONS`. A sample adds noise to the gradient, of variance
    `TRUE_CRITICAL_BATCH` in every element, so that tr(Sigma) / |G|^2 is that number.
    """

    curvature: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("curvature", torch.logspace(0, 1, DIMENSIONS, base=FLATTEST))
        self.x = nn.Parameter(1 / self.curvature)

    def forward(self, noise: Tensor) -> Tensor:
        """Loss of each sample (B) from noise (B, D)."""
        out: Tensor = self.exact() + noise @ self.x
        return out

    def exact(self) -> Tensor:
        """Expected loss over the sample distribution."""
        out: Tensor = (self.curvature * self.x.square()).sum() / 2
        return out


def mean(losses: Tensor, _: Tensor) -> Tensor:
    """Mean of the samples' losses; there is no target."""
    return losses.mean()


def batches(size: int) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield global batches of fresh noise, the same on every rank; endless."""
    draw = torch.Generator().manual_seed(size)
    while True:
        noise = torch.randn(size, DIMENSIONS, generator=draw)
        yield TRUE_CRITICAL_BATCH**0.5 * noise, torch.zeros(size)


def _parallel(size: int, rate: float, *, measure_noise: bool = False) -> ParallelModel:
    noise, target = next(batches(size))
    return auto_parallelize(
        Bowl(),
        sample=(noise, target),
        loss_fn=mean,
        optimizer=lambda parameters: torch.optim.SGD(parameters, lr=rate),
        plan="dp_replicate=2",
        global_batch_size=size,
        measure_noise=measure_noise,
        cluster=probe(),
        learns=False,
    )


def measure() -> list[float]:
    """Estimate the critical batch from two replicas' gradients at each step, with learning rate
    0."""
    parallel = _parallel(MEASURED_BATCH, rate=0.0, measure_noise=True)
    estimates = []
    for part in islice(parallel.shard(batches(MEASURED_BATCH)), MEASURED_STEPS):
        parallel.train_step(part)
        estimates.append(parallel.noise_scale.critical_batch)
    return estimates


def fall(size: int, critical_batch: float) -> list[float]:
    """Loss before the first and after each step of batches of `size`, until it has fallen to
    `TARGET`. The rate is optimal for such a batch: 1 / (1 + critical / size) of the largest."""
    parallel = _parallel(size, rate=1 / (1 + critical_batch / size))
    bowl = parallel.module
    assert isinstance(bowl, Bowl)
    losses = [bowl.exact().item()]
    for part in islice(parallel.shard(batches(size)), MOST_STEPS):
        parallel.train_step(part)
        losses.append(bowl.exact().item())
        if losses[-1] <= TARGET * losses[0]:
            break
    return losses


def summarize(measured: Sequence[float], falls: Mapping[int, list[float]]) -> str:
    """Summarize the plot in a sentence."""
    costs = "; ".join(
        f"batches of {size} take {len(losses) - 1} steps and {size * (len(losses) - 1):,} samples"
        for size, losses in falls.items()
    )
    return (
        f"Gradients of two replicas say {measured[-1]:.1f} samples, the truth is"
        f" {TRUE_CRITICAL_BATCH:.0f}. To fall to {format_percent(TARGET)} of the loss, {costs}."
    )
