"""Gradient communication is chosen where it matters; precision is lost only where allowed."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from advisor.auto.parallelize import advise
from advisor.cost import estimate
from advisor.cost.calibration import CALIBRATION
from advisor.decide.choose import choose
from advisor.decide.decision import Decision
from advisor.inputs.bundled.resnet import ResNet
from advisor.inputs.networks import network_profile
from advisor.inputs.policy import Policy
from engines.plan import Aggregation, Compression, PartialPlan, Plan
from profiles.errors import PlanError
from profiles.machine.cluster import ClusterProfile, Collective, LinkFit
from profiles.model.profile import ModelProfile, ParameterShape
from tests.factories import chain, facts, gpus

LOSSY = Policy(allow_lossy=True)


def matrices() -> ModelProfile:
    """Four matrices of 1000 x 1000."""
    model = chain()
    matrix = ParameterShape(sizes=(1000, 1000), element_bytes=4)
    units = tuple(unit.model_copy(update={"shapes": (matrix,)}) for unit in model.units)
    return model.model_copy(update={"units": units})


def slow(*, is_ring: bool) -> ClusterProfile:
    """Two nodes of two at 12.5 MB/s, as two ranks that send messages find them; and a backend whose
    all-reduce is a flat ring there, or what trees can do at the best."""
    cluster = gpus(2, 2, inter_bytes_per_s=12.5e6)
    assert cluster.inter is not None
    fits = {Collective.SEND_RECV: LinkFit(latency_s=1e-4, busbw_bytes_per_s=12.5e6)}
    if is_ring:
        fits[Collective.ALL_REDUCE] = LinkFit(latency_s=1e-4, busbw_bytes_per_s=12.5e6)
    return cluster.model_copy(update={"inter": cluster.inter.model_copy(update={"fits": fits})})


def decided(cluster: ClusterProfile, policy: Policy = LOSSY, **settings: object) -> Decision:
    known = facts(matrices(), cluster, batch=4, precision="fp32")
    return choose(
        known,
        policy=policy,
        partial=PartialPlan.build({"data_parallel": "replicate", "pp": 1, **settings}),
    )


def test_a_hierarchy_is_taken_where_the_backend_sends_more_between_nodes() -> None:
    """16 MB: 1.5 of them leave a node by the backend's ring, 1 by the hierarchy."""
    decision = decided(slow(is_ring=True), Policy())
    assert decision.plan.aggregation is Aggregation.HIERARCHICAL
    (said,) = [r for r in decision.reasons if r.startswith("Gradients are reduced with")]
    assert "aggregation=hierarchical: 1.28 s of a step is exposed communication" in said
    assert "1.92 s with the backend's all-reduce; no precision is lost" in said
    assert "DDP over 4, hierarchical sums" in str(decision)


@pytest.mark.parametrize(
    "fixed",
    [{"aggregation": "hierarchical"}, {"compression": "bf16"}],
    ids=lambda fixed: str(fixed),
)
def test_what_sends_less_is_planned_where_it_is_fixed(fixed: dict[str, str]) -> None:
    """The backend's ring, which takes longer, is no bound of such plans."""
    decision = decided(slow(is_ring=True), Policy(), dp_replicate=4, **fixed)
    assert decision.estimate == estimate(decision.plan, decision.facts)
    assert str(decision.plan).endswith(" ".join(f"{k}={v}" for k, v in fixed.items()))


def test_the_backend_is_kept_where_nothing_is_faster() -> None:
    cluster = gpus(2, 2, inter_bytes_per_s=12.5e6)  # NCCL's trees send a tensor once
    assert decided(cluster, Policy()).plan.aggregation is Aggregation.BACKEND
    assert decided(gpus(1, 4)).plan == decided(gpus(1, 4), Policy()).plan


def test_lossy_compression_is_offered_with_its_gain_and_chosen_when_allowed() -> None:
    cluster = slow(is_ring=True)
    careful, allowed = decided(cluster, Policy()), decided(cluster)
    assert careful.plan.compression is Compression.NONE
    assert allowed.plan.compression is Compression.POWERSGD
    times = careful.estimate.step_s / allowed.estimate.step_s
    (offer,) = (said for said in careful.offers if "--allow-lossy" in said)
    assert offer.startswith(
        f"compression=powersgd compression_rank=4 is predicted {times:.1f} times as fast"
    )
    assert "matrices are sent as factors of rank 4" in offer
    assert "`--allow-lossy`" in " ".join(str(careful).split())
    assert not any("--allow-lossy" in offer for offer in allowed.offers)
    assert "which changes the training" in " ".join(allowed.reasons)
    # Factors of rank 4: 8,000 of 1,000,000 numbers.
    assert sum(
        t.payload_bytes * t.count for t in allowed.estimate.traffic if t.purpose == "gradients"
    ) == pytest.approx(16e6 * 0.008)


def test_of_tied_compressions_the_one_that_loses_less_is_chosen() -> None:
    """At 9 GB/s PowerSGD is ahead of half of the bytes, by less than the margin."""
    decision = decided(gpus(2, 2, inter_bytes_per_s=9e9 / CALIBRATION.collectives))
    factors = {"compression": Compression.POWERSGD, "compression_rank": 4}
    faster = estimate(decision.plan.model_copy(update=factors), decision.facts)
    assert faster.step_s < decision.estimate.step_s < 1.05 * faster.step_s
    assert decision.plan.compression is Compression.BF16


def test_convolutions_are_compressed_to_the_factors_of_torchs_hook() -> None:
    """A kernel is the matrix of its outputs by all else, as `powerSGD_hook` reshapes it: at rank 4
    1.54 MB of ResNet-50's 102 MB, its norms and biases among them."""
    cluster = gpus(2, 1, inter_bytes_per_s=12.5e6)
    known = facts(network_profile("resnet50-64px", samples=8), cluster, batch=16, precision="fp32")
    allowed = choose(known, policy=LOSSY, partial=PartialPlan(dp_replicate=2))
    assert allowed.plan.compression is Compression.POWERSGD
    numbers = 0
    for parameter in ResNet(50).parameters():
        rows, columns = parameter.shape[0], parameter.shape[1:].numel()
        factors = 4 * (rows + columns)
        is_spared = parameter.dim() > 1 and 2 * factors < rows * columns
        numbers += factors if is_spared else parameter.numel()
    sent = [t for t in allowed.estimate.traffic if t.purpose == "gradients"]
    assert sum(t.payload_bytes * t.count for t in sent) == pytest.approx(4 * numbers)


def test_a_given_aggregation_is_kept_and_priced() -> None:
    decision = decided(slow(is_ring=True), Policy(), aggregation="tree")
    assert decision.plan.aggregation is Aggregation.TREE
    assert decision.estimate == estimate(decision.plan, decision.facts)
    why = decided(slow(is_ring=True), Policy()).why_not("aggregation=gather")
    assert why.plan is not None
    assert why.plan.aggregation is Aggregation.GATHER
    assert "more exposed communication" in why.because


def test_advise_accepts_allow_lossy() -> None:
    model = nn.Sequential(nn.Linear(1000, 1000), nn.ReLU(), nn.Linear(1000, 1000))
    asked: dict[str, Any] = {
        "sample": (torch.zeros(2, 1000), torch.zeros(2, 1000)),
        "loss_fn": nn.functional.mse_loss,
        "cluster": slow(is_ring=True),
        "plan": "dp_replicate=4",
    }
    assert advise(model, **asked).plan.compression is Compression.NONE
    assert advise(model, **asked, allow_lossy=True).plan.compression is Compression.POWERSGD


def test_sharded_plans_refuse_compression() -> None:
    known = facts(matrices(), slow(is_ring=True), batch=4, precision="fp32")
    with pytest.raises(PlanError, match="compression=bf16 is for DDP of a whole model"):
        choose(known, partial=PartialPlan.build({"dp_shard": 4, "compression": "bf16"}))
    assert Plan.parse("dp_replicate=4 compression=bf16").compression is Compression.BF16
