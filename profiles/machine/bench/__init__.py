"""Timings of this job: matrix products, memory, collectives over message sizes, as a profile.

`bench` times, `recall_or_bench` spares the next run the wait, `progress` shows the way.
"""

from profiles.machine.bench.cache import keep, recall_or_bench
from profiles.machine.bench.device import copy_rate, launch_time, matmul_rate
from profiles.machine.bench.measure import BUDGET_S, bench
from profiles.machine.bench.progress import progress

__all__ = [
    "BUDGET_S",
    "bench",
    "copy_rate",
    "keep",
    "launch_time",
    "matmul_rate",
    "progress",
    "recall_or_bench",
]
