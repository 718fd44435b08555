"""Cluster profiles: devices, their memory and speed, and the links between them."""

from __future__ import annotations

from enum import StrEnum
from math import inf
from typing import Annotated, Literal, Self

from pydantic import (
    Field,
    NonNegativeFloat,
    NonNegativeInt,
    PositiveFloat,
    PositiveInt,
    model_validator,
)

from profiles.errors import InputError
from profiles.machine.quantities import Factor
from profiles.machine.topology import Tier, Topology
from profiles.provenance import Quantity, Source
from profiles.record import Document, Record
from profiles.record.bounds import MOST_DEVICES, Devices, DevicesOfNode


class Collective(StrEnum):
    """The ways ranks exchange tensors; bus bandwidth as nccl-tests defines it."""

    ALL_REDUCE = "all_reduce"
    ALL_GATHER = "all_gather"
    REDUCE_SCATTER = "reduce_scatter"
    ALL_TO_ALL = "all_to_all"
    SEND_RECV = "send_recv"

    def bus_factor(self, group_size: int) -> float:
        """Bytes on the busiest link per byte of payload: 2(n-1)/n for all-reduce, (n-1)/n ...

        Source: nccl-tests, PERFORMANCE.md. The payload is the whole tensor: the input of an
        all-reduce or reduce-scatter, the output of an all-gather.
        """
        if group_size < 2:
            return 0.0
        if self is Collective.SEND_RECV:
            return 1.0
        share = (group_size - 1) / group_size
        return 2 * share if self is Collective.ALL_REDUCE else share


class LinkFit(Record):
    """One collective on one tier: time = latency + bus_factor * bytes / bandwidth."""

    latency_s: NonNegativeFloat
    busbw_bytes_per_s: float
    relative_residual: NonNegativeFloat = 0.0


class AxisFits(Record):
    """Fits of the groups of one mesh axis, measured while all of them communicated at once.

    Attributes:
        group_size, stride: the axis: groups of `group_size` ranks, `stride` ranks apart.
        fits: each group's own; bandwidth is not summed over the groups of a node.
    """

    group_size: Devices
    stride: Devices
    fits: dict[Collective, LinkFit]


class Overlap(Record):
    """Slowdown of computation and of communication while both run at once; 1: none.

    Attributes:
        computing: of a matrix product, while the ranks exchange tensors.
        communication: of an all-reduce over all ranks, while they compute.
    """

    computing: Factor
    communication: Factor


class SharedCores(Record):
    """Ranks that take turns on cores: with fewer at work, each is faster.

    Attributes:
        alone: speed of one rank while all others wait, over its speed while all compute, which is
            what the device's rates are of; 1 if each rank has cores of its own.
        across_nodes: whether all nodes share the same cores, as emulated ones do; else those of a
            node do.
    """

    alone: Factor
    across_nodes: bool = False


class Link(Record):
    """A tier of links: what joins the devices of a node, or the nodes.

    Attributes:
        bandwidth_bytes_per_s: one direction. Inside a node per device; between nodes per *node*
            (all its network cards together).
        latency_s: of a small message.
        fits: measured collectives, where a bench was run; they take precedence.
        wiring: inside a node: "switch", where any device reaches any other at the full rate; or
            "mesh", where each pair has its own part of it, so that a group of k of n devices gets
            (k - 1) / (n - 1).
    """

    name: str
    wiring: Literal["switch", "mesh"] = "switch"
    bandwidth_bytes_per_s: Quantity
    latency_s: Quantity
    fits: dict[Collective, LinkFit] = Field(default_factory=dict)


class HostBridge(Record):
    """The PCIe bridge or switch under which devices of a node sit, and its way to the host.

    Attributes:
        link: its way to the host, one direction, for all its devices together.
        devices: how many devices sit under one.
        peer_to_peer: whether devices reach each other and network cards without the host; off on
            most consumer cards: all that they exchange goes through main memory.
    """

    link: Link
    devices: DevicesOfNode
    peer_to_peer: bool = True


_HOPPER_OR_LATER = ("H100", "H200", "H800", "H20", "GH200", "B100", "B200", "B300", "GB")


class Device(Record):
    """One accelerator, or one CPU rank's share of a machine.

    Attributes:
        kind: torch's device type: "cuda" (ROCm too) or "cpu".
        memory_bytes: the whole of it, as the runtime reports.
        memory_bandwidth_bytes_per_s: what large streaming operations reach, reads and writes.
        flop_per_s: dense peak by dtype ("float32", "bfloat16", ...).
        matmul_fraction: share of the peak that large matrix products reach.
        launch_s: what a kernel of a training step costs the host, with its module and autograd.
        context_bytes: taken by runtime, libraries and process group before the first tensor.
        matmul_efficiency: by edge n, what an n x n x n product reaches as a share of what large
            ones do; where a bench was run.
        board_power_w: the vendor's maximum of the board alone; None where it is not known.
        host_link_bytes_per_s: of copies to and from page-locked main memory, the slower way, while
            all devices of a node copy; where a bench was run on GPUs.
        new_memory_bytes_per_s: at which a processor first writes memory that is mapped anew (see
            `profiles.workload.new_memory`), beyond what writing takes; where a bench was run.
        attention, elementwise, odd: rates over what was calibrated, as steps that were run have
            them: of attention kernels that keep no scores, of elementwise kernels that the memory
            does not bound, of products with odd sizes.
    """

    name: str
    kind: str
    memory_bytes: Quantity
    memory_bandwidth_bytes_per_s: Quantity
    flop_per_s: dict[str, Quantity]
    matmul_fraction: Quantity
    launch_s: Quantity
    context_bytes: Quantity
    matmul_efficiency: dict[PositiveInt, Quantity] = Field(default_factory=dict)
    board_power_w: Quantity | None = None
    host_link_bytes_per_s: Quantity | None = None
    new_memory_bytes_per_s: Quantity | None = None
    attention: PositiveFloat = 1.0
    elementwise: PositiveFloat = 1.0
    odd: PositiveFloat = 1.0

    @model_validator(mode="after")
    def _has_the_rate_of_plain_operations(self) -> Self:
        if "float32" not in self.flop_per_s:
            raise InputError(
                f"`{self.name}` has no rate in float32, in which losses and norms are computed",
                hints=['add `float32 = "60 TFLOP/s"` to its rates'],
            )
        return self

    @property
    def is_hopper_or_later(self) -> bool:
        """True if the matrix units require warpgroup instructions."""
        return self.name.startswith(_HOPPER_OR_LATER)

    @property
    def has_tf32(self) -> bool:
        """True if products of float32 are faster where their factors are rounded to TF32."""
        rate = self.flop_per_s.get("tfloat32")
        return rate is not None and rate.value > self.flop_per_s["float32"].value


class Constant(StrEnum):
    """Constants that a step's time rests on, and runs can correct. Values are the report's
    words."""

    PRODUCTS = "matrix products"
    ATTENTION = "attention kernels"
    MEMORY = "memory bandwidth"
    LAUNCH = "launching an operation"
    INTRA = "links in the node"
    INTER = "links between nodes"


class Anchored(Record):
    """Corrections from one measured step to a profile's constants; see `advisor.learning.anchor`.

    Attributes:
        plan: that was run.
        compute_error, update_error, communication_error: half-widths of the ranges of other plans'
            times, as fractions; None where the step does not tell that time from others.
        update: seconds of the optimizer's step over what its traffic takes at memory bandwidth.
        waiting: of each other and for a core, over the seconds that a rank computes.
        activations: bytes of activations and temporaries over those that were counted.
    """

    plan: str
    compute_error: NonNegativeFloat | None = None
    update_error: NonNegativeFloat | None = None
    communication_error: NonNegativeFloat | None = None
    update: PositiveFloat = 1.0
    waiting: NonNegativeFloat = 0.0
    activations: PositiveFloat = 1.0


class Learned(Record):
    """Corrections from earlier runs in a profile; see `advisor.learning.learning`.

    Attributes:
        runs: how many spoke of each constant that they say more about than was known before.
        context_runs: how many spoke of `Device.context_bytes`.
        context_offset_bytes: what they added to it.
        anchored: by one measured step of the same model; see `advisor.learning.anchor`.
    """

    runs: dict[Constant, PositiveInt] = Field(default_factory=dict)
    context_runs: NonNegativeInt = 0
    context_offset_bytes: float = 0.0
    anchored: Anchored | None = None


class ClusterProfile(Document):
    """Equal nodes of equal devices, one link tier inside the nodes and one between them.

    The faster tier may join several nodes into a domain: an NVL72 rack is 18 nodes of four devices
    on one NVLink switch. What is said of links inside and between nodes is then of domains; main
    memory, processors, disks and network cards stay those of a node.

    Attributes:
        intra: between the devices of a node, or of a domain; None where a node has one device.
        inter: between nodes; None where there is one node.
        pair: a bridge that joins devices 2i and 2i + 1 of a node, beside `intra`.
        host_bridge: where the devices of a node are joined by PCIe, and share it.
        nodes_per_domain: nodes whose devices `intra` joins; of fewer nodes, or of a number that it
            does not divide, the largest divisor below counts (see `domain_nodes`).
        network_cards: of a node; None: unknown, planned as one a device.
        oversubscription: of the switch between nodes: what comes down over what goes up, 2 for 2:1.
        nodes_per_switch: nodes under one such switch; None: unknown, planned as 1.
        notes: what is special, or could not be found out; shown in every report.
        host_memory_bytes: main memory of a node.
        cores: processor cores of a node.
        disk_write_bytes_per_s, disk_read_bytes_per_s: of a node, files in a folder that the user
            named; where they were measured.
        disk_free_bytes: what was free there then, of a node.
        axes: measured mesh axes, where a bench was run; the one that fits takes precedence.
        overlap: measured, where a bench was run.
        shared_cores: measured, where a bench was run on processors; None if no cores are shared.
        learned: what runs of before have corrected.
        parts: the devices of one rank, where a module is split over several by hand; `device` and
            the counts are of ranks then.
    """

    name: str
    notes: tuple[str, ...] = ()
    num_nodes: Devices
    devices_per_node: DevicesOfNode
    nodes_per_domain: Devices = 1
    network_cards: DevicesOfNode | None = None
    oversubscription: Annotated[float, Field(ge=1)] = 1.0
    nodes_per_switch: Devices | None = None
    pair: Link | None = None
    host_bridge: HostBridge | None = None
    device: Device
    intra: Link | None
    inter: Link | None
    host_memory_bytes: Quantity | None = None
    cores: Devices | None = None
    disk_write_bytes_per_s: Quantity | None = None
    disk_read_bytes_per_s: Quantity | None = None
    disk_free_bytes: Quantity | None = None
    axes: tuple[AxisFits, ...] = ()
    overlap: Overlap | None = None
    shared_cores: SharedCores | None = None
    learned: Learned | None = None
    parts: ClusterProfile | None = None

    @model_validator(mode="after")
    def _no_more_devices_than_there_are(self) -> Self:
        if self.world_size > MOST_DEVICES:
            raise InputError(
                f"`num_nodes` * `devices_per_node` = {self.num_nodes:,} * {self.devices_per_node:,}"
                f" = {self.world_size:,} devices: {MOST_DEVICES:,} are the most",
                hints=[f"take {MOST_DEVICES // self.devices_per_node} nodes or fewer"],
            )
        return self

    @property
    def world_size(self) -> int:
        return self.num_nodes * self.devices_per_node

    @property
    def domain_nodes(self) -> int:
        """Nodes in each domain: all domains are equal."""
        sizes = range(min(self.nodes_per_domain, self.num_nodes), 0, -1)
        return next(size for size in sizes if self.num_nodes % size == 0)

    @property
    def domain_devices(self) -> int:
        """Devices that `intra` joins."""
        return self.devices_per_node * self.domain_nodes

    @property
    def num_domains(self) -> int:
        return self.num_nodes // self.domain_nodes

    @property
    def sources(self) -> dict[str, Source]:
        """Kind of source of each part."""
        parts = {"device speed": self.device.matmul_fraction.source}
        if self.intra:
            parts["links in the node"] = self.intra.bandwidth_bytes_per_s.source
        if self.inter:
            parts["links between nodes"] = self.inter.bandwidth_bytes_per_s.source
        return parts

    @property
    def is_timed(self) -> bool:
        """True if speed and links were measured on these machines."""
        return set(self.sources.values()) == {Source.MEASURED}

    @property
    def link_in_rank(self) -> Link | None:
        """Between the devices of one rank, where it has several."""
        return self.parts.intra if self.parts is not None else None

    def crosses_nodes(self, group_size: int, stride: int = 1) -> bool:
        """True if a mesh axis of `group_size` ranks, `stride` ranks apart, spans nodes (domains).

        Some of its groups do where its blocks of ranks do not divide the devices of a node.
        """
        if group_size < 2:
            return False
        if (group_size - 1) * stride >= self.domain_devices:
            return True
        return self.num_domains > 1 and self.domain_devices % (group_size * stride) != 0

    def ranks_per_node(self, group_size: int, stride: int = 1) -> int:
        """Number of ranks of one such group that share a node, or a domain."""
        return max(1, min(group_size, self.domain_devices // stride))

    def link(self, group_size: int, stride: int = 1) -> Link:
        """The tier that the group's slowest hop uses.

        Raises:
            ValueError: a group of one rank uses no link.
        """
        if group_size < 2:
            raise ValueError("a group of one rank uses no link")
        tier = self.inter if self.crosses_nodes(group_size, stride) else self.intra
        if tier is None:
            raise ValueError(f"{self.name} has no link for {group_size} ranks {stride} apart")
        return tier

    def measured(self, kind: Collective, group_size: int, stride: int = 1) -> LinkFit | None:
        """The fit of this collective on exactly this axis, if a bench timed it."""
        for axis in self.axes:
            if (axis.group_size, axis.stride) == (group_size, stride):
                return axis.fits.get(kind)
        return None

    def group_bandwidth(self, group_size: int, stride: int = 1) -> Quantity:
        """Bus bandwidth of each such group when all groups of the axis talk at once, bytes/s.

        Routed through `topology`. In plain nodes: inside one the link's; across nodes, whose cards
        are shared, a group with k of a node's n ranks gets k/n of them, and never more than the
        links inside the node carry.
        """
        self.link(group_size, stride)  # refuses what there is no link for
        share = self.topology.share(group_size, stride)
        quantity = self._tier(share.tier).bandwidth_bytes_per_s
        return quantity.model_copy(update={"value": share.bytes_per_s})

    def bottleneck(self, group_size: int, stride: int = 1) -> Link:
        """The link whose share `group_bandwidth` is, the slowest of those on the way."""
        self.link(group_size, stride)
        return self._tier(self.topology.share(group_size, stride).tier)

    @property
    def topology(self) -> Topology:
        """Graph of devices, cards and switches; a domain is a node there.

        Rates that a bench measured hold already what bridges and switches take from them.
        """
        intra, inter, nodes = self.intra, self.inter, self.domain_nodes
        timed_inside = intra is not None and bool(intra.fits)
        timed_between = inter is not None and bool(inter.fits)
        bridge = None if timed_inside else self.host_bridge
        pair = self.pair.bandwidth_bytes_per_s.value if self.pair and not timed_inside else None
        return Topology(
            num_nodes=self.num_domains,
            devices_per_node=self.domain_devices,
            device_bytes_per_s=intra.bandwidth_bytes_per_s.value if intra else inf,
            node_bytes_per_s=nodes * inter.bandwidth_bytes_per_s.value if inter else inf,
            mesh=intra is not None and intra.wiring == "mesh",
            cards=nodes * (self.network_cards or self.devices_per_node),
            oversubscription=1.0 if timed_between else self.oversubscription,
            nodes_per_switch=max(1, (self.nodes_per_switch or 1) // nodes),
            pair_bytes_per_s=pair,
            host_bytes_per_s=bridge.link.bandwidth_bytes_per_s.value if bridge else None,
            devices_per_bridge=bridge.devices if bridge else 1,
            peer_to_peer=bridge.peer_to_peer if bridge else True,
        )

    def _tier(self, tier: Tier) -> Link:
        links = {
            Tier.INTER: self.inter,
            Tier.SPINE: self.inter,
            Tier.INTRA: self.intra,
            Tier.PAIR: self.pair,
            Tier.HOST: self.host_bridge.link if self.host_bridge else None,
        }
        link = links[tier]
        assert link is not None, f"{self.name} has no {tier}"
        if tier is Tier.SPINE:
            name = f"{link.name}, {self.oversubscription:g}:1 oversubscribed"
            return link.model_copy(update={"name": name})
        return link
