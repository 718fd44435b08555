"""Constants of a cluster that runs can correct: values, errors, and substitution."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from math import hypot
from statistics import geometric_mean

import numpy as np
from numpy.typing import NDArray

from advisor.cost.calibration import CALIBRATION
from advisor.cost.communication.exchange import COMMUNICATION_ERROR
from advisor.cost.compute.unit_times import COMPUTE_ERROR, matmul_fraction, peak_flop_per_s
from profiles.machine.cluster import ClusterProfile, Collective, Constant, Link, LinkFit
from profiles.model.work import AttentionKernel
from profiles.provenance import Quantity, Source

# Minimum error of a constant before any run: even exact values were measured outside a training
# step. Assumed: half of the roofline's error.
LEAST_ERROR = COMPUTE_ERROR / 2
WIDEST_ERROR = 0.9  # of a range, so that its low end stays positive

COMPUTING = (Constant.PRODUCTS, Constant.ATTENTION, Constant.MEMORY, Constant.LAUNCH)


def unit_times(cluster: ClusterProfile, dtype: str) -> dict[Constant, float]:
    """Seconds per FLOP, byte or operation; for links per byte at the geometric mean of their
    rates."""
    device = cluster.device
    reached = peak_flop_per_s(device, dtype).value * matmul_fraction(device)
    times = {
        Constant.PRODUCTS: 1 / reached,
        Constant.MEMORY: 1 / CALIBRATION.bandwidth_bytes_per_s(device),
        Constant.LAUNCH: device.launch_s.value,
    }
    if device.kind != "cpu":  # on CPU, attention is made of ordinary products
        half = peak_flop_per_s(device, "bfloat16").value
        kernel = CALIBRATION.attention_share(device, AttentionKernel.FLASH2)
        times[Constant.ATTENTION] = 1 / (half * kernel)
    for constant, link in _links(cluster):
        rates = [fit.busbw_bytes_per_s for fit in _fits(cluster, constant)]
        times[constant] = 1 / geometric_mean(rates or [link.bandwidth_bytes_per_s.value])
    return {constant: unit_s for constant, unit_s in times.items() if unit_s > 0}


def own_errors(cluster: ClusterProfile, dtype: str) -> dict[Constant, float]:
    """Error of each constant before any run."""
    device = cluster.device
    peak = peak_flop_per_s(device, dtype).relative_error
    errors = {
        Constant.PRODUCTS: hypot(peak, device.matmul_fraction.relative_error),
        Constant.ATTENTION: peak_flop_per_s(device, "bfloat16").relative_error,
        Constant.MEMORY: device.memory_bandwidth_bytes_per_s.relative_error,
        Constant.LAUNCH: device.launch_s.relative_error,
    }
    for constant, link in _links(cluster):
        misses = [fit.relative_residual for fit in _fits(cluster, constant)]
        errors[constant] = max(misses, default=link.bandwidth_bytes_per_s.relative_error)
    return errors


def doubts(
    cluster: ClusterProfile, constants: Sequence[Constant], dtype: str
) -> NDArray[np.float64]:
    """Covariance of the constants, as squares of errors, before any run.

    The roofline's own doubt is one of all computing: what it overlooks slows all of it.
    """
    own = own_errors(cluster, dtype)
    covariance = np.diag([max(own[constant], LEAST_ERROR) ** 2 for constant in constants])
    for i, one in enumerate(constants):
        for j, other in enumerate(constants):
            if one in COMPUTING and other in COMPUTING:
                covariance[i, j] += COMPUTE_ERROR**2
            elif i == j:
                covariance[i, j] += COMMUNICATION_ERROR**2
    return covariance


def slowed(cluster: ClusterProfile, factors: Mapping[Constant, float]) -> ClusterProfile:
    """Multiply the times of everything that depends on a constant by `factors`."""

    def times(constant: Constant) -> float:
        return factors.get(constant, 1.0)

    def scaled(quantity: Quantity, factor: float) -> Quantity:
        return quantity.model_copy(update={"value": quantity.value * factor})

    def fits(original: Mapping[Collective, LinkFit], factor: float) -> dict[Collective, LinkFit]:
        return {
            kind: fit.model_copy(
                update={
                    "latency_s": fit.latency_s * factor,
                    "busbw_bytes_per_s": fit.busbw_bytes_per_s / factor,
                }
            )
            for kind, fit in original.items()
        }

    def link(original: Link, factor: float) -> Link:
        return original.model_copy(
            update={
                "bandwidth_bytes_per_s": scaled(original.bandwidth_bytes_per_s, 1 / factor),
                "latency_s": scaled(original.latency_s, factor),
                "fits": fits(original.fits, factor),
            }
        )

    device, inside, bridge = cluster.device, times(Constant.INTRA), cluster.host_bridge
    fraction = scaled(device.matmul_fraction, 1 / times(Constant.PRODUCTS))
    rate = scaled(device.memory_bandwidth_bytes_per_s, 1 / times(Constant.MEMORY))
    launch = scaled(device.launch_s, times(Constant.LAUNCH))
    return cluster.model_copy(
        update={
            "device": device.model_copy(
                update={
                    "matmul_fraction": fraction,
                    "memory_bandwidth_bytes_per_s": rate,
                    "launch_s": launch,
                    "attention": device.attention / times(Constant.ATTENTION),
                    "elementwise": device.elementwise / times(Constant.MEMORY),
                    "odd": device.odd / times(Constant.PRODUCTS),
                }
            ),
            "intra": cluster.intra and link(cluster.intra, inside),
            "inter": cluster.inter and link(cluster.inter, times(Constant.INTER)),
            "pair": cluster.pair and link(cluster.pair, inside),
            "host_bridge": bridge and bridge.model_copy(update={"link": link(bridge.link, inside)}),
            "axes": tuple(
                axis.model_copy(
                    update={
                        "fits": fits(
                            axis.fits, times(tier_of(cluster, axis.group_size, axis.stride))
                        )
                    }
                )
                for axis in cluster.axes
            ),
        }
    )


def as_measured(
    cluster: ClusterProfile, errors: Mapping[Constant, float], dtype: str, *, origin: str
) -> ClusterProfile:
    """Mark the constants in `errors` as measured, with these errors."""
    device, links = cluster.device, {}
    changed: dict[str, object] = {}
    if Constant.PRODUCTS in errors:
        fraction = measured(device.matmul_fraction, errors[Constant.PRODUCTS], origin=origin)
        # Achieved product throughput was measured, so no further efficiency applies; the error of
        # the peak is part of the error of its share.
        reached = {"value": matmul_fraction(device)}
        peak = peak_flop_per_s(device, dtype).model_copy(update={"relative_error": 0.0})
        key = dtype if dtype in device.flop_per_s else "float32"
        changed["matmul_fraction"] = fraction.model_copy(update=reached)
        changed["flop_per_s"] = {**device.flop_per_s, key: peak}
    if Constant.MEMORY in errors:
        rate = device.memory_bandwidth_bytes_per_s
        reached = {"value": CALIBRATION.bandwidth_bytes_per_s(device)}
        rate = measured(rate, errors[Constant.MEMORY], origin=origin)
        changed["memory_bandwidth_bytes_per_s"] = rate.model_copy(update=reached)
    if Constant.LAUNCH in errors:
        changed["launch_s"] = measured(device.launch_s, errors[Constant.LAUNCH], origin=origin)
    for constant, link in _links(cluster):
        if constant in errors:
            name = "intra" if constant is Constant.INTRA else "inter"
            share = _share(cluster, constant)
            links[name] = _link_as_measured(link, errors[constant], share, origin=origin)
    axes = tuple(
        axis.model_copy(update={"fits": _fits_as_measured(axis.fits, errors[tier])})
        if (tier := tier_of(cluster, axis.group_size, axis.stride)) in errors
        else axis
        for axis in cluster.axes
    )
    return cluster.model_copy(
        update={"device": device.model_copy(update=changed), **links, "axes": axes}
    )


def measured(quantity: Quantity, error: float, *, origin: str) -> Quantity:
    """Return the same value as a measurement with this error."""
    known = {"source": Source.MEASURED, "relative_error": min(WIDEST_ERROR, error)}
    return quantity.model_copy(update={**known, "origin": origin})


def _share(cluster: ClusterProfile, constant: Constant) -> float:
    """Share of a link's rate that collectives reach inside a step."""
    size = cluster.devices_per_node if constant is Constant.INTRA else cluster.world_size
    return CALIBRATION.collective_share(cluster, Collective.ALL_REDUCE, size, 1)


def _link_as_measured(link: Link, error: float, share: float, *, origin: str) -> Link:
    rate = measured(link.bandwidth_bytes_per_s, error, origin=origin)
    return link.model_copy(
        update={
            "bandwidth_bytes_per_s": rate.model_copy(update={"value": share * rate.value}),
            "latency_s": measured(link.latency_s, error, origin=origin),
            "fits": _fits_as_measured(link.fits, error),
        }
    )


def _fits_as_measured(
    fits: Mapping[Collective, LinkFit], error: float
) -> dict[Collective, LinkFit]:
    known = {"relative_residual": error}
    return {kind: fit.model_copy(update=known) for kind, fit in fits.items()}


def _links(cluster: ClusterProfile) -> Iterator[tuple[Constant, Link]]:
    if cluster.intra is not None:
        yield Constant.INTRA, cluster.intra
    if cluster.inter is not None:
        yield Constant.INTER, cluster.inter


def _fits(cluster: ClusterProfile, constant: Constant) -> list[LinkFit]:
    """All measured fits of the tier."""
    link = cluster.intra if constant is Constant.INTRA else cluster.inter
    fits = [*link.fits.values()] if link is not None else []
    for axis in cluster.axes:
        if tier_of(cluster, axis.group_size, axis.stride) is constant:
            fits += axis.fits.values()
    return fits


def tier_of(cluster: ClusterProfile, group_size: int, stride: int) -> Constant:
    """Links that a mesh axis uses."""
    return Constant.INTER if cluster.crosses_nodes(group_size, stride) else Constant.INTRA
