"""The links of a cluster from the fits of its axes."""

from __future__ import annotations

from collections.abc import Mapping

from profiles.machine.bench.axes import BenchAxis
from profiles.machine.bench.collectives import AxisTimes
from profiles.machine.bench.device import measured
from profiles.machine.cluster import Collective, Link

Times = Mapping[BenchAxis, AxisTimes]
# What a ring sends at the link's rate; all-to-alls and sends have patterns of their own.
RINGS = (Collective.ALL_REDUCE, Collective.ALL_GATHER, Collective.REDUCE_SCATTER)


def node_link(known: Link | None, times: Times, *, devices_per_node: int) -> Link:
    """Link between the devices of a node, from groups of all of them."""
    return _link(known, times[BenchAxis(devices_per_node, 1)], "links in the node", groups=1)


def network_link(
    known: Link | None, times: Times, *, num_nodes: int, devices_per_node: int
) -> Link:
    """Link between nodes, from groups of one rank of each: they shared a node's cards."""
    axis = BenchAxis(num_nodes, devices_per_node)
    return _link(known, times[axis], "links between nodes", groups=devices_per_node)


def _link(known: Link | None, times: AxisTimes, name: str, *, groups: int) -> Link:
    """Link at the rate of the fastest ring collective, with a range that covers the slower ones.

    The link carries that much; that others get less is the library's doing. Gloo (torch 2.13) makes
    of a reduce-scatter an all-reduce of which each rank keeps a part, so it reaches half; and two
    ranks that send each other large messages at once, as in a gather, may wait for one another.
    """
    scaled = {
        kind: fit.model_copy(update={"busbw_bytes_per_s": groups * fit.busbw_bytes_per_s})
        for kind, fit in times.fits.items()
    }
    rings = [scaled[kind] for kind in RINGS]
    rates = [fit.busbw_bytes_per_s for fit in rings]
    spread = 1 - min(rates) / max(rates)
    residual = max(fit.relative_residual for fit in rings)
    send = scaled[Collective.SEND_RECV]
    return Link(
        name=known.name if known else name,
        bandwidth_bytes_per_s=measured(max(rates), max(spread, residual)),
        latency_s=measured(send.latency_s, send.relative_residual),
        fits=scaled,
    )
