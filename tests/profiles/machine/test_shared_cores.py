"""The gain of a rank while those that share its core wait, from rounds of known seconds."""

from __future__ import annotations

from datetime import timedelta
from importlib import import_module
from typing import cast

import pytest
import torch
import torch.distributed as dist

from profiles.machine.bench.job import Job

shared_cores = import_module("profiles.machine.bench.shared_cores")


def test_the_gain_of_a_rank_alone_has_the_range_of_its_rounds(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Together, on the first node, alone; three times."""
    seconds = iter([2.0, 1.0, 1.0, 1.8, 1.0, 1.0, 2.4, 1.0, 1.0])
    monkeypatch.setattr(shared_cores, "_slowest_s", lambda *_: next(seconds))
    cpu = torch.device("cpu")
    job = Job(0, 4, cpu, cast(dist.ProcessGroup, object()), cpu, timedelta(seconds=9), 0.0)
    shared = shared_cores.shared_cores(job, ranks_per_node=2, budget_s=1.0)
    assert shared is not None
    assert shared.alone.value == pytest.approx(2.0)
    assert shared.alone.relative_error * shared.alone.value == pytest.approx((2.4 - 1.8) / 2)
    assert shared.across_nodes  # two ranks of a node are no slower than one
