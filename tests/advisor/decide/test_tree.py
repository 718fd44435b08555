"""The decision tree: whole, printable, and walked by numbers."""

from __future__ import annotations

import re

import networkx as nx
import pytest

from advisor.cost import CostModel
from advisor.decide import tree, walk
from advisor.decide.candidates import legal_plans
from advisor.decide.choose import choose
from advisor.decide.tree import NOT_WEIGHED, Family, TraceStep
from advisor.inputs.facts import Facts
from advisor.inputs.models import profile_model
from advisor.inputs.policy import Policy
from engines.plan import PartialPlan, Plan
from profiles.machine.catalogue import link
from profiles.machine.cluster import AxisFits, Collective, LinkFit
from profiles.machine.clusters import resolve_cluster
from profiles.workload.workload import Workload
from tests.factories import cpus, facts, gpus, transformer

MIDDLE = transformer(name="middle", layers=8, hidden=2048, ffn=5504, tokens=4096)


def test_the_tree_is_one_tree_with_a_family_at_every_leaf() -> None:
    graph = tree.graph()
    assert nx.is_arborescence(graph)
    leaves = [name for name in graph if graph.out_degree(name) == 0]
    assert {family for name in leaves for family in graph.nodes[name]["families"]} == set(Family)
    assert all(graph.nodes[name]["families"] for name in leaves)
    assert all(not graph.nodes[name]["families"] for name in graph if name not in leaves)


def test_every_question_can_be_answered() -> None:
    asked = {question.name for question in tree.QUESTIONS}
    assert asked == set(walk._ANSWERS)
    assert asked == {start for start, _, _ in tree.EDGES}


@pytest.mark.parametrize(
    ("spelt", "families"),
    [
        ("dp_replicate=1", {Family.SINGLE}),
        ("dp_replicate=8", {Family.DDP}),
        ("dp_replicate=8 zero=1", {Family.ZERO}),
        ("dp_shard=8", {Family.ZERO}),
        ("dp_replicate=2 dp_shard=4", {Family.ZERO, Family.HSDP}),
        ("dp_shard=8 offload=states", {Family.OFFLOAD}),
        ("tp=8", {Family.TP, Family.PP_TP_DP, Family.DP_PP_TP_ZERO1}),
        ("tp=2 dp_replicate=4", {Family.TP, Family.PP_TP_DP, Family.DP_PP_TP_ZERO1}),
        ("tp=2 dp_shard=4", {Family.TP, Family.PP_TP_DP}),
        ("pp=4 dp_replicate=2 zero=1", {Family.PP, Family.PP_TP_DP, Family.DP_PP_TP_ZERO1}),
        ("pp=2 dp_shard=4", {Family.PP, Family.PP_TP_DP}),
        ("pp=2 tp=2 dp_replicate=2 zero=1", {Family.PP_TP_DP, Family.DP_PP_TP_ZERO1}),
        ("pp=2 tp=2 dp_replicate=2 zero=2", {Family.PP_TP_DP}),
        ("tp=2 dp_shard=4 offload=states", {Family.OFFLOAD}),
    ],
)
def test_the_families_of_a_plan_follow_from_its_axes(spelt: str, families: set[Family]) -> None:
    plan = Plan.parse(spelt)
    assert {family for family in Family if tree.belongs(plan, family)} == families


@pytest.mark.parametrize(
    ("plan", "is_in"),
    [
        ("pp=2 dp_shard=8", True),
        ("pp=4 dp_shard=4", True),
        ("pp=2 tp=2 dp_shard=4", True),
        ("pp=2 dp_replicate=2 dp_shard=4", True),
        ("tp=2 dp_shard=8", False),  # its shards are on two nodes
        ("dp_shard=16", False),
        ("pp=2 dp_replicate=8 zero=2", False),
    ],
)
def test_shards_inside_a_node_send_no_parameter_over_slow_links(plan: str, is_in: bool) -> None:
    """Two nodes of eight: what is gathered for every microbatch stays on NVLink."""
    family, asked = Family.DP_PP_TP_ZERO1, Plan.parse(plan)
    assert tree.belongs(asked, family, devices_per_node=8) is is_in
    assert not tree.belongs(asked, family)  # without the size of a node


def test_every_legal_plan_is_of_some_family() -> None:
    for plan in legal_plans(facts(MIDDLE, gpus(2, 4), batch=64), PartialPlan()):
        assert any(tree.belongs(plan, family) for family in Family), str(plan)


def test_a_batch_that_does_not_divide_gets_the_answers_of_one_that_does() -> None:
    """The answers depend on the model and the machines: they assume one sample a device."""
    even = choose(facts(MIDDLE, gpus(1, 4), batch=8)).trace
    odd = walk.walk(CostModel(facts(MIDDLE, gpus(1, 4), batch=7)), Policy())
    assert (odd.leaf, odd.steps[-1].answer) == (even.leaf, even.steps[-1].answer)
    assert "microbatch 1, no recompute" in odd.steps[-1].because


@pytest.mark.parametrize("drawn", [tree.text(), tree.mermaid()])
def test_both_drawings_contain_every_question_and_family(drawn: str) -> None:
    for question in tree.QUESTIONS:
        assert question.text in drawn
    for family in Family:
        assert family.value in drawn
    for family in NOT_WEIGHED:
        assert f"{family} (not weighed yet)" in drawn


@pytest.mark.parametrize(
    ("leaf", "chosen"),
    [
        ("single", facts(MIDDLE, gpus(1, 1), batch=8)),
        ("offload", facts(MIDDLE, gpus(1, 1, memory_gib=12), batch=8)),
        ("replicate", facts(MIDDLE, gpus(1, 4), batch=8)),
        ("shard-or-split", facts(MIDDLE, gpus(1, 8, memory_gib=13), batch=64)),
        (
            "split-first",
            facts(MIDDLE, gpus(1, 8, memory_gib=13, intra_bytes_per_s=1e9), batch=64),
        ),
        ("shard-across-nodes", facts(MIDDLE, gpus(2, 4), batch=64)),
        ("replicate-across-nodes", facts(MIDDLE, gpus(2, 4, inter_bytes_per_s=5e8), batch=64)),
        ("everything", facts(MIDDLE, gpus(2, 4, memory_gib=13, inter_bytes_per_s=5e8), batch=64)),
    ],
)
def test_facts_lead_to_their_leaf(leaf: str, chosen: Facts) -> None:
    assert choose(chosen).trace.leaf == leaf


def test_a_layer_larger_than_the_device_asks_for_tensor_parallelism() -> None:
    wide = transformer(name="wide", layers=1, hidden=4096, ffn=1000, vocab=128_000, tokens=16)
    # The embedding alone: 0.52 B parameters, 16 bytes each with gradients and Adam's moments.
    whole = facts(wide, gpus(1, 8, memory_gib=10), batch=8)
    trace = choose(whole).trace
    assert trace.leaf == "split-layer"
    assert "`embed` with its states needs 10.3 GiB" in trace.steps[-1].because
    assert trace.families == ("TP", "ZeRO (FSDP)", "PP")
    assert trace.not_weighed == ()


def test_each_answer_carries_the_number_that_decided_it() -> None:
    trace = choose(facts(MIDDLE, gpus(2, 4, inter_bytes_per_s=5e8), batch=64)).trace
    text = str(trace)
    assert re.search(r"ZeRO-3 needs [\d.]+ GB/s between nodes to hide", text)
    assert "InfiniBand gives 0.50 GB/s" in text
    assert "GiB usable" in text
    assert "not weighed yet" not in text  # of all families that a leaf names there are plans


def test_a_link_is_named_with_its_own_number() -> None:
    """Eight cards of 50 GB/s are more than one device's 360 GB/s inside the node: both are said."""
    trace = choose(facts(MIDDLE, gpus(2, 8), batch=64)).trace
    assert (
        "InfiniBand gives 400 GB/s (datasheet) and, inside the node, NVLink 360 GB/s"
        " (datasheet)" in str(trace)
    )
    assert gpus(2, 8).bottleneck(16).name == "NVLink"
    # One rank of every node leaves the node at once: its eighth of the cards, and no NVLink.
    assert gpus(2, 8).bottleneck(2, stride=8).name == "InfiniBand"
    assert gpus(2, 8).group_bandwidth(2, stride=8).value == 50e9


def test_a_model_that_cannot_be_sharded_gets_the_reason() -> None:
    """A block that learns in two dtypes, computed in bf16: FSDP2 casts a group in one."""
    two = {"dtypes": ("float32", "float64")}
    units = [u.model_copy(update=two) if u.is_block else u for u in MIDDLE.units]
    mixed = MIDDLE.model_copy(update={"units": tuple(units)})
    whole = facts(mixed, gpus(1, 8, memory_gib=200), batch=8)
    _, because = walk._links_in_node(walk._Situation(CostModel(whole), Policy()))
    name = next(u.name for u in MIDDLE.units if u.is_block)
    assert because == (
        f"ZeRO-3 is not possible here: `{name}` holds trained parameters of float32 and float64;"
        " precision=bf16 computes a sharded group in one dtype"
    )


def test_an_oversubscribed_switch_is_named_with_its_remaining_bandwidth() -> None:
    crowded = gpus(2, 8).model_copy(update={"oversubscription": 4.0})
    said = str(choose(facts(MIDDLE, crowded, batch=64)).trace)
    assert (
        "InfiniBand gives 400 GB/s (datasheet) and, between nodes, InfiniBand,"
        " 4:1 oversubscribed 100 GB/s (datasheet)" in " ".join(said.split())
    )


def test_rates_timed_over_all_devices_decide_and_are_called_measured() -> None:
    """Two gathers and a reduction of equal size at 100 and 50 GB/s: 3 / (2/100 + 1/50) = 75."""
    rates = {Collective.ALL_GATHER: 100e9, Collective.REDUCE_SCATTER: 50e9}
    fits = {kind: LinkFit(latency_s=1e-5, busbw_bytes_per_s=rate) for kind, rate in rates.items()}
    axis = AxisFits(group_size=16, stride=1, fits=fits)
    timed = gpus(2, 8).model_copy(update={"axes": (axis,)})
    assert walk.given_bytes_per_s(timed) == pytest.approx(75e9)
    assert "InfiniBand gave 75.0 GB/s (measured)" in str(
        choose(facts(MIDDLE, timed, batch=64)).trace
    )
    assert walk.given_bytes_per_s(gpus(2, 8)) == 360e9


def between_nodes(gb_per_s: float) -> TraceStep:
    """The tree's verdict on links over which all devices were timed at this rate."""
    fit = LinkFit(latency_s=1e-5, busbw_bytes_per_s=gb_per_s * 1e9)
    fits = {Collective.ALL_GATHER: fit, Collective.REDUCE_SCATTER: fit}
    timed = gpus(2, 8).model_copy(update={"axes": (AxisFits(group_size=16, stride=1, fits=fits),)})
    steps = choose(facts(MIDDLE, timed, batch=64)).trace.steps
    return next(step for step in steps if "between nodes" in step.question)


def test_the_answer_changes_where_the_timed_rate_equals_the_needed_rate() -> None:
    """The needed rate is that of `test_the_needed_bandwidth_equals_its_derivation_by_hand`."""
    assert (between_nodes(2).answer, between_nodes(200).answer) == ("slow", "fast")
    said = re.search(r"needs ([\d.]+) GB/s", between_nodes(2).because)
    assert said is not None
    needed = float(said[1])
    assert (between_nodes(0.98 * needed).answer, between_nodes(1.02 * needed).answer) == (
        "slow",
        "fast",
    )


def test_the_trace_says_how_ties_are_settled() -> None:
    assert "DDP before ZeRO-1, ZeRO-2, FSDP and HSDP" in str(choose(facts(MIDDLE)).trace)


def test_the_needed_bandwidth_equals_its_derivation_by_hand() -> None:
    """bytes per parameter sent / (FLOP per parameter and token x tokens / FLOP/s): P cancels."""
    whole = facts(MIDDLE, gpus(1, 8, memory_gib=40), batch=8)
    decision = choose(whole, partial=PartialPlan.build({"zero": 3, "recompute": "none"}))
    needed = walk.needed_bytes_per_s(decision.estimate)
    # Two bf16 gathers and one fp32 reduction, 7/8 of them on the bus: 8 bytes x 7/8 a parameter.
    # The root is gathered once; nothing is in it here but the embedding and head are units too.
    rate = whole.model.flop(1, whole.model.numerics[1]) / decision.estimate.time.compute_s
    tokens = 4096
    by_hand = 8 * 7 / 8 * rate / (6 * tokens)
    # Attention and embedding make FLOP per parameter differ from 6 a token.
    assert needed == pytest.approx(by_hand, rel=0.35)


def test_cpus_are_treated_like_any_node() -> None:
    small = transformer(name="small", layers=2, hidden=64, ffn=128, vocab=100, tokens=16)
    trace = choose(facts(small, cpus(2), batch=4, precision="fp32")).trace
    assert trace.leaf == "replicate"
    assert trace.steps[0].because == "2 x cpu"


def test_a_network_is_judged_by_a_microbatch_that_fits() -> None:
    """gpt-7b on 16 T4 over 10 Gbit/s: at microbatch 1, which comes nearest to fitting, ZeRO-3 sends
    three times the parameters in fp32 for each pass of 2,048 tokens; four times as many tokens need
    a quarter of the link, and do not fit."""
    model = profile_model("gpt-7b", samples=1, sequence_length=None)
    cluster = resolve_cluster("4x4xT4-16GB").model_copy(update={"inter": link("ethernet-10")})
    workload = Workload(global_batch_size=64, precision="fp32")
    whole = Facts(model=model, cluster=cluster, workload=workload)
    trace = walk.walk(CostModel(whole), Policy())
    step = next(step for step in trace.steps if "links between nodes" in step.question)
    assert step.answer == "slow"
    assert "microbatch 1, which comes nearest to fitting" in step.because
    said = re.search(r"ZeRO-3 needs ([\d.]+) GB/s", step.because)
    assert said is not None
    # By hand: gathered twice and reduced once, over 6 FLOP a parameter and token, and 2 of full
    # recompute, at the T4's 8.1 TFLOP/s or somewhat less.
    at_peak = 3 * 4 * (15 / 16) / (8 * 2048 / 8.1e12) / 1e9
    assert 0.3 * at_peak < float(said[1]) < at_peak
    assert trace.leaf == "everything"
    assert trace.families == ("DP + PP + TP + ZeRO-1", "HSDP")


def test_a_network_that_a_fitting_microbatch_can_use_is_judged_by_that() -> None:
    roomy, tight = (
        facts(MIDDLE, gpus(2, 4, memory_gib=memory_gib, inter_bytes_per_s=5e9), batch=64)
        for memory_gib in (79.6, 13)
    )
    said = {}
    for whole in (roomy, tight):
        step = next(s for s in choose(whole).trace.steps if "between nodes" in s.question)
        size = re.search(r"microbatch (\d+)\)", step.because)
        assert size is not None
        pinned = PartialPlan.parse(f"pp=1 tp=1 zero=3 microbatch_size={size[1]}")
        usable = Policy().usable_bytes(whole.cluster.device)
        costs = CostModel(whole)
        assert any(costs.estimate(plan).fits(usable) for plan in legal_plans(whole, pinned))
        said[whole.cluster.device.memory_bytes.value] = int(size[1])
    large, small = said.values()
    assert large > small
