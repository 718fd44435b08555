"""Waiting time of a manually placed module, against n latency + bytes / rate."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from advisor.cost import CostModel
from advisor.cost.calibration import CALIBRATION
from advisor.decide.choose import choose
from advisor.inputs.facts import Facts
from advisor.inputs.manual_placement import with_parts
from advisor.whatif.sweep.points import Swept, sweep
from engines.plan import PartialPlan, Plan
from profiles.capture.capture import capture
from profiles.errors import InputError
from profiles.machine.cluster import ClusterProfile
from profiles.machine.clusters import cluster_from_name
from profiles.model.profile import ModelProfile
from profiles.workload.workload import Workload
from tests.placed import put

WIDTH, LATENCY_S, RATE = 1000, 1e-5, 1e9
ROWS, ROUNDS = 8, 3
ROW_BYTES = 4 * WIDTH


class Halves(nn.Module):
    """Two linear layers on two devices; only the activations between them are sent."""

    def __init__(self, first: str, second: str) -> None:
        super().__init__()
        self.lower = put(nn.Linear(WIDTH, WIDTH), first)
        self.upper = put(nn.Linear(WIDTH, WIDTH), second)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.upper(self.lower(x).to(self.upper.weight.device))
        return F.mse_loss(out, torch.zeros_like(out))


def profile(first: str = "cuda:0", second: str = "cuda:1") -> ModelProfile:
    return capture(Halves(first, second), torch.zeros(2, WIDTH), name="halves")


def machines(name: str = "2xA100-SXM-80GB") -> ClusterProfile:
    cluster = cluster_from_name(name)
    assert cluster.intra is not None
    rate, latency = cluster.intra.bandwidth_bytes_per_s, cluster.intra.latency_s
    link = cluster.intra.model_copy(
        update={
            "bandwidth_bytes_per_s": rate.model_copy(update={"value": RATE}),
            "latency_s": latency.model_copy(update={"value": LATENCY_S}),
        }
    )
    return cluster.model_copy(update={"intra": link})


def facts(cluster: ClusterProfile, model: ModelProfile, replicas: int = 1) -> Facts:
    workload = Workload(global_batch_size=ROWS * ROUNDS * replicas)
    return Facts(model=model, cluster=with_parts(cluster, model), workload=workload)


PLAN = Plan(microbatch_size=ROWS, accumulation=ROUNDS)


def test_every_microbatch_waits_for_its_activations_and_gradients() -> None:
    model = profile()
    split = CostModel(facts(machines(), model)).estimate(PLAN)
    whole = model.model_copy(update={"crossings": {}})
    unsplit = CostModel(facts(machines(), whole)).estimate(PLAN)
    rate = RATE * CALIBRATION.collectives  # inside a step
    waited = ROUNDS * 2 * (LATENCY_S + ROWS * ROW_BYTES / rate)
    assert split.step_s - unsplit.step_s == pytest.approx(waited)
    assert split.time.exposed_s == pytest.approx(waited)
    assert {t.purpose: (t.payload_bytes, t.count) for t in split.traffic} == {
        "activations of parts": (ROWS * ROW_BYTES, ROUNDS),
        "gradients of parts": (ROWS * ROW_BYTES, ROUNDS),
    }


def test_parts_in_main_memory_are_reached_over_the_host_link() -> None:
    model = profile("cpu", "cuda:0")
    cluster = cluster_from_name("A100-SXM-80GB")
    rate = cluster.device.memory_bytes.model_copy(update={"value": RATE})
    device = cluster.device.model_copy(update={"host_link_bytes_per_s": rate})
    cluster = cluster.model_copy(update={"device": device})
    cost = CostModel(facts(cluster, model)).estimate(PLAN)
    assert cost.time.host_s == pytest.approx(ROUNDS * 2 * ROWS * ROW_BYTES / RATE)
    assert cost.host_traffic_bytes == ROUNDS * 2 * ROWS * ROW_BYTES
    assert not cost.traffic


def test_a_node_of_four_devices_holds_two_replicas_of_two_devices() -> None:
    model, cluster = profile(), cluster_from_name("2x4xA100-SXM-80GB")
    replicas = with_parts(cluster, model)
    assert (replicas.num_nodes, replicas.devices_per_node) == (2, 2)
    assert replicas.device.memory_bytes.value == 2 * cluster.device.memory_bytes.value
    assert replicas.device.context_bytes.value == 2 * cluster.device.context_bytes.value
    assert replicas.parts is not None
    assert (replicas.parts.world_size, replicas.parts.intra) == (2, cluster.intra)
    assert choose(facts(cluster, model, replicas=4)).plan.dp_replicate == 4


def test_a_cluster_with_parts_keeps_its_number_of_ranks() -> None:
    job = cluster_from_name("2xA100-SXM-80GB").model_copy(update={"parts": machines()})
    assert with_parts(job, profile()).world_size == 2


def test_machines_with_fewer_devices_than_parts_are_refused() -> None:
    with pytest.raises(InputError, match="on 2 devices of a process") as error:
        with_parts(cluster_from_name("A100-SXM-80GB"), profile())
    assert error.value.what.endswith("a node of A100-SXM-80GB has 1")
    assert error.value.hints == ("name machines with 2 devices a node or more",)


def test_the_report_names_the_traffic_between_parts_and_its_link() -> None:
    decision = choose(facts(machines(), profile()))
    (said,) = [reason for reason in decision.reasons if "split by hand" in reason]
    assert "from cuda:0 to cuda:1 and back" in said
    link = decision.facts.cluster.parts.intra  # type: ignore[union-attr]
    assert f"over {link.name}; while one device computes the others wait" in said
    assert "split by hand over 2 devices a rank" in decision.facts.cluster.notes[-1]
    assert "links in a rank: " in str(decision)


def test_half_the_bandwidth_between_the_parts_takes_twice_the_time() -> None:
    """Apart from latency, going from r/2 to r/4 adds twice the time of going from r to r/2."""
    rates = ["1 GB/s", "0.5 GB/s", "0.25 GB/s"]
    swept = sweep(facts(machines(), profile()), Swept.BANDWIDTH, rates, settings=PartialPlan())
    fast, slow, slower = (point.step_s for point in swept.points)
    assert (slower - slow) / (slow - fast) == pytest.approx(2)
