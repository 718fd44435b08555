"""More of what a cluster has never makes the fastest plan slower by its own price."""

from __future__ import annotations

import functools

import pytest

from advisor.decide.choose import choose
from advisor.inputs.policy import Objective, Policy
from profiles.machine.cluster import ClusterProfile
from tests.factories import facts, gpus, transformer

# It fits one device with 30 GiB to spare; four samples of it take as long as its gradients.
MODEL = transformer(name="middle", layers=8, hidden=2048, ffn=5504, tokens=2048)
FASTEST = Policy(objective=Objective.TIME)
ROUNDING = 1e-9
PLACES = pytest.mark.parametrize("place", ["intra", "inter"])


@functools.cache
def _step_s(
    nodes: int = 2,
    devices: int = 4,
    *,
    batch: int = 64,
    memory_gib: float = 79.6,
    intra: float = 50e9,
    inter: float = 10e9,
) -> float:
    """Seconds of a step under the plan that is fastest, of all that are legal and fit."""
    cluster: ClusterProfile = gpus(
        nodes,
        devices,
        memory_gib=memory_gib,
        intra_bytes_per_s=intra,
        inter_bytes_per_s=inter,
    )
    return choose(facts(MODEL, cluster, batch=batch), policy=FASTEST).estimate.step_s


@pytest.mark.parametrize("devices", [1, 2, 4])
def test_more_devices_in_a_node_are_never_slower(devices: int) -> None:
    assert _step_s(1, 2 * devices) <= _step_s(1, devices) * (1 + ROUNDING)


@pytest.mark.parametrize("nodes", [2, 4])
def test_more_nodes_with_as_many_samples_each_never_train_fewer_a_second(nodes: int) -> None:
    """With the same batch they may: four nodes of a slow link send 1.5 times what two send."""
    few, many = 32 * nodes, 64 * nodes
    rate = few / _step_s(nodes, batch=few)
    assert many / _step_s(2 * nodes, batch=many) >= rate * (1 - ROUNDING)


@PLACES
@pytest.mark.parametrize("times", [1.5, 4, 30])
def test_faster_links_are_never_slower(place: str, times: float) -> None:
    usual = {"intra": 50e9, "inter": 10e9}
    assert _step_s(**{place: usual[place] * times}) <= _step_s(**usual) * (1 + ROUNDING)


@pytest.mark.parametrize(("less", "more"), [(24.0, 32.0), (32.0, 48.0), (48.0, 96.0)])
def test_more_memory_is_never_slower(less: float, more: float) -> None:
    assert _step_s(memory_gib=more) <= _step_s(memory_gib=less) * (1 + ROUNDING)


@pytest.mark.parametrize(("small", "large"), [(8, 16), (16, 32), (32, 64), (64, 256)])
def test_a_larger_batch_never_trains_fewer_samples_a_second(small: int, large: int) -> None:
    assert large / _step_s(batch=large) >= small / _step_s(batch=small) * (1 - ROUNDING)
