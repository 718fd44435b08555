"""Latency and bandwidth of a link from timings of messages of many sizes."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from itertools import accumulate

from profiles.machine.cluster import LinkFit

_Points = Sequence[tuple[float, float]]


def fit(points: _Points) -> LinkFit:
    """The line time = latency + traffic / bandwidth through (traffic bytes, seconds).

    Traffic is `bus_factor * bytes`, so the slope is the bus bandwidth. Deviations count relative to
    the time, weighted by its square root: half-way between all sizes alike (which bends the
    bandwidth to fit the middle, where libraries change algorithm) and absolute seconds (which sees
    the largest size only). Outliers are damped (Huber, k = 1.345: 95 % efficient on normal errors).
    `relative_residual` holds the deviations of the times from the line, 80 % of them by weight.

    Raises:
        ValueError: fewer than two sizes, or a time that is not above 0.
    """
    if len({traffic for traffic, _ in points}) < 2 or any(seconds <= 0 for _, seconds in points):
        raise ValueError("a fit needs two sizes, and times above 0")
    base = [math.sqrt(seconds) for _, seconds in points]
    weights, latency, slope = base, 0.0, 0.0
    for _ in range(20):
        latency, slope = _line(points, weights)
        deviations = [(latency + slope * traffic) / seconds - 1 for traffic, seconds in points]
        spread = 1.4826 * statistics.median(abs(deviation) for deviation in deviations)
        if spread < 1e-12:
            break
        weights = [
            weight * min(1.0, 1.345 * spread / max(abs(deviation), 1e-12))
            for weight, deviation in zip(base, deviations, strict=True)
        ]
    misses = sorted(
        (abs(seconds / (latency + slope * traffic) - 1), weight)
        for (traffic, seconds), weight in zip(points, base, strict=True)
    )
    total = accumulate(weight for _, weight in misses)
    within = next(
        miss for (miss, _), sum_ in zip(misses, total, strict=True) if sum_ >= 0.8 * sum(base)
    )
    return LinkFit(latency_s=latency, busbw_bytes_per_s=1 / slope, relative_residual=within)


def _line(points: _Points, weights: Sequence[float]) -> tuple[float, float]:
    """Weighted least squares of (latency + slope * traffic) / seconds against 1; latency >= 0."""
    ones, mixed, squares, left, right = 0.0, 0.0, 0.0, 0.0, 0.0
    for (traffic, seconds), weight in zip(points, weights, strict=True):
        u, v = 1 / seconds, traffic / seconds
        ones += weight * u * u
        mixed += weight * u * v
        squares += weight * v * v
        left += weight * u
        right += weight * v
    determinant = ones * squares - mixed * mixed
    latency = (left * squares - right * mixed) / determinant
    slope = (ones * right - mixed * left) / determinant
    if slope <= 0:  # times that fall with size: noise hides the bytes, and is what messages take
        traffic, seconds = max(points)
        return left / ones, seconds / traffic
    if latency < 0:
        # Times that grow faster than the size. The small messages still take what they take: the
        # line goes through the smallest, and near the others.
        traffic, seconds = min(points)
        slope = right / squares
        latency = max(0.0, seconds - slope * traffic)
        fixed = right - latency * mixed
        return (latency, fixed / squares) if fixed > 0 else (0.0, slope)
    return latency, slope
