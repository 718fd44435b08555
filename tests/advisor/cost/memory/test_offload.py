"""Peak memory that offloading saves and step time that it adds, by hand."""

from __future__ import annotations

import pytest

from advisor.cost import Estimate, estimate
from advisor.cost.ledger import (
    DISK_READ_BYTES_PER_S,
    DISK_WRITE_BYTES_PER_S,
    HOST_LINK_BYTES_PER_S,
)
from advisor.decide.choose import choose
from advisor.decide.decision import Decision
from advisor.inputs.facts import Facts
from engines.plan import CHUNK_BYTES, DataParallel, Offload, PartialPlan, Plan
from profiles.errors import NoPlanError
from profiles.model.profile import Numerics
from profiles.provenance import Quantity, Source
from profiles.units import GIB
from tests.factories import chain, cpus, facts, gpus, transformer

MIDDLE = transformer(name="middle", layers=8, hidden=2048, ffn=5504, tokens=4096)
BASE = "microbatch_size=2 accumulation=4 precision=bf16"
WHOLE = facts(MIDDLE, gpus(1, 1), batch=8)


def _estimate(settings: str, situation: Facts = WHOLE) -> Estimate:
    return estimate(Plan.parse(f"{BASE} {settings}"), situation)


def _of_blocks(samples: int) -> float:
    return sum(
        unit.cost(Numerics.BF16_AUTOCAST).activation_bytes.at(samples)
        for unit in WHOLE.model.blocks()
    )


def test_adam_states_cross_the_host_link_twice_a_step() -> None:
    resident, offloaded = _estimate(""), _estimate("offload=optimizer")
    states = 8 * WHOLE.model.parameters
    assert offloaded.host_bytes == states
    assert offloaded.time.host_s == pytest.approx(2 * states / HOST_LINK_BYTES_PER_S)
    assert offloaded.step_s - resident.step_s == pytest.approx(offloaded.time.host_s)
    assert resident.memory.optimizer == states
    assert offloaded.memory.optimizer == 0


def test_the_optimizer_step_holds_the_states_of_one_chunk() -> None:
    """A chunk is 32 MiB, or one unit where that is larger. On the device are its states, twice its
    bytes, and AdamW's list of temporaries, once."""
    plan = Plan.parse("microbatch_size=1 offload=optimizer")
    for layers, hidden, ffn in ((8, 2048, 5504), (64, 512, 1376)):
        model = transformer(layers=layers, hidden=hidden, ffn=ffn, vocab=8000, tokens=16)
        offloaded = estimate(plan, facts(model, gpus(1, 1), batch=1, precision="fp32"))
        largest = 4 * max(unit.parameters for unit in model.units)
        assert (largest > CHUNK_BYTES) is (hidden == 2048)
        assert offloaded.phase == "adamw step"
        assert offloaded.memory.transient == pytest.approx(3 * max(largest, CHUNK_BYTES))


def test_block_activations_cross_the_host_link_twice_a_microbatch() -> None:
    resident, offloaded = _estimate(""), _estimate("offload=activations")
    activations = _of_blocks(2)
    assert offloaded.host_bytes == pytest.approx(activations)
    assert offloaded.time.host_s == pytest.approx(4 * 2 * activations / HOST_LINK_BYTES_PER_S)
    assert offloaded.step_s > resident.step_s
    assert resident.peak_bytes - offloaded.peak_bytes <= activations


def test_offloading_to_disk_pays_for_the_host_link_and_the_disk() -> None:
    offloaded = _estimate("offload=optimizer offload_to=disk")
    states = 8 * WHOLE.model.parameters
    assert (offloaded.host_bytes, offloaded.disk_bytes) == (0, states)
    assert offloaded.time.host_s == pytest.approx(
        2 * states / HOST_LINK_BYTES_PER_S
        + states / DISK_WRITE_BYTES_PER_S
        + states / DISK_READ_BYTES_PER_S
    )


def test_offloading_activations_of_a_cpu_copies_them_and_saves_no_memory() -> None:
    resident, offloaded = (
        estimate(
            Plan.parse(f"microbatch_size=2 {what}"),
            facts(chain(), cpus(1), batch=2, precision="fp32"),
        )
        for what in ("offload=none", "offload=activations")
    )
    model = chain()
    activations = sum(
        unit.cost(Numerics.AS_BUILT).activation_bytes.at(2)
        for unit in model.units
        if unit in model.blocks()
    )
    bandwidth = cpus(1).device.memory_bandwidth_bytes_per_s.value
    assert activations > 0
    assert offloaded.peak_bytes == resident.peak_bytes
    assert offloaded.step_s - resident.step_s == pytest.approx(4 * activations / bandwidth)


def test_devices_of_a_node_share_its_disk() -> None:
    plan = "dp_replicate=4 offload=optimizer offload_to=disk"
    one = _estimate("offload=optimizer offload_to=disk")
    four = _estimate(plan, facts(MIDDLE, gpus(1, 4), batch=32))
    states = 8 * WHOLE.model.parameters
    more = 3 * states * (1 / DISK_WRITE_BYTES_PER_S + 1 / DISK_READ_BYTES_PER_S)
    assert four.time.host_s - one.time.host_s == pytest.approx(
        more, rel=0.01
    )  # their sums wait too


def test_a_measured_host_link_takes_precedence() -> None:
    rate = Quantity(value=HOST_LINK_BYTES_PER_S / 2, source=Source.MEASURED)
    device = WHOLE.cluster.device.model_copy(update={"host_link_bytes_per_s": rate})
    cluster = WHOLE.cluster.model_copy(update={"device": device})
    slow = Facts(model=WHOLE.model, cluster=cluster, workload=WHOLE.workload)
    usual = _estimate("offload=optimizer").time.host_s
    assert _estimate("offload=optimizer", slow).time.host_s == pytest.approx(2 * usual)


def test_activations_are_offloaded_where_offloading_states_does_not_suffice() -> None:
    """400 thin layers, 8,192 tokens: even their inputs alone are 400 * 8192 * 512 * 2 bytes."""
    deep = transformer(name="deep", layers=400, hidden=512, ffn=1376, tokens=8192)
    inputs = 400 * 8192 * 512 * 2
    roomy = choose(facts(deep, gpus(1, 1, memory_gib=12), batch=8))
    assert roomy.plan.offload is Offload.STATES
    tight = choose(facts(deep, gpus(1, 1, memory_gib=8), batch=8))
    assert tight.plan.offload is Offload.STATES_ACTIVATIONS
    assert roomy.estimate.peak_bytes - tight.estimate.peak_bytes > 0.9 * inputs
    assert tight.estimate.step_s > roomy.estimate.step_s


def test_a_pinned_offload_is_taken_and_its_links_are_reported() -> None:
    decision = choose(
        WHOLE, partial=PartialPlan.build({"offload": "optimizer,activations", "offload_to": "disk"})
    )
    assert decision.plan.offload is Offload.OPTIMIZER_ACTIVATIONS
    text = " ".join(str(decision).split())
    assert "offloaded optimizer and activations" in text
    assert "its optimizer states are kept in files and loaded for the update" in text
    assert "on disk a rank: " in text
    assert "a node's disk 5.00 GB/s written, 7.00 GB/s read" in text


def _allocator_reason(decision: Decision) -> str:
    """Return the sentence of a report about the allocator, from its plan to its settings."""
    text = " ".join(str(decision).split())
    if "the allocator's slack" not in text:
        return ""
    return text.partition("the allocator's slack")[2].partition("PYTORCH_")[0]


def test_the_allocator_is_mentioned_only_where_its_slack_decides() -> None:
    """DDP's upper end holds a tenth of slack, over 2 GiB of context and a quarter of doubt."""
    roomy = choose(facts(MIDDLE, gpus(1, 2), batch=8))
    assert "ALLOC_CONF" not in str(roomy)
    cost = estimate(Plan.parse("dp_replicate=2 microbatch_size=4 precision=bf16"), roomy.facts)
    high, context = cost.peak_high_bytes, 2.5 * GIB
    without = (high - context) / 1.1 + context
    # Five percent of a device are left free.
    tight = gpus(1, 2, memory_gib=(high + without) / 2 / 0.95 / GIB)
    partial = PartialPlan.build({"microbatch_size": 4, "recompute": "none"})
    decision = choose(facts(MIDDLE, tight, batch=8), partial=partial)
    text = " ".join(str(decision).split())
    assert decision.plan.data_parallel is not DataParallel.REPLICATE
    assert f"with it, {without / GIB:.1f} GiB without" in text
    assert "DDP over 2" in _allocator_reason(decision)
    assert "`expandable_segments:True` in PYTORCH_ALLOC_CONF" in text
    assert "`max_split_size_mb:512`" in text
    # A plan that does not fit without the slack either is not a matter of the allocator.
    tighter = gpus(1, 2, memory_gib=0.97 * without / 0.95 / GIB)
    assert "DDP over 2" not in _allocator_reason(
        choose(facts(MIDDLE, tighter, batch=8), partial=partial)
    )


def test_allocator_settings_are_hinted_where_only_the_slack_does_not_fit() -> None:
    partial = PartialPlan.build({"microbatch_size": 1, "recompute": "full", "offload": "none"})
    high = choose(WHOLE, partial=partial).estimate.peak_high_bytes
    tight = gpus(1, 1, memory_gib=0.97 * high / 0.95 / GIB)
    with pytest.raises(NoPlanError) as error:
        choose(facts(MIDDLE, tight, batch=8), partial=partial)
    assert any("expandable_segments:True" in hint for hint in error.value.hints)
