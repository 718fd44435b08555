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


def test_where_everything_fits_on_the_device_nothing_leaves_and_why_not_says_what_it_costs() -> (
    None
):
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


def test_the_optimizer_leaves_where_that_is_all_that_fits_fast_enough() -> None:
    """14 GiB: parameters and gradients are 4 GiB of the states' 8, what Adam keeps the rest."""
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


def test_the_fastest_of_an_attempt_is_taken() -> None:
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


def test_files_are_the_last_attempt_and_the_only_plan_that_fits() -> None:
    """4 GiB of main memory hold no 4 GiB of Adam's beside what is left free."""
    with pytest.raises(NoPlanError) as nothing:
        choose(alone(14, host_gib=4))
    assert any(h.startswith("keep states in files on a disk") for h in nothing.value.hints)
    decision = choose(alone(14, host_gib=4, disk=True))
    plan, found = decision.plan, decision.estimate
    assert (plan.offload, plan.offload_to) == (Offload.OPTIMIZER, OffloadTo.DISK)
    assert (found.host_bytes, found.disk_bytes) == (0, ADAM_BYTES)
    over_the_link_s = 2 * ADAM_BYTES / HOST_LINK_BYTES_PER_S
    assert found.time.host_s == pytest.approx(over_the_link_s + ADAM_BYTES * (1 / WRITE + 1 / READ))
    text = " ".join(str(decision).split())
    assert "offloaded optimizer to disk" in text
    assert "Tried before: one device, offloaded optimizer does not fit: needs" in text
    assert "usable main memory per node" in text
    assert "give `offload_folder=`" in text


def test_states_of_shards_in_files_are_read_and_written_as_often_as_they_are_used() -> None:
    """ZeRO-1, eight microbatches: parameters are gathered once, gradients reduced once."""
    decision = choose(alone(10, host_gib=4, disk=True))
    assert decision.plan.data_parallel == "zero1"
    assert decision.plan.offload is Offload.STATES
    size = 4 * MIDDLE.parameters
    read = 2 * size + size + 2 * size  # gather and step, gradients, two moments
    written = size + size + 2 * size
    link_s = 2 * size / HOST_LINK_BYTES_PER_S  # hidden in part: a gather there, a reduction back
    found = decision.estimate.time.host_s
    expected = read / READ + written / WRITE
    assert expected <= found * (1 + 1e-9)
    assert found <= (expected + link_s) * (1 + 1e-9)


def test_a_processor_has_files_alone() -> None:
    """Its main memory is the device's."""
    cluster = cpus(1)
    small = Quantity(value=10 * GIB, source=Source.MEASURED)
    device = cluster.device.model_copy(update={"memory_bytes": small})
    cluster = cluster.model_copy(update={"device": device})
    assert list(attempts(facts(MIDDLE, cluster, batch=8), PartialPlan())) == []
    decision = choose(facts(MIDDLE, timed(cluster), batch=8))
    assert decision.plan.offload_to is OffloadTo.DISK
    assert "way to the host" not in str(decision)


def test_of_a_processors_own_memory_nothing_is_said_to_wait_elsewhere() -> None:
    situation = facts(chain(), cpus(1), batch=2, precision="fp32")
    decision = choose(situation, partial=PartialPlan.build({"offload": "activations"}))
    assert decision.estimate.time.host_s > 0  # copied within its memory
    assert not any("a rank are kept in" in reason for reason in decision.reasons)


def test_what_is_free_on_the_disk_decides_too() -> None:
    cluster = alone(14, host_gib=4, disk=True).cluster
    full = cluster.model_copy(update={"disk_free_bytes": exact(0.9 * ADAM_BYTES)})
    with pytest.raises(NoPlanError, match=r"\d+ by `fits-disk`"):
        choose(facts(MIDDLE, full, batch=8))
    roomy = alone(24).cluster.model_copy(update={"disk_free_bytes": exact(0.9 * ADAM_BYTES)})
    asked = choose(facts(MIDDLE, roomy, batch=8)).why_not("offload=optimizer offload_to=disk")
    assert asked.verdict is PlanVerdict.NO_FIT
    assert "that are free on a node's disk" in asked.because


def test_pins_say_it_all() -> None:
    for partial in (PartialPlan(offload=Offload.NONE), PartialPlan(offload=Offload.ACTIVATIONS)):
        assert list(attempts(alone(14, disk=True), partial)) == []
    to = [
        attempt.to
        for attempt in attempts(alone(14, disk=True), PartialPlan.build({"offload_to": "host"}))
    ]
    assert set(to) == {OffloadTo.HOST}


def test_a_folder_that_is_named_is_a_disk(tmp_path: Path) -> None:
    cluster = gpus(1, 1)
    assert cluster.disk_write_bytes_per_s is None
    found = with_disk(cluster, tmp_path)
    assert found.disk_write_bytes_per_s is not None
    assert found.disk_write_bytes_per_s.source is Source.ASSUMED
    assert found.disk_free_bytes is not None
    assert found.disk_free_bytes.value > 0
    assert with_disk(timed(cluster)).disk_read_bytes_per_s == exact(READ)
    assert with_disk(cluster, tmp_path / "missing").disk_free_bytes is None


def test_stages_of_shards_in_files_wait_for_their_own_part() -> None:
    """Two stages hold half of the parameters each; so does what they read and write."""
    two = facts(MIDDLE, timed(gpus(1, 2)), batch=8)
    costs = CostModel(two)
    settings = "pp=2 zero=3 microbatch_size=1 microbatches=8 schedule=1f1b precision=bf16"
    stages = f"stages={MIDDLE.units[4].name}"
    here, there = (
        costs.estimate(Plan.parse(f"{settings} {stages} offload=states offload_to={to}"))
        for to in OffloadTo
    )
    assert there.host_bytes == 0
    assert there.disk_bytes == pytest.approx(here.host_bytes)
    assert there.step_s > here.step_s
    assert there.peak_high_bytes == pytest.approx(here.peak_high_bytes)
