"""The decision tree: questions, answers and leaves as data, and the walk that the numbers take.

A leaf is an ordered list of families. The cost model chooses within it; families without an engine
are named, never skipped in silence.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import TYPE_CHECKING

from advisor.cost import CostModel, Estimate
from advisor.facts import Facts
from advisor.policy import Policy
from advisor.rules import Candidate
from engines.plan import DataParallel, Offload, Plan
from profiles.model import UnitProfile
from profiles.record import Record
from profiles.units import format_bandwidth, format_gib

if TYPE_CHECKING:
    import networkx as nx
    from rich.text import Text


class Family(StrEnum):
    """Ways to spread a model, as the tree names them."""

    SINGLE = "one device"
    DDP = "DDP"
    ZERO = "ZeRO (FSDP)"
    HSDP = "HSDP"
    OFFLOAD = "CPU offload"
    TP = "TP"
    PP = "PP"
    PP_TP_DP = "PP + TP + DP"
    DP_PP_TP_ZERO1 = "DP + PP + TP + ZeRO-1"
    LOCAL_SGD = "compressed or local-SGD synchronisation"


NOT_BUILT = (Family.TP, Family.PP, Family.PP_TP_DP, Family.DP_PP_TP_ZERO1, Family.LOCAL_SGD)


@dataclass(frozen=True, slots=True)
class Question:
    """An inner node; `ask` answers it from the situation, with the numbers that decide."""

    name: str
    text: str


@dataclass(frozen=True, slots=True)
class Leaf:
    """Where a path ends: families in order of preference, and why they are these."""

    name: str
    text: str
    families: tuple[Family, ...]


QUESTIONS = (
    Question("devices", "How many devices?"),
    Question("fits-one", "Does the model train on the device?"),
    Question("fits-node", "Does the model fit one device?"),
    Question("layer-fits", "Does its largest layer fit?"),
    Question("links-in-node", "Are the links in the node fast for this model?"),
    Question("links-between-nodes", "Are the links between nodes fast for this model?"),
    Question("fits-slow", "Does the model fit one device?"),
)
LEAVES = (
    Leaf("single", "nothing to spread", (Family.SINGLE,)),
    Leaf("offload", "states wait in main memory", (Family.OFFLOAD,)),
    Leaf(
        "replicate",
        "DDP; ZeRO only if predicted faster, or for memory",
        (Family.DDP, Family.ZERO),
    ),
    Leaf(
        "shard-or-split",
        "ZeRO, TP and PP are close: the cost model decides",
        (Family.ZERO, Family.TP, Family.PP),
    ),
    Leaf(
        "split-first",
        "PP first (least traffic), then ZeRO; TP stays in the node",
        (Family.PP, Family.ZERO, Family.TP),
    ),
    Leaf(
        "split-layer",
        "TP, as PP alone cannot help; ZeRO shards that layer too",
        (Family.TP, Family.ZERO, Family.PP),
    ),
    Leaf(
        "shard-across-nodes",
        # DDP stands beside ZeRO because it is ZeRO without saving memory: where it fits, simpler.
        "ZeRO first (no change to the model), DDP where it fits, or PP + TP + DP",
        (Family.ZERO, Family.DDP, Family.PP_TP_DP),
    ),
    Leaf(
        "replicate-across-nodes",
        "DDP between nodes, with less to send: accumulation, compression",
        (Family.DDP, Family.LOCAL_SGD),
    ),
    Leaf(
        "everything",
        # HSDP stands in while that has no engine: its gathers stay inside the node too.
        "DP + PP + TP + ZeRO-1; HSDP keeps gathers inside the node",
        (Family.DP_PP_TP_ZERO1, Family.HSDP),
    ),
)
EDGES = (
    ("devices", "one", "fits-one"),
    ("devices", "one node, several devices", "fits-node"),
    ("devices", "several nodes", "links-between-nodes"),
    ("fits-one", "yes", "single"),
    ("fits-one", "no", "offload"),
    ("fits-node", "yes", "replicate"),
    ("fits-node", "no", "layer-fits"),
    ("layer-fits", "yes", "links-in-node"),
    ("layer-fits", "no", "split-layer"),
    ("links-in-node", "fast", "shard-or-split"),
    ("links-in-node", "slow", "split-first"),
    ("links-between-nodes", "fast", "shard-across-nodes"),
    ("links-between-nodes", "slow", "fits-slow"),
    ("fits-slow", "yes", "replicate-across-nodes"),
    ("fits-slow", "no", "everything"),
)
ROOT = "devices"


class TraceStep(Record):
    """One question with its answer and the number that decided it."""

    question: str
    answer: str
    because: str


class Trace(Record):
    """The path that the facts took through the tree."""

    steps: tuple[TraceStep, ...]
    leaf: str
    advice: str
    families: tuple[str, ...]
    not_built: tuple[str, ...]

    def __str__(self) -> str:
        lines = []
        for step in self.steps:
            lines += [f"{step.question} {step.answer}", f"  {step.because}"]
        lines.append(f"-> {self.advice}")
        if self.not_built:
            lines.append(f"   not built yet: {'; '.join(self.not_built)}")
        return "\n".join(lines)

    def __rich__(self) -> Text:
        from rich.text import Text

        return Text(str(self))


def graph() -> nx.DiGraph:
    """The tree as a networkx graph; nodes carry `text` (leaves `families` too), edges `answer`."""
    import networkx as nx

    drawn = nx.DiGraph()
    for question in QUESTIONS:
        drawn.add_node(question.name, text=question.text, families=())
    for leaf in LEAVES:
        drawn.add_node(leaf.name, text=leaf.text, families=leaf.families)
    for start, answer, end in EDGES:
        drawn.add_edge(start, end, answer=answer)
    return drawn


def text() -> str:
    """The whole tree, indented; families without an engine are marked."""
    tree = graph()

    def lines(name: str, depth: int, answer: str) -> list[str]:
        node = tree.nodes[name]
        said = f"{answer}: " if answer else ""
        found = [f"{'    ' * depth}{said}{node['text']}"]
        if node["families"]:
            marked = ", ".join(_marked(family) for family in node["families"])
            found.append(f"{'    ' * (depth + 1)}[{marked}]")
        for child in tree.successors(name):
            found += lines(child, depth + 1, tree.edges[name, child]["answer"])
        return found

    return "\n".join(lines(ROOT, 0, ""))


def mermaid() -> str:
    """The whole tree as a mermaid flow chart, for READMEs and notebooks."""
    tree = graph()
    lines = ["flowchart TD"]
    for name, node in tree.nodes(data=True):
        if node["families"]:
            families = ", ".join(_marked(family) for family in node["families"])
            lines.append(f'    {name}["{node["text"]}<br/>{families}"]')
        else:
            lines.append(f'    {name}{{"{node["text"]}"}}')
    for start, end, answer in tree.edges(data="answer"):
        lines.append(f'    {start} -->|"{answer}"| {end}')
    return "\n".join(lines)


def _marked(family: Family) -> str:
    return f"{family} (not built yet)" if family in NOT_BUILT else str(family)


def belongs(plan: Plan, family: Family) -> bool:
    """Whether `plan` is of `family`."""
    kind = plan.data_parallel
    match family:
        case Family.SINGLE:
            return kind is DataParallel.NONE
        case Family.DDP:
            return kind is DataParallel.REPLICATE
        case Family.ZERO:
            return kind.is_sharded and plan.offload is Offload.NONE
        case Family.HSDP:
            return kind is DataParallel.HYBRID_SHARD and plan.offload is Offload.NONE
        case Family.OFFLOAD:
            return plan.offload is not Offload.NONE
    return False


def in_leaf(plan: Plan, trace: Trace) -> bool:
    """Whether `plan` is of a family that the leaf names."""
    return any(belongs(plan, Family(family)) for family in trace.families)


def walk(costs: CostModel, policy: Policy, probes: Sequence[Candidate]) -> Trace:
    """The path of these facts.

    `probes` are weighed plans, no pins kept: the questions are about the model and the machines,
    not about what a user fixed.
    """
    situation = _Situation(costs.facts, policy, probes)
    steps, name = [], ROOT
    leaves = {leaf.name: leaf for leaf in LEAVES}
    while name not in leaves:
        question = next(q for q in QUESTIONS if q.name == name)
        answer, because = _ANSWERS[name](situation)
        steps.append(TraceStep(question=question.text, answer=answer, because=because))
        name = next(end for start, said, end in EDGES if (start, said) == (name, answer))
    leaf = leaves[name]
    return Trace(
        steps=tuple(steps),
        leaf=leaf.name,
        advice=leaf.text,
        families=tuple(family.value for family in leaf.families),
        not_built=tuple(family.value for family in leaf.families if family in NOT_BUILT),
    )


@dataclass(frozen=True, slots=True)
class _Situation:
    facts: Facts
    policy: Policy
    probes: Sequence[Candidate]

    @property
    def usable_bytes(self) -> float:
        return self.policy.usable_bytes(self.facts.cluster.device)


Answer = tuple[str, str]


def _devices(situation: _Situation) -> Answer:
    cluster = situation.facts.cluster
    if cluster.world_size == 1:
        return "one", f"one {cluster.device.name}"
    if cluster.num_nodes == 1:
        return "one node, several devices", f"{cluster.devices_per_node} x {cluster.device.name}"
    return (
        "several nodes",
        f"{cluster.num_nodes} nodes of {cluster.devices_per_node} x {cluster.device.name}",
    )


def _fits(situation: _Situation) -> Answer:
    """Whole on every device, at the microbatch that needs least."""
    whole = [c for c in situation.probes if not c.plan.data_parallel.is_sharded]
    usable = situation.usable_bytes
    if not whole:
        return "no", "no plan keeps the whole model on a device"
    least = min(whole, key=lambda c: (c.estimate.peak_high_bytes, str(c.plan)))
    plain = [c for c in whole if c.plan.recompute == "none"]
    shown = min(plain or whole, key=lambda c: (c.estimate.peak_high_bytes, str(c.plan)))
    if not shown.estimate.fits(usable) and least.estimate.fits(usable):
        shown = least
    trick = "" if shown.plan.recompute == "none" else f", {shown.plan.recompute} recompute"
    needed = shown.estimate.peak_high_bytes
    return (
        "yes" if shown.estimate.fits(usable) else "no",
        f"whole it needs up to {format_gib(needed)} (microbatch {shown.plan.microbatch_size}"
        f"{trick}), a device has {format_gib(usable)} usable",
    )


def _layer_fits(situation: _Situation) -> Answer:
    """The largest unit with its own states, whole on one device: what only TP could cut."""
    facts = situation.facts
    unit = facts.model.largest_unit
    needed = _unit_bytes(unit, facts) + facts.cluster.device.context_bytes.high
    usable = situation.usable_bytes
    return (
        "yes" if needed <= usable else "no",
        f"`{unit.name}` with its states needs {format_gib(needed)} of {format_gib(usable)} usable",
    )


def _unit_bytes(unit: UnitProfile, facts: Facts) -> float:
    states = unit.trainable_parameters * facts.workload.optimizer.state_bytes_per_element
    activations = max(cost.activation_bytes.at(1) for cost in unit.costs.values())
    return unit.parameter_bytes + unit.gradient_bytes + states + activations


def _links_in_node(situation: _Situation) -> Answer:
    return _links(situation, "in the node")


def _links_between_nodes(situation: _Situation) -> Answer:
    return _links(situation, "between nodes")


def _links(situation: _Situation, where: str) -> Answer:
    """Fast: what ZeRO-3 puts on the link in a step can hide behind this model's computing.

    At the largest microbatch that fits, which sends least for what it computes.
    """
    cluster = situation.facts.cluster
    sharded = [c for c in situation.probes if c.plan.data_parallel is DataParallel.FULL_SHARD]
    link = cluster.link(cluster.world_size)
    given = cluster.group_bandwidth(cluster.world_size).value
    if not sharded:
        return "slow", "the model cannot be sharded here: see the problems of `zero=3`"
    fitting = [c for c in sharded if c.estimate.fits(situation.usable_bytes)] or sharded
    least = min(fitting, key=lambda c: (needed_bytes_per_s(c.estimate), str(c.plan)))
    needed = needed_bytes_per_s(least.estimate)
    answer = "fast" if needed <= given else "slow"
    return (
        answer,
        f"ZeRO-3 needs {format_bandwidth(needed)} {where} to hide behind computing (microbatch"
        f" {least.plan.microbatch_size}), {link.name} gives {format_bandwidth(given)}",
    )


def needed_bytes_per_s(estimate: Estimate) -> float:
    """Bus bandwidth at which the plan's gathers and reductions take as long as its computing."""
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
