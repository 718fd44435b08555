"""Gradients that are added up on accelerators, by hand."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from advisor.cost.calibration import CALIBRATION
from advisor.cost.compute.unit_times import added_s, operation_s
from tests.advisor.cost.memory.hand_made import loads, unit
from tests.factories import gpu

NBYTES, TENSORS = 3e6, 10


@pytest.mark.parametrize("is_host_late", [True, False])
def test_additions_cost_launches_where_the_host_is_late_and_bandwidth_elsewhere(
    is_host_late: bool,
) -> None:
    """A device that waits for the host adds up meanwhile; elsewhere its work hides launches."""
    device = gpu()
    own = unit("a", gradient_bytes=NBYTES, tensors=TENSORS, backward_kernels=1000)
    time = SimpleNamespace(backward_s=0.0 if is_host_late else 1.0)
    added = added_s(loads(own), (time,), share=1.0, device=device)  # type: ignore[arg-type]
    moved_s = 3 * NBYTES / CALIBRATION.bandwidth_bytes_per_s(device)
    launches_s = TENSORS * operation_s(device)
    assert added.total == pytest.approx(launches_s if is_host_late else moved_s)
