"""Context and expert parallelism against counts done by hand."""

from __future__ import annotations

import pytest

from advisor.cost import CostModel, Estimate, estimate
from advisor.cost.communication.groups import expert_copies
from advisor.decide.candidates import searched
from advisor.inputs.policy import Policy
from advisor.search.cache import SearchCache
from engines.plan import DataParallel, PartialPlan, Plan
from profiles.closed_forms.families import profile_from_config
from profiles.machine.cluster import Collective
from profiles.model.profile import ModelProfile, ParameterShape
from tests.factories import chain, cpus, facts, gpus, transformer

# chain(): units of 1 M fp32 parameters, and a row of 512 x 1000 x 4 bytes a sample.
UNIT = 4_000_000
ROW = 512 * 1000 * 4


def on_cpus(text: str, model: ModelProfile | None = None, *, samples: int = 2) -> Estimate:
    plan = Plan.parse(f"{text} microbatch_size={samples}")
    inputs = facts(model or chain(), cpus(plan.world_size), batch=64, precision="fp32")
    return estimate(plan, inputs)


def test_context_parallel_ranks_divide_activations_and_computing() -> None:
    whole, shared = on_cpus("dp_replicate=1", samples=64), on_cpus("cp=4", samples=64)
    assert shared.memory.activations == whole.memory.activations / 4
    assert shared.states_bytes == whole.states_bytes
    assert shared.time.compute_s == pytest.approx(whole.time.compute_s / 4)
    assert shared.samples_per_s * shared.step_s == pytest.approx(64)


def test_keys_and_values_pass_the_ring_once_forward_and_twice_backward() -> None:
    """Keys and values count as wide as the block by default: 2 rows of two samples, four units."""
    cost = on_cpus("cp=4")
    passed = {item.purpose: item for item in cost.traffic if item.group_size == 4}
    assert passed["keys and values"].payload_bytes == 2 * 2 * ROW
    assert passed["keys and values"].count == 2 * 4
    assert passed["gradients of keys and values"].kind is Collective.REDUCE_SCATTER
    # Parameters are whole on all of them, so their gradients are averaged like those of replicas.
    assert sum(
        item.payload_bytes * item.count for item in cost.traffic if item.purpose == "gradients"
    ) == (pytest.approx(4 * UNIT))


def test_states_are_sharded_over_the_dp_shard_and_cp_axes() -> None:
    cost = on_cpus("dp_shard=2 cp=2")
    assert cost.states_bytes == 4 * 4 * UNIT / 4
    gathers = next(item for item in cost.traffic if item.purpose == "parameters")
    assert (gathers.group_size, gathers.stride) == (4, 1)


def test_the_stride_of_the_cp_axis_is_the_tp_degree() -> None:
    """Two nodes of eight: with tp=8 the two ranks of the cp axis are on different ones."""
    plan = Plan.parse("cp=2 tp=8 microbatch_size=2")
    cost = estimate(plan, facts(transformer(layers=2), gpus(2), batch=2))
    passed = {item.purpose: item for item in cost.traffic}["keys and values"]
    assert (passed.group_size, passed.stride, passed.link) == (2, 8, "InfiniBand")


def test_the_stride_of_replicas_of_a_shard_covers_both_sharding_axes() -> None:
    """Shards of dp_shard=2 by cp=4 fill a node of eight; their replicas are on the other node."""
    plan = Plan.parse("dp_replicate=2 dp_shard=2 cp=4 microbatch_size=2")
    cost = estimate(plan, facts(transformer(layers=2), gpus(2), batch=8))
    sent = {item.purpose: item for item in cost.traffic}
    parameters, shards = sent["parameters"], sent["gradient shards"]
    assert (parameters.group_size, parameters.stride, parameters.link) == (8, 1, "NVLink")
    assert (shards.group_size, shards.stride, shards.link) == (2, 8, "InfiniBand")


def mixture() -> ModelProfile:
    """Give every unit 8 experts of 100 k parameters, and 200 k parameters that all tokens use."""
    model = chain(tokens=8)
    shapes = (
        ParameterShape(sizes=(8, 100, 1000), element_bytes=4),
        ParameterShape(sizes=(200, 1000), element_bytes=4),
    )
    update = {"shapes": shapes, "experts": (8,)}
    units = tuple(unit.model_copy(update=update) for unit in model.units)
    return model.model_copy(update={"units": units})


def test_expert_parallel_ranks_hold_a_part_of_the_experts_and_exchange_tokens() -> None:
    whole, shared = on_cpus("dp_replicate=4", mixture()), on_cpus("dp_replicate=4 ep=4", mixture())
    experts = 4 * 800_000 * 16
    assert whole.states_bytes - shared.states_bytes == experts * 3 / 4
    sent = [item for item in shared.traffic if item.kind is Collective.ALL_TO_ALL]
    # Two experts a token; four units; forward and backward.
    row = 2 * 8 * 1000 * 4
    assert {item.payload_bytes for item in sent} == {2 * row}
    assert sum(item.count for item in sent) == 4 * 2 * 2
    assert shared.time.compute_s == whole.time.compute_s


def test_tokens_are_sent_to_as_many_experts_as_the_configuration_says() -> None:
    """Qwen3 30B-A3B sends a token to eight of its experts: four times what two receive."""
    two = on_cpus("dp_replicate=4 ep=4", mixture())
    eight = mixture().model_copy(update={"experts_per_token": 8})
    sent = [
        sum(t.bus_bytes for t in cost.traffic if t.kind is Collective.ALL_TO_ALL)
        for cost in (two, on_cpus("dp_replicate=4 ep=4", eight))
    ]
    assert sent[1] == 4 * sent[0] > 0
    config: dict[str, object] = {
        "model_type": "qwen3_moe",
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_hidden_layers": 1,
        "num_attention_heads": 4,
        "num_key_value_heads": 4,
        "vocab_size": 100,
        "num_experts": 16,
        "moe_intermediate_size": 24,
        "num_experts_per_tok": 6,
    }
    counted = profile_from_config(config, samples=1, sequence_length=16, name="mixture")
    assert counted.experts_per_token == 6
    assert chain().experts_per_token is None


def test_more_context_parallel_ranks_are_no_slower_on_fast_links() -> None:
    steps = []
    for cp in (1, 2, 4, 8):
        plan = Plan.parse(f"dp_shard={8 // cp} cp={cp} microbatch_size=1 precision=bf16")
        inputs = facts(transformer(layers=8, tokens=32768), gpus(1), batch=8)
        steps.append(estimate(plan, inputs).step_s)
    assert steps == sorted(steps, reverse=True)


def test_fsdp_shards_experts_over_the_ranks_that_hold_the_same_ones() -> None:
    """4 units of 200 k parameters over four ranks, and of 800 k in experts shared by two, of which
    two have the same: a rank keeps a quarter of all, at 16 bytes of states each. It gathers its
    half of the experts from the other copy, twice, and reduces their gradients over both."""
    cost = on_cpus("dp_shard=4 ep=2", mixture())
    assert cost.states_bytes == 4 * (200_000 + 800_000) * 16 / 4
    sent = {t.purpose: t for t in cost.traffic if t.kind is not Collective.ALL_TO_ALL}
    rest, experts = sent["parameters"], sent["parameters of experts"]
    assert (rest.payload_bytes, rest.group_size, rest.count) == (200_000 * 4, 4, 4 * 2)
    assert (experts.payload_bytes, experts.count) == (800_000 * 4 / 2, 4 * 2)
    assert (experts.group_size, experts.stride) == (2, 2)
    reduced = sent["gradients of experts"]
    assert (reduced.kind, reduced.count) == (Collective.REDUCE_SCATTER, 4)
    assert (reduced.payload_bytes, reduced.group_size) == (800_000 * 4 / 2, 2)


def test_experts_stay_whole_without_copies_and_under_hsdp() -> None:
    """Half of 800 k in experts a unit is no shard, at 16 bytes of states each."""
    alone = on_cpus("dp_shard=4 ep=4", mixture())
    assert alone.states_bytes == 4 * (200_000 * 16 / 4 + 800_000 * 16 / 4)
    assert "parameters of experts" not in {t.purpose for t in alone.traffic}
    hybrid = on_cpus("dp_replicate=2 dp_shard=2 ep=2", mixture())
    assert hybrid.states_bytes == 4 * (200_000 * 16 / 2 + 800_000 * 16 / 2)
    (copies,) = [item for item in hybrid.traffic if item.purpose == "gradients of experts"]
    assert (copies.group_size, copies.stride) == (2, 2)
    assert copies.payload_bytes * copies.count == pytest.approx(4 * 800_000 * 4 / 2)


@pytest.mark.parametrize(
    "words",
    [
        "cp=2 dp_shard=4 ep=2",
        "cp=2 dp_shard=4 ep=4",
        "cp=4 dp_replicate=2 zero=1 ep=2",
        "cp=2 dp_replicate=2 dp_shard=2 ep=4",
        "dp_shard=8 ep=4",
    ],
)
def test_copies_of_experts_span_the_data_and_cp_axes(words: str) -> None:
    """Ranks are numbered data axes first, cp within; compare those that hold the first experts."""
    plan = Plan.parse(words)
    copies = [rank for rank in range(plan.world_size) if rank // plan.cp % plan.ep == 0]
    size, stride = expert_copies(plan)
    assert size == len(copies)
    assert (size - 1) * stride < plan.world_size
    if plan.ep == plan.data_degree or plan.cp == 1:
        assert [n * stride for n in range(size)] == copies
    cost = on_cpus(words, mixture(), samples=1)
    (summed,) = (t for t in cost.traffic if t.purpose == "gradients of experts")
    assert summed.group_size == len(copies)


@pytest.mark.parametrize("ep", [2, 4])
def test_no_estimate_with_experts_is_below_the_bounds_of_the_search(ep: int) -> None:
    known = facts(mixture(), cpus(8), batch=16, precision="fp32")
    search = searched(SearchCache(CostModel(known)), PartialPlan.build({"ep": ep}), Policy())
    kinds = set()
    for index in range(len(search.space)):
        candidate = search.candidate(index)
        kinds.add((candidate.plan.shards_experts, candidate.plan.data_parallel))
        cost = candidate.estimate
        assert search.bounds.step_s[index] <= cost.step_s * (1 + 1e-9)
        assert search.bounds.peak_high_bytes[index] <= cost.peak_high_bytes * (1 + 1e-9)
    assert (True, DataParallel.FULL_SHARD) in kinds
    assert (True, DataParallel.ZERO1) in kinds
    assert (False, DataParallel.HYBRID_SHARD) in kinds
