"""The host's work for sharded parameters: FSDP2's hooks, and an optimizer's step of shards."""

from __future__ import annotations

import pytest

from advisor.cost import estimate
from advisor.inputs.facts import Facts
from engines.plan import Plan
from profiles.workload.optimizers import OPTIMIZERS
from tests.factories import chain, cpus, facts, gpus


def by_own_class(known: Facts) -> Facts:
    """The same, stepped by a class of somebody's, which goes through shards one by one."""
    optimizer = OPTIMIZERS["adamw"].model_copy(update={"name": "OwnAdamW"})
    workload = known.workload.model_copy(update={"optimizer": optimizer})
    return known.model_copy(update={"workload": workload})


def test_a_processor_pays_for_the_hooks_of_sharded_parameters() -> None:
    """Measured in one process at 14 us a launch: 280 us a unit and 28 a parameter of FSDP2's hooks,
    25 us a tensor of AdamW, of a rank's own ones of shards too, and 122 a shard."""
    known = facts(chain(), cpus(2), batch=2, precision="fp32")
    shards = Plan.parse("dp_shard=2 microbatch_size=1")
    whole = estimate(Plan.parse("dp_replicate=2 microbatch_size=1"), known)
    sharded, one_by_one = estimate(shards, known), estimate(shards, by_own_class(known))
    launch_s = 5e-6
    hooks_s = 4 * (280 + 28) / 14 * launch_s
    assert sharded.time.launch_s - whole.time.launch_s == pytest.approx(hooks_s)
    # Each rank steps half of the elements, of as many tensors.
    moved_s = 4e6 * 84 / 10e9
    plain_s = pytest.approx(4 * 25 / 14 * launch_s, rel=0.1)
    assert whole.time.optimizer_s - moved_s == plain_s
    assert sharded.time.optimizer_s - moved_s / 2 == plain_s
    dispatched_s = one_by_one.time.optimizer_s - moved_s / 2
    assert dispatched_s == pytest.approx(4 * 122 / 14 * launch_s, rel=0.1)


def test_so_does_an_accelerator_that_waits_for_its_host() -> None:
    """Hooks launch copies and collectives there besides: as many launches, whatever Python's share
    (0.42, `PYTHON_SHARE`). Optimizers that are not torch's go through shards one by one."""
    machine, launch_s = gpus(1, 2), 50e-6
    launch = machine.device.launch_s.model_copy(update={"value": launch_s})
    device = machine.device.model_copy(update={"launch_s": launch})
    known = facts(
        chain(parameters=4096, width=64),
        machine.model_copy(update={"device": device}),
        batch=2,
        precision="fp32",
    )
    shards = Plan.parse("dp_shard=2 microbatch_size=1")
    whole = estimate(Plan.parse("dp_replicate=2 microbatch_size=1"), known).time
    sharded = estimate(shards, known).time
    one_by_one = estimate(shards, by_own_class(known)).time
    hooks_s = 4 * 2 * (10 + 1) * launch_s
    assert sharded.launch_s - whole.launch_s == pytest.approx(hooks_s)
    for time in (whole, sharded):  # as far as the device waits: 10 launches, and 5 % of one for
        waiting = time.launch_s / (time.compute_s + time.launch_s)  # each of 9 of 4 tensors
        lists_s = waiting * (10 + 0.05 * 9 * 4) * launch_s
        assert time.optimizer_s == pytest.approx(lists_s, rel=0.02)
    assert one_by_one.optimizer_s == pytest.approx(4 * 122 / 14 * 0.42 * launch_s, rel=0.1)
