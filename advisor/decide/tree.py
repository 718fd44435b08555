"""Decision tree: questions, answers and leaves as data, and the trace of a walk through it.

A leaf is an ordered list of families, in which the cost model chooses. Families without an engine
are named too.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from enum import StrEnum
from typing import TYPE_CHECKING

from advisor.search.ranking import SIMPLER_FIRST
from engines.plan import DataParallel, Offload, Plan
from profiles.record import Record

if TYPE_CHECKING:
    import networkx as nx

    from advisor.inputs.wrapped import Wrapped


class Family(StrEnum):
    """Kinds of parallelism, as the tree names them."""

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


NOT_WEIGHED: tuple[Family, ...] = ()
# Sharding by replicas of stages and split layers that gathers no parameters between them.
_KEEPS_PARAMETERS = (DataParallel.NONE, DataParallel.REPLICATE, DataParallel.ZERO1)


@dataclass(frozen=True, slots=True)
class Question:
    """Inner node; `advisor.decide.walk` answers it with numbers."""

    name: str
    text: str


@dataclass(frozen=True, slots=True)
class Leaf:
    """End of a path: families in order of preference, and the advice in words."""

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
    Leaf("offload", "states or activations wait outside the device", (Family.OFFLOAD,)),
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
        # DDP is also here: it is ZeRO without saving memory, and simpler if it fits.
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
        # HSDP is also here: its gathers stay inside the node, so slow links between nodes carry the
        # same gradients, and it is all there is for a model that cannot be split.
        "DP + PP + TP + ZeRO-1 (least traffic); HSDP keeps gathers inside the node",
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
    """Question with its answer and the numbers behind it."""

    question: str
    answer: str
    because: str


class TreeTrace(Record):
    """Path of some facts through the tree.

    Attributes:
        devices_per_node: size of a node; None in files of earlier releases.
    """

    steps: tuple[TraceStep, ...]
    leaf: str
    advice: str
    families: tuple[str, ...]
    not_weighed: tuple[str, ...]
    devices_per_node: int | None = None

    def __str__(self) -> str:
        lines = []
        for step in self.steps:
            lines += [f"{step.question} {step.answer}", f"  {step.because}"]
        lines.append(f"-> {self.advice}")
        if self.not_weighed:
            lines.append(f"   not weighed yet: {'; '.join(self.not_weighed)}")
        lines.append("Of its families the fastest plan that fits; on a tie the simpler one:")
        lines.append(f"  {SIMPLER_FIRST}")
        return "\n".join(lines)

    def __rich__(self) -> Wrapped:
        from advisor.inputs.wrapped import Wrapped

        return Wrapped(str(self))


def graph() -> nx.DiGraph:
    """Build the tree as a networkx graph: nodes have `text`, leaves `families`, edges `answer`."""
    import networkx as nx

    tree = nx.DiGraph()
    for question in QUESTIONS:
        tree.add_node(question.name, text=question.text, families=())
    for leaf in LEAVES:
        tree.add_node(leaf.name, text=leaf.text, families=leaf.families)
    for start, answer, end in EDGES:
        tree.add_edge(start, end, answer=answer)
    return tree


def text() -> str:
    """Format the tree as indented text; families without an engine are marked."""
    tree = graph()

    def lines(name: str, depth: int, answer: str) -> Iterator[str]:
        node = tree.nodes[name]
        yield f"{'    ' * depth}{f'{answer}: ' if answer else ''}{node['text']}"
        if node["families"]:
            marked = ", ".join(_marked(family) for family in node["families"])
            yield f"{'    ' * (depth + 1)}[{marked}]"
        for child in tree.successors(name):
            yield from lines(child, depth + 1, tree.edges[name, child]["answer"])

    return "\n".join(lines(ROOT, 0, ""))


def mermaid() -> str:
    """Format the tree as a mermaid flow chart, for READMEs and notebooks."""
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
    return f"{family} (not weighed yet)" if family in NOT_WEIGHED else str(family)


def belongs(plan: Plan, family: Family, *, devices_per_node: int | None = None) -> bool:
    """True if `plan` is of `family`, by its axes and its sharding.

    PP and TP use only that axis for the model, with any data parallelism; the two hybrids use one
    of the axes or both. In "DP + PP + TP + ZeRO-1" no parameter is gathered between nodes for every
    microbatch: shards of stages or layers stay inside a node, as HSDP's do. Ranks of cp hold and
    shard the model like replicas.
    """
    kind = plan.data_parallel
    cut = [axis for axis in ("pp", "tp") if getattr(plan, axis) > 1]
    if family is Family.OFFLOAD:
        return plan.offload is not Offload.NONE
    if plan.offload is not Offload.NONE:
        return False
    match family:
        case Family.SINGLE:
            is_whole = kind is DataParallel.NONE and plan.cp == 1
            return not cut and is_whole and not plan.servers
        case Family.DDP:
            return not cut and plan.is_replicated and plan.updates_in_step
        case Family.ZERO:
            return not cut and kind.is_sharded
        case Family.HSDP:
            return not cut and kind is DataParallel.HYBRID_SHARD
        case Family.TP:
            return cut == ["tp"]
        case Family.PP:
            return cut == ["pp"]
        case Family.PP_TP_DP:
            return bool(cut)
        case Family.DP_PP_TP_ZERO1:
            return bool(cut) and (
                kind in _KEEPS_PARAMETERS or _shards_in_node(plan, devices_per_node)
            )
        case Family.LOCAL_SGD:
            return plan.updates.is_periodic


def _shards_in_node(plan: Plan, devices_per_node: int | None) -> bool:
    """True if ranks that shard the same parameters are inside one node."""
    if plan.data_parallel not in (DataParallel.FULL_SHARD, DataParallel.HYBRID_SHARD):
        return False
    reach = plan.dp_shard * plan.cp * plan.tp
    return devices_per_node is not None and devices_per_node % reach == 0


def names_hybrids(trace: TreeTrace) -> bool:
    """True if the leaf names hybrids of PP and TP."""
    return bool({Family.PP_TP_DP, Family.DP_PP_TP_ZERO1} & set(trace.families))


def in_leaf(plan: Plan, trace: TreeTrace) -> bool:
    """True if `plan` is of a family of the leaf."""
    reach = trace.devices_per_node
    return any(belongs(plan, Family(name), devices_per_node=reach) for name in trace.families)
