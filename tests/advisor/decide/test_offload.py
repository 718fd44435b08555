"""Offload where nothing else fits: the order, the reasons, and the price."""

from __future__ import annotations

from pathlib import Path

import pytest

from advisor.cost import CostModel
from advisor.cost.ledger import HOST_LINK_BYTES_PER_S
from advisor.decide.candidates import legal_plans
from advisor.decide.choose import choose
from advisor.decide.comparison import PlanVerdict
from advisor.decide.offload import attempts, with_disk
from advisor.inputs.facts import Facts
from advisor.inputs.policy import Policy
from advisor.search.ranking import weigh
from engines.plan import Offload, OffloadTo, PartialPlan, Plan
from profiles.errors import NoPlanError
from profiles.machine.cluster import ClusterProfile
from profiles.provenance import Quantity, Source
from profiles.units import GIB
from tests.factories import chain, cpus, exact, facts, gpus, transformer

MIDDLE = transformer(name="middle", layers=8, hidden=2048, ffn=5504, tokens=4096)
ADAM_BYTES = 8 * MIDDLE.parameters
WRITE, READ = 1e9, 2e9


def alone(device_gib: float, *, host_gib: float | None = None, disk: bool = False) -> Facts:
    """One GPU of so much memory, with or without a disk of known rates."""
    cluster = gpus(1, 1, memory_gib=device_gib)
    if host_gib is not None:
        cluster = cluster.model_copy(update={"host_memory_bytes": exact(host_gib * GIB)})
    return facts(MIDDLE, timed(cluster) if disk else cluster, batch=8)


def timed(cluster: ClusterProfile) -> ClusterProfile:
    rates = {"disk_write_bytes_per_s": exact(WRITE), "disk_read_bytes_per_s": exact(READ)}
    return cluster.model_copy(update=rates)


def test_nothing_is_offloaded_where_everything_fits_and_why_not_states_the_cost() -> None:
    decision = choose(alone(24, disk=True))
    assert decision.plan.offload is Offload.NONE
    for settings in ("offload=optimizer", "offload=activations", "offload=states zero=3"):
        answer = decision.why_not(settings)
        assert answer.verdict is PlanVerdict.SLOWER
        assert answer.estimate is not None
        assert answer.estimate.step_s > decision.estimate.step_s
        assert "more transfers to the host" in answer.because
    slower = decision.why_not("offload=optimizer").estimate
    assert slower is not None
    gone_and_back_s = 2 * ADAM_BYTES / HOST_LINK_BYTES_PER_S
    assert slower.time.host_s == pytest.approx(gone_and_back_s)


def test_the_optimizer_is_offloaded_where_nothing_faster_fits() -> None:
    """14 GiB: parameters and gradients are 4 of the 8 GiB of states, Adam's moments the rest."""
    situation = alone(14)
    decision = choose(situation)
    assert (decision.plan.offload, decision.plan.offload_to) == (Offload.OPTIMIZER, OffloadTo.HOST)
    assert decision.estimate.host_bytes == ADAM_BYTES
    assert decision.estimate.time.host_s == pytest.approx(2 * ADAM_BYTES / HOST_LINK_BYTES_PER_S)
    weighed = weigh(legal_plans(situation, PartialPlan()), CostModel(situation), Policy())
    assert not any(candidate.fits for candidate in weighed)  # with all of it on the device
    why = " ".join(decision.reasons)
    assert "Nothing fits without offload: one device comes nearest" in why
    share = decision.estimate.time.host_s / decision.estimate.step_s
    assert f"of a step ({share:.0%})" in why


def test_the_fastest_of_all_offloaded_plans_is_chosen() -> None:
    """The choice is the fastest of all plans of all three kinds."""
    situation = alone(12)
    decision = choose(situation)
    costs = CostModel(situation)
    every = [
        candidate
        for what in (Offload.OPTIMIZER, Offload.STATES, Offload.ACTIVATIONS)
        for candidate in weigh(legal_plans(situation, PartialPlan(), offload=what), costs, Policy())
        if candidate.fits
    ]
    fastest = min(candidate.estimate.step_s for candidate in every)
    assert len({candidate.plan.offload for candidate in every}) > 1
    assert decision.estimate.step_s <= fastest * (1 + Policy().simplicity_margin)


def test_the_disk_is_tried_last_and_chosen_where_nothing_else_fits() -> None:
    """4 GiB of main memory cannot hold Adam's 4 GiB, since a part of it stays free."""
    with pytest.raises(NoPlanError) as nothing:
        choose(alone(14, host_gib=4))
    assert any(h.startswith("keep states in files on a disk") for h in nothing.value.hints)
    decision = choose(alone(14, host_gib=4, disk=True))
    plan, cost = decision.plan, decision.estimate
    assert (plan.offload, plan.offload_to) == (Offload.OPTIMIZER, OffloadTo.DISK)
    assert (cost.host_bytes, cost.disk_bytes) == (0, ADAM_BYTES)
    over_the_link_s = 2 * ADAM_BYTES / HOST_LINK_BYTES_PER_S
    assert cost.time.host_s == pytest.approx(over_the_link_s + ADAM_BYTES * (1 / WRITE + 1 / READ))
    text = " ".join(str(decision).split())
    assert "offloaded optimizer to disk" in text
    assert "Tried before: one device, offloaded optimizer does not fit: needs" in text
    assert "usable main memory per node" in text
    assert "give `offload_folder=`" in text


def test_sharded_states_on_disk_are_read_and_written_at_every_use() -> None:
    """ZeRO-1, eight microbatches: parameters are gathered once, gradients reduced once."""
    decision = choose(alone(9, host_gib=4, disk=True))
    assert decision.plan.data_parallel == "zero1"
    assert decision.plan.offload is Offload.STATES
    size = 4 * MIDDLE.parameters
    read = 2 * size + size + 2 * size  # gather and step, gradients, two moments
    written = size + size + 2 * size
    link_s = 2 * size / HOST_LINK_BYTES_PER_S  # hidden in part: a gather there, a reduction back
    host_s = decision.estimate.time.host_s
    expected = read / READ + written / WRITE
    assert expected <= host_s * (1 + 1e-9)
    assert host_s <= (expected + link_s) * (1 + 1e-9)


def test_cpus_offload_to_disk_only() -> None:
    """Its main memory is the device's."""
    cluster = cpus(1)
    small = Quantity(value=10 * GIB, source=Source.MEASURED)
    device = cluster.device.model_copy(update={"memory_bytes": small})
    cluster = cluster.model_copy(update={"device": device})
    assert list(attempts(facts(MIDDLE, cluster, batch=8), PartialPlan())) == []
    decision = choose(facts(MIDDLE, timed(cluster), batch=8))
    assert decision.plan.offload_to is OffloadTo.DISK
    assert "way to the host" not in str(decision)


def test_the_reasons_of_cpus_mention_no_offloaded_states() -> None:
    situation = facts(chain(), cpus(1), batch=2, precision="fp32")
    decision = choose(situation, partial=PartialPlan.build({"offload": "activations"}))
    assert decision.estimate.time.host_s > 0  # copied within its memory
    assert not any("a rank are kept in" in reason for reason in decision.reasons)


def test_free_disk_space_limits_offloading() -> None:
    cluster = alone(14, host_gib=4, disk=True).cluster
    full = cluster.model_copy(update={"disk_free_bytes": exact(0.9 * ADAM_BYTES)})
    with pytest.raises(NoPlanError, match=r"\d+ by `fits-disk`"):
        choose(facts(MIDDLE, full, batch=8))
    roomy = alone(24).cluster.model_copy(update={"disk_free_bytes": exact(0.9 * ADAM_BYTES)})
    asked = choose(facts(MIDDLE, roomy, batch=8)).why_not("offload=optimizer offload_to=disk")
    assert asked.verdict is PlanVerdict.NO_FIT
    assert "that are free on a node's disk" in asked.because


def test_pinned_offload_settings_limit_the_attempts() -> None:
    for partial in (PartialPlan(offload=Offload.NONE), PartialPlan(offload=Offload.ACTIVATIONS)):
        assert list(attempts(alone(14, disk=True), partial)) == []
    to = [
        attempt.to
        for attempt in attempts(alone(14, disk=True), PartialPlan.build({"offload_to": "host"}))
    ]
    assert set(to) == {OffloadTo.HOST}


def test_a_given_folder_adds_a_disk_to_the_cluster(tmp_path: Path) -> None:
    cluster = gpus(1, 1)
    assert cluster.disk_write_bytes_per_s is None
    equipped = with_disk(cluster, tmp_path)
    assert equipped.disk_write_bytes_per_s is not None
    assert equipped.disk_write_bytes_per_s.source is Source.ASSUMED
    assert equipped.disk_free_bytes is not None
    assert equipped.disk_free_bytes.value > 0
    assert with_disk(timed(cluster)).disk_read_bytes_per_s == exact(READ)
    assert with_disk(cluster, tmp_path / "missing").disk_free_bytes is None


def test_pipeline_stages_read_and_write_their_own_states_only() -> None:
    """Two stages hold half of the parameters each, and read and write that half only."""
    two = facts(MIDDLE, timed(gpus(1, 2)), batch=8)
    costs = CostModel(two)
    settings = "pp=2 zero=3 microbatch_size=1 microbatches=8 schedule=1f1b precision=bf16"
    stages = f"stages={MIDDLE.units[4].name}"
    on_host, on_disk = (
        costs.estimate(Plan.parse(f"{settings} {stages} offload=states offload_to={to}"))
        for to in OffloadTo
    )
    assert on_disk.host_bytes == 0
    assert on_disk.disk_bytes == pytest.approx(on_host.host_bytes)
    assert on_disk.step_s > on_host.step_s
    assert on_disk.peak_high_bytes == pytest.approx(on_host.peak_high_bytes)
