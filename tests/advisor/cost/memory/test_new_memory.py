"""A processor maps large tensors anew in each step: gradients, and temporaries of the optimizer."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from advisor.cost.model import CostModel
from advisor.inputs.facts import Facts
from engines.plan import Plan
from profiles.capture.capture import capture
from profiles.provenance import Quantity, Source
from profiles.units import MIB
from profiles.workload.optimizers import optimizer_profile
from profiles.workload.workload import Workload
from tests.engines.cases import cpu_ranks

RATE = 2e9


def step_s(width: int, optimizer: str, plan: str, *, rate: float | None) -> float:
    """A step of two layers of `width` x `width`."""
    plan_ = Plan.parse(f"{plan} microbatch_size=1")
    with torch.device("meta"):
        model = nn.Sequential(nn.Linear(width, width), nn.Linear(width, width))
    cluster = cpu_ranks(plan_.world_size)
    if rate is not None:
        new = Quantity(value=rate, source=Source.MEASURED)
        device = cluster.device.model_copy(update={"new_memory_bytes_per_s": new})
        cluster = cluster.model_copy(update={"device": device})
    facts = Facts(
        model=capture(model, (torch.randn(1, width, device="meta"),)),
        cluster=cluster,
        workload=Workload(
            global_batch_size=plan_.data_degree, optimizer=optimizer_profile(optimizer)
        ),
    )
    return CostModel(facts).estimate(plan_).step_s


@pytest.mark.parametrize(
    ("width", "optimizer", "tensors"),
    [
        (4096, "sgd", 2),  # the gradient of each weight of 64 MiB
        (4096, "adamw", 6),  # and the root and the denominator of AdamW
        (1024, "adamw", 0),  # of 4 MiB, which the allocator keeps
    ],
)
def test_each_large_tensor_that_is_made_is_charged_once(
    width: int, optimizer: str, tensors: int
) -> None:
    mapped_s = step_s(width, optimizer, "dp_replicate=1", rate=RATE)
    mapped_s -= step_s(width, optimizer, "dp_replicate=1", rate=None)
    assert mapped_s == pytest.approx(tensors * 64 * MIB / RATE, abs=1e-9)


def test_a_rank_that_updates_a_quarter_makes_small_temporaries() -> None:
    """Of 64 MiB a rank of four updates 16; its gradients are whole before they are reduced."""
    plan = "dp_replicate=4 zero=2"
    mapped_s = step_s(4096, "adamw", plan, rate=RATE) - step_s(4096, "adamw", plan, rate=None)
    assert mapped_s == pytest.approx(2 * 64 * MIB / RATE, rel=0.01)
