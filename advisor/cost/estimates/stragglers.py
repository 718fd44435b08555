"""Waiting for slower ranks: times that scatter, and ranks that are slower in every step."""

from __future__ import annotations

from math import sqrt
from statistics import NormalDist

from engines.plan import Plan, Updates
from profiles.workload.workload import Workload


def waiting_s(
    plan: Plan, *, computing_s: float, imbalance: float, straggling: float = 0.0
) -> float:
    """Seconds per step that a rank waits for slower ones, with random scatter or a persistent
    straggler.

    The k-th of n draws from a normal distribution is expected at the quantile (k - 3/8) / (n + 1/4)
    (Blom 1958, "Statistical Estimates and Transformed Beta-Variables"). A step waits for all n, or
    with backup workers for all but the last; replicas that synchronize every H steps wait for sums
    of H independent draws; asynchronous updates do not wait.

    A persistent straggler delays all: sums of H steps are late by H times as much, and with bounded
    staleness the others soon reach the bound. With backup workers a step does not wait for it once
    the others are done.

    Args:
        imbalance: standard deviation of a rank's compute time, over its mean.
        straggling: additional compute time of the slowest rank, over that of the others.
    """
    is_asynchronous = plan.updates is Updates.ASYNCHRONOUS
    needed = plan.world_size - plan.servers - plan.backup_workers
    ranks = needed + plan.backup_workers
    if ranks < 2 or (is_asynchronous and plan.max_staleness is None):
        return 0.0
    every = plan.sync_every if plan.updates.is_periodic else 1
    scatter = 0.0 if is_asynchronous else imbalance / sqrt(every)
    late = max(straggling, scatter * _place(needed, ranks))
    if plan.backup_workers:
        late = min(late, scatter * _place(needed, ranks - 1))
    return max(0.0, computing_s * late)


def straggling(plan: Plan, workload: Workload, *, computing_s: float) -> float:
    """Seconds of `waiting_s` for the workload's imbalance and straggling."""
    return waiting_s(
        plan,
        computing_s=computing_s,
        imbalance=workload.imbalance,
        straggling=workload.straggling,
    )


def _place(place: int, count: int) -> float:
    """Expected order statistic, in standard deviations."""
    return NormalDist().inv_cdf((place - 3 / 8) / (count + 1 / 4))
