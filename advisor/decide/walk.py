"""Walk through the decision tree: each question is answered with numbers."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from advisor.cost import CostModel, Estimate
from advisor.decide.candidates import legal_plans, why_illegal
from advisor.decide.tree import EDGES, LEAVES, NOT_WEIGHED, QUESTIONS, ROOT, TraceStep, TreeTrace
from advisor.inputs.facts import Facts
from advisor.inputs.policy import Policy
from advisor.search.ranking import Candidate, weigh
from engines.plan import DataParallel, PartialPlan, Recompute
from profiles.machine.cluster import ClusterProfile, Collective, Link
from profiles.model.profile import UnitProfile
from profiles.provenance import Source
from profiles.units import format_bandwidth, format_gib
from profiles.workload.optimizers import upkeep


def walk(costs: CostModel, policy: Policy) -> TreeTrace:
    """Return the path of these facts through the tree.

    Settings fixed by the user do not count: the questions are about the model and the machines.
    """
    situation = _Situation(costs, policy)
    steps, name = [], ROOT
    leaves = {leaf.name: leaf for leaf in LEAVES}
    while name not in leaves:
        question = next(q for q in QUESTIONS if q.name == name)
        answer, because = _ANSWERS[name](situation)
        steps.append(TraceStep(question=question.text, answer=answer, because=because))
        name = next(end for start, said, end in EDGES if (start, said) == (name, answer))
    leaf = leaves[name]
    return TreeTrace(
        steps=tuple(steps),
        leaf=leaf.name,
        advice=leaf.text,
        families=tuple(family.value for family in leaf.families),
        not_weighed=tuple(family.value for family in leaf.families if family in NOT_WEIGHED),
        devices_per_node=costs.facts.cluster.devices_per_node,
    )


@dataclass(frozen=True, slots=True)
class _Situation:
    """Facts and policy that the questions are asked about."""

    costs: CostModel
    policy: Policy

    @property
    def facts(self) -> Facts:
        return self.costs.facts

    @property
    def usable_bytes(self) -> float:
        return self.policy.usable_bytes(self.facts.cluster.device)

    def probes(self, kind: DataParallel) -> list[Candidate]:
        """Estimate the plans of this kind over all devices, without pp, cp and tp.

        A batch that does not divide is replaced by one sample a device, as the questions are not
        about the batch.
        """
        facts, partial = self.facts, _alone(kind)
        plans = legal_plans(facts, partial, costs=self.costs)
        if not plans:
            world = facts.cluster.world_size
            workload = facts.workload.model_copy(update={"global_batch_size": world})
            other = facts.model_copy(update={"workload": workload})
            plans = legal_plans(other, partial, costs=self.costs.for_facts(other))
        return weigh(plans, self.costs, self.policy)


def _alone(kind: DataParallel) -> PartialPlan:
    """Plans of this kind over all devices."""
    return PartialPlan(pp=1, cp=1, tp=1, data_parallel=kind)


Answer = tuple[str, str]


def _devices(situation: _Situation) -> Answer:
    cluster = situation.facts.cluster
    if cluster.world_size == 1:
        return "one", f"one {cluster.device.name}"
    if cluster.num_nodes == 1:
        return "one node, several devices", f"{cluster.devices_per_node} x {cluster.device.name}"
    if cluster.num_domains == 1:
        return (
            "one node, several devices",
            f"{cluster.num_nodes} nodes of {cluster.devices_per_node} x {cluster.device.name}, all"
            " on one switch",
        )
    return (
        "several nodes",
        f"{cluster.num_nodes} nodes of {cluster.devices_per_node} x {cluster.device.name}",
    )


def _fits(situation: _Situation) -> Answer:
    """Answer for the unsharded model, at the microbatch that needs least memory."""
    alone = situation.facts.cluster.world_size == 1
    unsharded = situation.probes(DataParallel.NONE if alone else DataParallel.REPLICATE)
    usable = situation.usable_bytes
    if not unsharded:
        return "no", "no plan keeps the whole model on a device"
    plain = [c for c in unsharded if c.plan.recompute is Recompute.NONE]
    shown = min(plain or unsharded, key=lambda c: (c.estimate.peak_high_bytes, str(c.plan)))
    if not shown.estimate.fits(usable):
        shown = min(unsharded, key=lambda c: (c.estimate.peak_high_bytes, str(c.plan)))
    recompute = "no" if shown.plan.recompute is Recompute.NONE else shown.plan.recompute
    needed = shown.estimate.peak_high_bytes
    return (
        "yes" if shown.estimate.fits(usable) else "no",
        f"unsharded it needs up to {format_gib(needed)} (derived; microbatch"
        f" {shown.plan.microbatch_size}, {recompute} recompute), a device has {format_gib(usable)}"
        f" usable ({_memory_source(situation)})",
    )


def _layer_fits(situation: _Situation) -> Answer:
    """Answer for the largest unit with its states on one device: only TP could split it."""
    facts = situation.facts
    unit = facts.model.largest_unit
    needed = _unit_bytes(unit, facts) + facts.cluster.device.context_bytes.high
    usable = situation.usable_bytes
    return (
        "yes" if needed <= usable else "no",
        f"`{unit.name}` with its states needs {format_gib(needed)} (derived) of"
        f" {format_gib(usable)} usable ({_memory_source(situation)})",
    )


def _memory_source(situation: _Situation) -> Source:
    return situation.facts.cluster.device.memory_bytes.source


def _unit_bytes(unit: UnitProfile, facts: Facts) -> float:
    states = upkeep(facts.workload.optimizer, [unit]).state_bytes
    activations = max(cost.activation_bytes.at(1) for cost in unit.costs.values())
    return unit.parameter_bytes + unit.gradient_bytes + states + activations


def _links_in_node(situation: _Situation) -> Answer:
    return _links(situation, "in the node")


def _links_between_nodes(situation: _Situation) -> Answer:
    return _links(situation, "between nodes")


def _links(situation: _Situation, where: str) -> Answer:
    """Answer "fast" if ZeRO-3's communication can hide behind the model's computation.

    Of the plans that fit it takes the one that sends least for its computation, mostly that with
    the largest microbatch; if none fits, the one that needs least memory.
    """
    cluster = situation.facts.cluster
    sharded = situation.probes(DataParallel.FULL_SHARD)
    given = given_bytes_per_s(cluster)
    if not sharded:
        broken = why_illegal(situation.facts, _alone(DataParallel.FULL_SHARD))
        because = broken[0].what if broken else "no plan of it could be made"
        return "slow", f"ZeRO-3 is not possible here: {because}"
    fitting = [c for c in sharded if c.estimate.fits(situation.usable_bytes)]
    if fitting:
        least = min(fitting, key=lambda c: (needed_bytes_per_s(c.estimate), str(c.plan)))
    else:
        least = min(sharded, key=lambda c: (c.estimate.peak_high_bytes, str(c.plan)))
    unfit = "" if fitting else ", which comes nearest to fitting"
    needed = needed_bytes_per_s(least.estimate)
    answer = "fast" if needed <= given else "slow"
    return (
        answer,
        f"ZeRO-3 needs {format_bandwidth(needed)} {where} to hide behind computation (derived;"
        f" microbatch {least.plan.microbatch_size}{unfit}), {_given(cluster)}",
    )


def given_bytes_per_s(cluster: ClusterProfile) -> float:
    """Return the bus bandwidth of ZeRO-3's traffic over all devices, measured or of the links."""
    return _timed_bytes_per_s(cluster) or cluster.group_bandwidth(cluster.world_size).value


def _timed_bytes_per_s(cluster: ClusterProfile) -> float | None:
    """Return the bandwidth of two gathers and a reduction of equal size, if they were timed over
    all devices."""
    gather = cluster.measured(Collective.ALL_GATHER, cluster.world_size)
    reduce = cluster.measured(Collective.REDUCE_SCATTER, cluster.world_size)
    if gather is None or reduce is None:
        return None
    return 3 / (2 / gather.busbw_bytes_per_s + 1 / reduce.busbw_bytes_per_s)


def _given(cluster: ClusterProfile) -> str:
    """Describe the measured bandwidth; else that of the link and of the slowest tier in a ring over
    all devices."""
    timed = _timed_bytes_per_s(cluster)
    if timed:
        name = cluster.link(cluster.world_size).name
        return f"{name} gave {format_bandwidth(timed)} ({Source.MEASURED})"
    link = cluster.link(cluster.world_size)
    words = f"{link.name} gives {_rate(link)}"
    slowest = cluster.bottleneck(cluster.world_size)
    if slowest is link:
        return words
    rate = format_bandwidth(cluster.group_bandwidth(cluster.world_size).value)
    inside = cluster.topology.share(cluster.world_size).tier.is_inside
    where = "inside the node" if inside else "between nodes"
    source = slowest.bandwidth_bytes_per_s.source
    return f"{words} and, {where}, {slowest.name} {rate} ({source})"


def _rate(link: Link) -> str:
    bandwidth = link.bandwidth_bytes_per_s
    return f"{format_bandwidth(bandwidth.value)} ({bandwidth.source})"


def needed_bytes_per_s(estimate: Estimate) -> float:
    """Return the bus bandwidth at which communication takes as long as computation."""
    busy = estimate.time.compute_s + estimate.time.recompute_s + estimate.time.launch_s
    return sum(traffic.bus_bytes for traffic in estimate.traffic) / busy


_ANSWERS: dict[str, Callable[[_Situation], Answer]] = {
    "devices": _devices,
    "fits-one": _fits,
    "fits-node": _fits,
    "layer-fits": _layer_fits,
    "links-in-node": _links_in_node,
    "links-between-nodes": _links_between_nodes,
    "fits-slow": _fits,
}
