"""The tables and keys of a cluster file; numbers are read with their units."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, NonNegativeFloat, PositiveInt

from profiles.machine import quantities
from profiles.machine.cluster import Overlap, SharedCores
from profiles.record import Record
from profiles.record.bounds import Devices, DevicesOfNode


class FitTable(Record):
    latency: quantities.PlainTime
    bandwidth: quantities.PlainBandwidth
    relative_residual: NonNegativeFloat = 0.0


class AxisTable(Record):
    group_size: Annotated[Devices, Field(ge=2)]
    stride: Devices
    fits: dict[str, FitTable] = Field(default_factory=dict)


class LinkTable(Record):
    link: str | None = None
    name: str | None = None
    bandwidth: quantities.Bandwidth = None
    latency: quantities.Time = None
    fits: dict[str, FitTable] = Field(default_factory=dict)
    wiring: Literal["switch", "mesh"] | None = None


class BridgeTable(LinkTable):
    devices: DevicesOfNode | None = None
    peer_to_peer: bool = True


class DeviceTable(Record):
    name: str | None = None
    kind: Literal["cuda", "cpu"] | None = None
    memory: quantities.Capacity = None
    memory_bandwidth: quantities.Bandwidth = None
    flop_rate: dict[str, quantities.FlopRate] | None = None
    matmul_fraction: quantities.Fraction = None
    launch: quantities.Time = None
    context: quantities.Memory = None
    board_power: quantities.Power = None
    host_link: quantities.Bandwidth = None
    new_memory: quantities.Bandwidth = None
    matmul_efficiency: dict[PositiveInt, quantities.Factor] | None = None


class ClusterTable(Record):
    """The keys of a cluster file."""

    name: str | None = None
    system: str | None = None
    accelerator: str | None = None
    nodes: Devices = 1
    count: Devices | None = None  # of nodes, in a table `[[node]]`
    node: list[ClusterTable] = Field(default_factory=list)
    notes: tuple[str, ...] = ()
    devices_per_node: DevicesOfNode | None = None
    nodes_per_domain: Devices | None = None
    network_cards: DevicesOfNode | None = None
    oversubscription: Annotated[float, Field(ge=1)] = 1.0
    nodes_per_switch: Devices | None = None
    pair: LinkTable | None = None
    host_bridge: BridgeTable | None = None
    host_memory: quantities.Memory = None
    cores: Devices | None = None
    disk_write: quantities.Bandwidth = None
    disk_read: quantities.Bandwidth = None
    disk_free: quantities.Memory = None
    device: DeviceTable | None = None
    intra: LinkTable | None = None
    inter: LinkTable | None = None
    overlap: Overlap | None = None
    shared_cores: SharedCores | None = None
    axes: list[AxisTable] = Field(default_factory=list)
