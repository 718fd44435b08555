"""The range of a gain, beside what becomes of it where the device's constants are others."""

from __future__ import annotations

import pytest

from advisor.cost import Estimate, estimate
from advisor.cost.gain import gain_of
from advisor.inputs.facts import Facts
from engines.plan import Plan
from tests.factories import facts, gpus, small_llama

ERROR = 0.4
ONE, OTHER = (
    Plan.parse("pp=4 microbatch_size=2 microbatches=4 schedule=1f1b"),
    Plan.parse("dp_replicate=4 microbatch_size=2"),
)


def _facts(factor: float, error: float) -> Facts:
    """Launches of a device that waits for them, `factor` times as long."""
    cluster = gpus(2, 2, inter_bytes_per_s=25e9)
    launch = cluster.device.launch_s
    launch = launch.model_copy(
        update={"value": 20 * factor * launch.value, "relative_error": error}
    )
    device = cluster.device.model_copy(update={"launch_s": launch})
    return facts(small_llama(), cluster.model_copy(update={"device": device}), batch=8)


def _steps(factor: float = 1.0, error: float = 0.0) -> tuple[Estimate, Estimate]:
    known = _facts(factor, error)
    return estimate(ONE, known), estimate(OTHER, known)


@pytest.mark.parametrize("factor", [1 - ERROR, 1 + ERROR])
def test_a_gain_moves_by_less_than_its_range_where_a_shared_constant_moves(factor: float) -> None:
    one, other = _steps(error=ERROR)
    gain = gain_of(one, other)
    moved = _steps(factor)
    assert abs(gain_of(*moved).seconds - gain.seconds) < gain.doubt_s
    assert abs(moved[0].step_s - one.step_s) > 2 * abs(gain_of(*moved).seconds - gain.seconds)


def test_a_plan_gains_nothing_over_itself_and_is_not_sure_to() -> None:
    one, _ = _steps()
    gain = gain_of(one, one)
    assert gain.seconds == 0
    assert not gain.is_sure
    assert gain.doubt_s > 0
