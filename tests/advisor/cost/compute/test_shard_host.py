"""The host's work for sharded parameters: FSDP2's hooks, and an optimizer's step of shards."""

from __future__ import annotations

import pytest

from advisor.cost import estimate
from engines.plan import Plan
from tests.factories import chain, cpus, facts, gpus


def test_a_processor_pays_for_the_hooks_and_the_dispatch_of_sharded_parameters() -> None:
    """Measured in one process at 14 us a launch: 280 us a unit and 28 a parameter of FSDP2's hooks,
    25 us a tensor of AdamW and 122 a shard."""
    known = facts(chain(), cpus(2), batch=2, precision="fp32")
    whole = estimate(Plan.parse("dp_replicate=2 microbatch_size=1"), known)
    sharded = estimate(Plan.parse("dp_shard=2 microbatch_size=1"), known)
    launch_s = 5e-6
    hooks_s = 4 * (280 + 28) / 14 * launch_s
    assert sharded.time.launch_s - whole.time.launch_s == pytest.approx(hooks_s)
    # Each rank steps half of the elements, of as many tensors.
    moved_s = 4e6 * 84 / 10e9
    assert whole.time.optimizer_s - moved_s == pytest.approx(4 * 25 / 14 * launch_s, rel=0.1)
    assert sharded.time.optimizer_s - moved_s / 2 == pytest.approx(4 * 122 / 14 * launch_s, rel=0.1)


def test_so_does_an_accelerator_that_waits_for_its_host() -> None:
    """Hooks launch copies and collectives there besides: as many launches, whatever Python's share.
    Shards are stepped in lists: 24 us more of Python a shard than a plain tensor, of 14 in a
    launch."""
    machine, launch_s = gpus(1, 2), 50e-6
    launch = machine.device.launch_s.model_copy(update={"value": launch_s})
    device = machine.device.model_copy(update={"launch_s": launch})
    known = facts(
        chain(parameters=4096, width=64),
        machine.model_copy(update={"device": device}),
        batch=2,
        precision="fp32",
    )
    whole, sharded = (
        estimate(Plan.parse(f"{kind}=2 microbatch_size=1"), known).time
        for kind in ("dp_replicate", "dp_shard")
    )
    hooks_s = 4 * 2 * (10 + 1) * launch_s
    assert sharded.launch_s - whole.launch_s == pytest.approx(hooks_s)
    assert whole.optimizer_s < 0.01 * sharded.optimizer_s
    assert sharded.optimizer_s == pytest.approx(4 * 24 / 14 * 0.42 * launch_s, rel=0.05)
