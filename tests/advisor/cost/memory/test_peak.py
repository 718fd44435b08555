"""Memory against closed forms and sums done by hand."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from advisor.cost import Estimate, estimate
from advisor.inputs.facts import Facts
from engines.plan import Plan
from profiles.units import GIB
from profiles.workload.optimizers import OPTIMIZERS
from profiles.workload.workload import Workload
from tests.factories import chain, cpus, facts, gpus, transformer

# chain(): 4 units of 1 M fp32 parameters; a row of activations is 512 x 1000 x 4 bytes a sample.
PARAMETERS = 4_000_000
ROW = 512 * 1000 * 4
CONTEXT = 0.25 * GIB


def on_cpus(plan: str, *, ranks: int, batch: int) -> Estimate:
    return estimate(Plan.parse(plan), facts(chain(), cpus(ranks), batch=batch, precision="fp32"))


def seven_billion(plan: str) -> Estimate:
    return estimate(Plan.parse(plan), facts())


@pytest.mark.parametrize(
    ("plan", "bytes_per_parameter"),
    [
        # ZeRO paper, fp32 training with Adam: 4 parameters + 4 gradients + 8 moments.
        ("dp_replicate=4 microbatch_size=1", 16),
        # FSDP2 holds shards of all three between steps, whatever is gathered in between.
        ("dp_replicate=4 zero=1 microbatch_size=1", 16 / 4),
        ("dp_replicate=4 zero=2 microbatch_size=1", 16 / 4),
        ("dp_shard=4 microbatch_size=1", 16 / 4),
        ("dp_replicate=2 dp_shard=2 microbatch_size=1", 16 / 2),
    ],
)
def test_model_states_follow_the_zero_paper(plan: str, bytes_per_parameter: float) -> None:
    cost = on_cpus(plan, ranks=4, batch=4)
    assert cost.states_bytes == pytest.approx(bytes_per_parameter * PARAMETERS)


def test_the_peak_of_one_device_is_the_sum_done_by_hand() -> None:
    cost = on_cpus("microbatch_size=2", ranks=1, batch=2)
    # Backward of the last of four units, two samples: its gradient is there, all activations
    # still, its output's gradient and its own temporaries (a row each).
    gradients, activations, work = 4e6, 4 * 2 * ROW, 2 * 2 * ROW
    assert cost.phase == "backward of `layers.3`"
    assert cost.memory.gradients == gradients
    assert cost.memory.activations == activations
    assert cost.memory.transient == work
    states = 4 * PARAMETERS + 8 * PARAMETERS
    assert cost.peak_bytes == pytest.approx(states + gradients + activations + work + CONTEXT)


def test_the_peak_is_the_optimizer_step_where_activations_are_small() -> None:
    model = chain(tokens=1)
    cost = estimate(
        Plan.parse("microbatch_size=1"), facts(model, gpus(1, 1), batch=1, precision="fp32")
    )
    # foreach Adam on an accelerator: one more list as large as the parameters.
    assert cost.phase == "adamw step"
    assert cost.memory.transient == 4 * PARAMETERS
    assert cost.memory.states == 16 * PARAMETERS


def test_zero_1_accumulates_whole_gradients_and_zero_2_shards() -> None:
    cut = "microbatch_size=1 accumulation=2"
    first = on_cpus(f"dp_replicate=4 zero=1 {cut}", ranks=4, batch=8)
    second = on_cpus(f"dp_replicate=4 zero=2 {cut}", ranks=4, batch=8)
    assert first.memory.gradients == 4 * PARAMETERS
    assert second.memory.gradients == 4 * PARAMETERS / 4


def test_full_shard_holds_two_whole_units_and_the_gradients_in_flight() -> None:
    cost = on_cpus("dp_shard=4 microbatch_size=8", ranks=4, batch=32)
    # The unit in work and the one prefetched, and its gradient; nothing was reduced before it.
    assert cost.phase == "backward of `layers.3`"
    assert cost.memory.gathered == (2 + 1) * 4_000_000


def test_full_shard_holds_the_input_of_a_reduction_through_the_next_backward() -> None:
    model = chain(tokens=1)
    cost = estimate(
        Plan.parse("dp_shard=4 microbatch_size=1"),
        facts(model, cpus(4), batch=4, precision="fp32"),
    )
    # Units 1 and 0 whole, the gradient of 1, the fp32 gradients of 2 on their way.
    assert cost.phase == "backward of `layers.1`"
    assert cost.memory.gathered == (2 + 2) * 4_000_000
    assert cost.memory.gradients == 3 * 4_000_000 / 4


def test_bf16_gathers_half_the_bytes_and_keeps_fp32_masters() -> None:
    plan = "dp_shard=16 microbatch_size=1 accumulation=8"
    half = seven_billion(f"{plan} precision=bf16")
    assert half.states_bytes == pytest.approx(16 * transformer().parameters / 16)
    gathers = [t for t in half.traffic if t.kind == "all_gather"]
    block = transformer().units[1].parameters
    assert any(t.payload_bytes == 2 * block for t in gathers)
    reductions = [t for t in half.traffic if t.kind == "reduce_scatter"]
    assert any(t.payload_bytes == 4 * block for t in reductions)


def test_full_recompute_keeps_a_row_per_block_and_one_blocks_activations() -> None:
    none, full = (
        seven_billion(f"dp_shard=16 microbatch_size=1 precision=bf16 recompute={kind}")
        for kind in ("none", "full")
    )
    row, wide = 4096 * 4096 * 2, 4096 * 11008 * 2
    block = 12 * row + 4 * wide
    assert none.memory.activations == 32 * block
    # While gradients pile up and activations go, the fullest moment is near the end.
    assert full.phase == "backward of `layers.1`"
    assert full.memory.activations == 2 * row
    again, backward = block - row, 4 * row + 3 * wide
    assert full.memory.transient == row + again + backward


def test_offload_takes_the_states_off_the_device() -> None:
    cost = seven_billion("dp_shard=16 microbatch_size=1 precision=bf16 offload=states")
    assert cost.memory.states == 0
    assert cost.host_bytes == pytest.approx(16 * transformer().parameters / 16)
    assert cost.host_traffic_bytes > 0


def test_the_range_contains_the_prediction_and_fits_compares_its_upper_end() -> None:
    cost = seven_billion("dp_shard=16 microbatch_size=1 precision=bf16")
    assert cost.peak_low_bytes < cost.peak_bytes < cost.peak_high_bytes
    assert cost.fits(cost.peak_high_bytes)
    assert not cost.fits(cost.peak_bytes)


KINDS = ("dp_replicate={d}", "dp_replicate={d} zero=1", "dp_replicate={d} zero=2", "dp_shard={d}")


@given(
    power=st.integers(1, 6),
    size=st.integers(1, 4),
    rounds=st.integers(1, 3),
    precision=st.sampled_from(("fp32", "bf16")),
)
def test_more_sharding_never_raises_the_states_nor_the_peak(
    power: int, size: int, rounds: int, precision: str
) -> None:
    degree = 2**power
    cut = f"microbatch_size={size} accumulation={rounds} precision={precision}"
    whole = facts(_SMALL, gpus(1, degree), batch=size * rounds * degree, precision=precision)
    costs = [estimate(Plan.parse(f"{k.format(d=degree)} {cut}"), whole) for k in KINDS]
    states = [e.states_bytes for e in costs]
    assert states == sorted(states, reverse=True)
    larger = Facts(model=_SMALL, cluster=gpus(1, 2 * degree), workload=whole.workload)
    for kind, before in zip(KINDS, costs, strict=True):
        after = estimate(Plan.parse(f"{kind.format(d=2 * degree)} {cut}"), larger)
        assert after.states_bytes <= before.states_bytes
        assert after.peak_bytes <= before.peak_bytes


_SMALL = transformer(name="small", layers=3, hidden=256, ffn=512, vocab=1000, tokens=64)


def test_replicas_of_a_stage_sum_its_gradients_through_a_flat_copy() -> None:
    """At the end of a round; shards are reduced unit by unit, which takes less than a backward."""
    workload = Workload(global_batch_size=4, precision="fp32", optimizer=OPTIMIZERS["sgd"])
    few = Facts(model=chain(tokens=1), cluster=gpus(1, 4), workload=workload)
    stages = "pp=2 microbatch_size=1 microbatches=2 schedule=1f1b stages=layers.2"
    copied = estimate(Plan.parse(f"{stages} dp_replicate=2"), few)
    assert copied.phase == "exchange of the stage's gradients"
    assert copied.memory.gathered == copied.memory.gradients == 2 * 4e6  # two units, in fp32
    assert estimate(Plan.parse(f"{stages} dp_shard=2"), few).phase == "backward of `layers.1`"
