"""Ledger: all collectives charged to a plan, equal ones combined."""

from __future__ import annotations

from advisor.cost.breakdown import Traffic
from advisor.cost.calibration import CALIBRATION, Calibration
from advisor.cost.collective import Algorithm, algorithms
from profiles.machine.cluster import ClusterProfile, Collective
from profiles.provenance import Quantity, Source

# A device's share of its own PCIe 4.0 x16 slot: 31 GB/s nominal (ml-engineering), of which eight
# devices at once reach 24 (NVIDIA GTC S62129). Assumed where no bench was run on a GPU.
HOST_LINK_BYTES_PER_S = 24e9
# A usual NVMe drive on four lanes of PCIe 4.0, sequential: 5,000 MB/s written and 7,000 MB/s read
# (data sheet of Samsung's 980 PRO, 1 TB). The devices of a node share it. Assumed where no folder
# was measured.
DISK_WRITE_BYTES_PER_S = 5e9
DISK_READ_BYTES_PER_S = 7e9

AlgorithmCache = dict[tuple[Collective, int, int], tuple[Algorithm, ...]]
"""Algorithms by collective, group size and stride."""


def host_link_bytes_per_s(cluster: ClusterProfile) -> Quantity:
    """Bandwidth between a device and main memory, in one direction."""
    assumed = Quantity(value=HOST_LINK_BYTES_PER_S, source=Source.ASSUMED)
    return cluster.device.host_link_bytes_per_s or assumed


def disk_bytes_per_s(cluster: ClusterProfile) -> tuple[Quantity, Quantity]:
    """(write, read) bandwidth of a file system, shared by all devices of a node."""
    written, read = cluster.disk_write_bytes_per_s, cluster.disk_read_bytes_per_s
    return (
        written or Quantity(value=DISK_WRITE_BYTES_PER_S, source=Source.ASSUMED),
        read or Quantity(value=DISK_READ_BYTES_PER_S, source=Source.ASSUMED),
    )


class Ledger:
    """Record of a plan's collectives, equal ones combined, and of its transfers to the host.

    `cache` has the algorithms of collectives on this cluster.
    """

    def __init__(
        self, cluster: ClusterProfile, cache: AlgorithmCache, calibration: Calibration = CALIBRATION
    ) -> None:
        self.host_bytes = 0.0
        self.host_s = 0.0
        self._cluster = cluster
        self._algorithms = cache
        self._calibration = calibration
        self._counts: dict[tuple[Collective, str, float, int, int], float] = {}
        self._parts: Ledger | None = None

    def to_host(self, size_bytes: float, *, count: float = 1) -> float:
        """Record `count` transfers between device and main memory; return the seconds of one."""
        seconds = size_bytes / host_link_bytes_per_s(self._cluster).value
        self.host_bytes += count * size_bytes
        self.host_s += count * seconds
        return seconds

    def ranks_per_node(self, group_size: int, stride: int) -> int:
        """Number of ranks of one such group on a node."""
        return self._cluster.ranks_per_node(group_size, stride)

    def charge(
        self,
        kind: Collective,
        purpose: str,
        payload_bytes: float,
        *,
        group_size: int,
        stride: int = 1,
        count: float = 1,
    ) -> float:
        """Record `count` collectives; return the seconds of one."""
        if group_size < 2 or count == 0 or payload_bytes == 0:
            return 0.0
        key = (kind, purpose, payload_bytes, group_size, stride)
        self._counts[key] = self._counts.get(key, 0) + count
        return self.seconds(kind, payload_bytes, group_size, stride)

    def between_parts(self, purpose: str, payload_bytes: float, *, count: float) -> float:
        """Record `count` copies between two devices of this rank; return the seconds of one.

        Assumes the same link between any two of them.
        """
        parts = self._cluster.parts
        assert parts is not None, f"{self._cluster.name} has one device a rank"
        self._parts = self._parts or Ledger(parts, {})
        return self._parts.charge(
            Collective.SEND_RECV, purpose, payload_bytes, group_size=2, count=count
        )

    def seconds(self, kind: Collective, payload_bytes: float, group: int, stride: int) -> float:
        """Seconds of one collective, without recording."""
        return min(each.seconds(payload_bytes) for each in self.algorithms(kind, group, stride))

    def algorithms(self, kind: Collective, group_size: int, stride: int) -> tuple[Algorithm, ...]:
        """Algorithms of a collective in such groups."""
        options = self._algorithms.get((kind, group_size, stride))
        if options is None:
            best = algorithms(self._cluster, kind, group_size=group_size, stride=stride)
            share = self._calibration.collective_share(self._cluster, kind, group_size, stride)
            options = tuple(Algorithm(each.latency_s, each.s_per_byte / share) for each in best)
            self._algorithms[kind, group_size, stride] = options
        return options

    def traffic(self) -> tuple[Traffic, ...]:
        own = tuple(
            Traffic(
                kind=kind,
                purpose=purpose,
                payload_bytes=payload,
                count=count,
                group_size=group,
                stride=stride,
                link=self._cluster.link(group, stride).name,
                seconds=count * self.seconds(kind, payload, group, stride),
            )
            for (kind, purpose, payload, group, stride), count in self._counts.items()
        )
        parts = self._parts.traffic() if self._parts is not None else ()
        return (*own, *(each.model_copy(update={"stride": 0}) for each in parts))
