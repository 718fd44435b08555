"""Launches of recompute: the forward's kernels again, and Python's code of the checkpoint."""

from __future__ import annotations

import pytest

from advisor.cost import estimate
from engines.plan import Plan
from tests.factories import chain, facts, gpus


def test_a_gpu_in_wait_of_its_host_pays_for_the_hooks_of_saved_tensors() -> None:
    """A forward of one kernel and a backward of two: the forward's again, and for each tensor that
    a kernel of the backward reads two launches of Python's code, at 0.42 of a launch."""
    machine, launch_s = gpus(1, 1), 1.0
    launch = machine.device.launch_s.model_copy(update={"value": launch_s})
    device = machine.device.model_copy(update={"launch_s": launch})
    machine = machine.model_copy(update={"device": device})
    known = facts(chain(), machine, batch=1, precision="fp32")
    once = estimate(Plan.parse("microbatch_size=1"), known).time.launch_s
    again = estimate(Plan.parse("microbatch_size=1 recompute=full"), known).time.launch_s
    assert again - once == pytest.approx(4 * (1 + 2 * 2 * 0.42) * launch_s, rel=1e-3)
