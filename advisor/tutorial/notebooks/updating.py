"""Synchronous against asynchronous updates: the cost of stale gradients."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from math import pi, sin

import torch
import torch.distributed as dist
from torch import Tensor, nn

from advisor.auto.parallelize import auto_parallelize
from engines.optional.async_updates.report import UpdateReport
from engines.optional.async_updates.server import ParameterServer
from profiles.machine.probe import probe
from profiles.units import format_percent, format_seconds

DIMENSIONS, ROWS = 16, 96
STEPS, RATE = 48, 0.15
LATE = 20  # final updates whose largest loss counts, as the loss oscillates


def largest_rate(staleness: int) -> float:
    """Largest stable rate of gradient descent on a quadratic of curvature 1 with gradients of this
    staleness d: 2 sin(pi / (2 (2 d + 1))) (Levin and May 1976)."""
    return 2 * sin(pi / (2 * (2 * staleness + 1)))


def descend(rate: float, staleness: int, updates: int = 60) -> list[float]:
    """Loss x^2 / 2 before the first and after each update on a parameter server, from x = 1.

    `staleness` + 1 workers take turns; each computes at the parameters that it took last time.
    """
    x = nn.Parameter(torch.ones(1, dtype=torch.float64))
    workers = staleness + 1
    optimizer = torch.optim.SGD([x], lr=rate)
    server = ParameterServer([x], optimizer, workers=range(workers), needed=None)
    taken = [(server.version, x.detach().clone())] * workers
    losses = [x.item() ** 2 / 2]
    for turn in range(updates):
        worker = turn % workers
        version, gradient = taken[worker]
        server.push(worker, version, [gradient])  # the gradient of x^2 / 2 is x
        taken[worker] = server.version, x.detach().clone()
        losses.append(x.item() ** 2 / 2)
    return losses


def largest_rate_tried(staleness: int) -> float:
    """The same by trial: the last rate at which the loss falls, to a hundredth."""
    low, high = 0.0, 2.56
    while high - low > 0.01:
        rate = (low + high) / 2
        losses = descend(rate, staleness, updates=40 * (staleness + 1))
        third = len(losses) // 3
        falls = max(losses[2 * third :]) < max(losses[third : 2 * third])
        low, high = (rate, high) if falls else (low, rate)
    return low


@cache
def problem() -> tuple[Tensor, Tensor, Tensor]:
    """Return inputs, targets, and the least-squares weights; the largest curvature is 1."""
    draw = torch.Generator().manual_seed(0)
    rows = torch.randn(ROWS, DIMENSIONS, generator=draw)
    rows *= ROWS**0.5 / torch.linalg.matrix_norm(rows, 2)
    targets = rows.sum(1) + 0.3 * torch.randn(ROWS, generator=draw)
    return rows, targets, torch.linalg.lstsq(rows, targets[:, None]).solution[:, 0]


class LinearModel(nn.Module):
    """Linear function of inputs (B, D), initialized to zero."""

    def __init__(self) -> None:
        super().__init__()
        self.weights = nn.Parameter(torch.zeros(DIMENSIONS))

    def forward(self, rows: Tensor) -> Tensor:
        out: Tensor = rows @ self.weights
        return out


def half_square(outputs: Tensor, targets: Tensor) -> Tensor:
    """Half the mean squared error."""
    return (outputs - targets).square().mean() / 2


def above_optimum(weights: Tensor) -> float:
    """Excess of the loss over all rows above its minimum."""
    rows, _, best = problem()
    return float((rows @ (weights.detach() - best)).square().mean() / 2)


@dataclass(frozen=True, slots=True)
class RankRun:
    """Results of one rank.

    Attributes:
        seconds, losses: after each of its steps; the loss above the optimum.
        report: outcome of its updates.
    """

    seconds: tuple[float, ...]
    losses: tuple[float, ...]
    report: UpdateReport


def train(plan: str, pause_s: float = 0.0) -> RankRun:
    """Train on each rank, including parameter servers; the last rank is slowed by `pause_s`."""
    rows, targets, _ = problem()
    parallel = auto_parallelize(
        LinearModel(),
        sample=(rows, targets),
        loss_fn=half_square,
        optimizer=lambda parameters: torch.optim.SGD(parameters, lr=RATE),
        plan=plan,
        global_batch_size=ROWS,
        cluster=probe(),
        learns=False,
    )
    is_slow = dist.get_rank() == dist.get_world_size() - 1
    seconds, losses = [], []
    began = time.perf_counter()
    for part in parallel.shard([(rows, targets)] * STEPS):
        if is_slow:
            time.sleep(pause_s)
        parallel.train_step(part)
        seconds.append(time.perf_counter() - began)
        losses.append(above_optimum(parallel.module.get_parameter("weights")))
    report = parallel.update_report
    assert report is not None  # only synchronous plans have none
    return RankRun(tuple(seconds), tuple(losses), report)


def summarize_alone(
    rate: float,
    curves: Mapping[int, Sequence[float]],
    limits: Mapping[int, tuple[float, float]],
) -> str:
    """Summarize the plot of `descend`; `limits` are (formula, tried) by staleness."""
    start, *_ = next(iter(curves.values()))
    ends = ", ".join(
        f"{max(losses[-LATE:]):.2g} with gradients {staleness} updates old"
        for staleness, losses in curves.items()
    )
    oldest = max((age for age, (_, tried) in limits.items() if tried > rate), default=None)
    difference = max(abs(tried / formula - 1) for formula, tried in limits.values())
    return (
        f"From {start:g} the loss goes to {ends}. The rate {rate:g} bears gradients up to {oldest}"
        f" updates old; formula and trial differ by {format_percent(difference)} at most."
    )


def summarize_together(
    synchronous: Sequence[RankRun],
    asynchronous: Sequence[RankRun],
    local: Mapping[int, Sequence[RankRun]],
) -> str:
    """Summarize the plot of `train`; runs are those of all ranks, in order."""
    one, other = synchronous[1], asynchronous[1]  # the first worker, after the server
    report = asynchronous[0].report
    often, rarely = min(local), max(local)
    sent = local[often][0].report.sent_bytes / local[rarely][0].report.sent_bytes
    return (
        f"Beside a slow rank, {STEPS} steps of another take {format_seconds(one.seconds[-1])} if it"
        f" waits and {format_seconds(other.seconds[-1])} if it does not; gradients are then"
        f" {report.mean_staleness:.1f} updates old on the average, {report.most_staleness} at most."
        f" Replicas that meet every {rarely} steps send {sent:g} times less than those that meet"
        f" every {often}, and end {local[rarely][0].losses[-1]:.2g} above the optimum instead of"
        f" {local[often][0].losses[-1]:.2g}."
    )
