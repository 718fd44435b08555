"""What is known of the machines: devices, their memory and speed, and the links between them."""

from __future__ import annotations

from enum import StrEnum

from pydantic import Field, NonNegativeFloat, PositiveInt

from profiles.provenance import Quantity, Source
from profiles.record import Document, Record


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


class Link(Record):
    """A tier of links: what joins the devices of a node, or the nodes.

    Attributes:
        bandwidth_bytes_per_s: one direction. Inside a node per device; between nodes per *node*
            (all its network cards together).
        latency_s: of a small message.
        fits: measured collectives, where a bench was run; they take precedence.
    """

    name: str
    bandwidth_bytes_per_s: Quantity
    latency_s: Quantity
    fits: dict[Collective, LinkFit] = Field(default_factory=dict)


class Device(Record):
    """One accelerator, or one CPU rank's share of a machine.

    Attributes:
        kind: torch's device type: "cuda" (ROCm too) or "cpu".
        memory_bytes: the whole of it, as the runtime reports.
        memory_bandwidth_bytes_per_s: what large streaming operations reach, reads and writes.
        flop_per_s: dense peak by dtype ("float32", "bfloat16", ...).
        matmul_fraction: share of the peak that large matrix products reach.
        launch_s: time below which no operation goes.
        context_bytes: taken by runtime, libraries and process group before the first tensor.
    """

    name: str
    kind: str
    memory_bytes: Quantity
    memory_bandwidth_bytes_per_s: Quantity
    flop_per_s: dict[str, Quantity]
    matmul_fraction: Quantity
    launch_s: Quantity
    context_bytes: Quantity


class ClusterProfile(Document):
    """Equal nodes of equal devices, one link tier inside the nodes and one between them.

    Attributes:
        intra: between the devices of a node; None where a node has one device.
        inter: between nodes; None where there is one node.
        host_memory_bytes: main memory of a node.
        cores: processor cores of a node.
    """

    name: str
    num_nodes: PositiveInt
    devices_per_node: PositiveInt
    device: Device
    intra: Link | None
    inter: Link | None
    host_memory_bytes: Quantity | None = None
    cores: PositiveInt | None = None

    @property
    def world_size(self) -> int:
        return self.num_nodes * self.devices_per_node

    @property
    def sources(self) -> dict[str, Source]:
        """What kind of source each part rests on."""
        parts = {"device speed": self.device.matmul_fraction.source}
        if self.intra:
            parts["links in the node"] = self.intra.bandwidth_bytes_per_s.source
        if self.inter:
            parts["links between nodes"] = self.inter.bandwidth_bytes_per_s.source
        return parts

    def crosses_nodes(self, group_size: int, stride: int = 1) -> bool:
        """Whether a mesh axis of `group_size` ranks, `stride` ranks apart, spans nodes."""
        return (group_size - 1) * stride >= self.devices_per_node

    def ranks_per_node(self, group_size: int, stride: int = 1) -> int:
        """How many ranks of one such group share a node."""
        return max(1, min(group_size, self.devices_per_node // stride))

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

    def group_bandwidth(self, group_size: int, stride: int = 1) -> Quantity:
        """Bus bandwidth of each such group when all groups of the axis talk at once, bytes/s.

        Inside a node: the link's. Across nodes the node's cards are shared: a group with k of a
        node's n ranks gets k/n of them, and never more than the links inside the node carry.
        """
        tier = self.bottleneck(group_size, stride)
        quantity = tier.bandwidth_bytes_per_s
        if tier is self.intra:
            return quantity
        part = self._part(group_size, stride)
        return quantity.model_copy(update={"value": quantity.value * part})

    def bottleneck(self, group_size: int, stride: int = 1) -> Link:
        """The tier whose bandwidth `group_bandwidth` is, the slower one of those on the way."""
        tier = self.link(group_size, stride)
        if self.intra is None or self.ranks_per_node(group_size, stride) < 2:
            return tier
        if not self.crosses_nodes(group_size, stride):
            return tier
        between = tier.bandwidth_bytes_per_s.value * self._part(group_size, stride)
        return self.intra if self.intra.bandwidth_bytes_per_s.value < between else tier

    def _part(self, group_size: int, stride: int) -> float:
        """The part of a node's cards that one of the groups of an axis gets."""
        return self.ranks_per_node(group_size, stride) / self.devices_per_node
