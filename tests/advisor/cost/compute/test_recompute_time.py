"""Time of recompute: the forward again, of all blocks or some, and the checkpoint's Python code."""

from __future__ import annotations

import pytest

from advisor.cost import estimate
from engines.plan import Plan
from tests.factories import chain, cpus, facts, gpus


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


@pytest.mark.parametrize("blocks", [1, 3, 4])
def test_recompute_of_some_blocks_takes_their_share(blocks: int) -> None:
    known = facts(chain(), cpus(1), batch=1, precision="fp32")
    none, some, every = (
        estimate(Plan.parse(f"microbatch_size=1 {settings}"), known).time
        for settings in ("", f"recompute=full recompute_blocks={blocks}", "recompute=full")
    )
    assert some.recompute_s == pytest.approx(blocks / 4 * every.recompute_s)
    launched = some.launch_s - none.launch_s
    assert launched == pytest.approx(blocks / 4 * (every.launch_s - none.launch_s))
    assert some.compute_s == none.compute_s
