"""Memory of a process, with the holes of its heap, on processors and accelerators."""

from __future__ import annotations

import subprocess
import sys

import pytest

from advisor.cost import CostModel
from advisor.cost.estimates.process_memory import FEWEST_HOLES, MOST_HOLES, process_memory
from advisor.inputs.facts import Facts
from engines.plan import Plan
from profiles.closed_forms.transformer import TransformerShape, transformer_profile
from profiles.machine.cluster import ClusterProfile
from profiles.machine.clusters import cluster_from_name
from profiles.workload.workload import Workload
from tests.engines.cases import cpu_ranks
from tests.nightly import nightly


def costs_of(cluster: ClusterProfile, *, length: int) -> CostModel:
    shape = TransformerShape(
        kind="llama", layers=4, hidden=256, heads=4, kv_heads=4, ffn=1024, vocab=256,
        length=length, gated=False, tied=False, head_width=64,
    )  # fmt: skip
    model = transformer_profile(shape, name="small")
    return CostModel(Facts(model=model, cluster=cluster, workload=Workload(global_batch_size=1)))


def missed_bytes(costs: CostModel, plan: str) -> float:
    """Of the process, beyond its tensors and context."""
    estimate = costs.estimate(Plan.parse(plan))
    return process_memory(costs, Plan.parse(plan), estimate).nbytes - estimate.peak_bytes


ONE = "microbatch_size=1"


def test_holes_are_as_large_as_a_share_of_what_comes_and_goes() -> None:
    """No unit of it has a tensor of 32 MiB, and one process makes its gradients anew."""
    costs, plan = costs_of(cpu_ranks(1), length=1024), Plan.parse(ONE)
    memory = costs.estimate(plan).memory
    moving = memory.gradients + memory.activations + memory.transient
    assert FEWEST_HOLES * moving < missed_bytes(costs, ONE) < MOST_HOLES * moving


def test_tensors_that_are_mapped_leave_none() -> None:
    """32,768 tokens of 256 channels are 32 MiB."""
    costs = costs_of(cpu_ranks(1), length=32768)
    memory = costs.estimate(Plan.parse(ONE)).memory
    assert missed_bytes(costs, ONE) < memory.gradients < 0.05 * memory.activations


def test_buckets_of_gradients_stay() -> None:
    alone, replicas = costs_of(cpu_ranks(1), length=64), costs_of(cpu_ranks(2), length=64)
    assert missed_bytes(replicas, f"dp_replicate=2 {ONE}") < missed_bytes(alone, ONE)


def test_an_accelerator_has_what_its_allocator_reserves() -> None:
    costs = costs_of(cluster_from_name("1x1xA100-SXM-80GB"), length=1024)
    plan = Plan.parse(ONE)
    estimate = costs.estimate(plan)
    assert process_memory(costs, plan, estimate) == (
        estimate.reserved_bytes,
        estimate.peak_low_bytes,
        estimate.peak_high_bytes,
    )


@pytest.mark.parametrize(("name", "rows"), [("unet", 16), *nightly(("vit", 16), ("t5", 16))])
def test_a_process_holds_what_is_predicted(name: str, rows: int) -> None:
    """Interpreter, libraries, tensors and holes, within a tenth."""
    command = [sys.executable, "-W", "ignore", "-m", "tests.benchmarks.heap", name, str(rows)]
    run = subprocess.run(command, capture_output=True, text=True, timeout=300, check=True)
    predicted, _, measured, _ = run.stdout.splitlines()[-1].split()[-4:]
    assert float(measured) == pytest.approx(float(predicted), rel=0.1)
