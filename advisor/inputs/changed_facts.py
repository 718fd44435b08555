"""Levers: facts that a user could change, and the same facts with one of them changed."""

from __future__ import annotations

from enum import StrEnum
from math import gcd

from advisor.inputs.facts import Facts
from advisor.inputs.model_sizes import at_length, has_other_lengths
from profiles.errors import InputError
from profiles.machine.cluster import ClusterProfile, Collective, Link, LinkFit
from profiles.units import format_bandwidth, format_gib
from profiles.workload.optimizers import OPTIMIZERS
from profiles.workload.under_stack import under_stack


class Lever(StrEnum):
    """Quantity to vary."""

    LINKS_IN_NODE = "links in the node"
    LINKS_BETWEEN_NODES = "links between nodes"
    MEMORY = "device memory"
    BATCH = "global batch"
    SEQUENCE = "sequence length"


# Sequence lengths vary in steps of this: the tile size of attention kernels (FlashAttention-2).
TOKENS_STEP = 128


def value(facts: Facts, lever: Lever) -> float:
    """Current value of `lever`: bytes/s, bytes, samples or tokens.

    Raises:
        InputError: it cannot be varied here, and why.
    """
    cluster = facts.cluster
    match lever:
        case Lever.LINKS_IN_NODE:
            inside = cluster.intra or cluster.link_in_rank
            return _link(inside, "a node has one device").bandwidth_bytes_per_s.value
        case Lever.LINKS_BETWEEN_NODES:
            return _link(cluster.inter, "there is one node").bandwidth_bytes_per_s.value
        case Lever.MEMORY:
            return cluster.device.memory_bytes.value
        case Lever.BATCH:
            return facts.workload.global_batch_size
        case Lever.SEQUENCE:
            length = facts.model.tokens_per_sample
            if length is None:
                raise InputError("the samples are no sequences of tokens")
            if not has_other_lengths(facts.model):
                raise InputError(
                    f"the profile of {facts.model.name} was taken of a module at {length} tokens,"
                    " and is not known at other lengths",
                    hints=["name the model by its config.json, or as `pkg.module:factory`"],
                )
            return length


def step(facts: Facts, lever: Lever) -> int | None:
    """Step of a lever with integer values; None if any value is valid.

    The batch varies in steps that replicas can split evenly, so that its size counts and not its
    divisors.
    """
    match lever:
        case Lever.BATCH:
            return gcd(facts.workload.global_batch_size, facts.cluster.world_size)
        case Lever.SEQUENCE:
            return gcd(int(value(facts, lever)), TOKENS_STEP)
    return None


def varied(facts: Facts, lever: Lever, wanted: float) -> Facts:
    """`facts` with `lever` at `wanted`.

    Raises:
        InputError: the model does not take such sequences.
    """
    cluster, workload = facts.cluster, facts.workload
    factor = wanted / value(facts, lever)
    match lever:
        case Lever.LINKS_IN_NODE:
            parts = cluster.parts and _faster(cluster.parts, "intra", factor)
            faster = _faster(cluster, "intra", factor) if cluster.intra else cluster
            return _with(facts, cluster=faster.model_copy(update={"parts": parts}))
        case Lever.LINKS_BETWEEN_NODES:
            return _with(facts, cluster=_faster(cluster, "inter", factor))
        case Lever.MEMORY:
            memory = cluster.device.memory_bytes.model_copy(update={"value": wanted})
            device = cluster.device.model_copy(update={"memory_bytes": memory})
            return _with(facts, cluster=cluster.model_copy(update={"device": device}))
        case Lever.BATCH:
            update = {"global_batch_size": round(wanted)}
            return _with(facts, workload=workload.model_copy(update=update))
        case Lever.SEQUENCE:
            length = round(wanted)
            named = {"tokens_per_sample": length} if workload.tokens_per_sample else {}
            return _with(
                facts,
                model=under_stack(at_length(facts.model, length), facts.stack),
                workload=workload.model_copy(update=named),
            )


def with_8_bit_states(facts: Facts) -> Facts | None:
    """Return facts with 8-bit moments; None if the optimizer has no 32-bit ones."""
    if facts.workload.optimizer.name not in ("adam", "adamw"):
        return None
    workload = facts.workload.model_copy(update={"optimizer": OPTIMIZERS["adamw-8bit"]})
    return _with(facts, workload=workload)


def shown(lever: Lever, amount: float) -> str:
    """Format an amount for the report.

    >>> shown(Lever.LINKS_IN_NODE, 50e9), shown(Lever.SEQUENCE, 4096)
    ('50.0 GB/s', '4096 tokens')
    """
    match lever:
        case Lever.LINKS_IN_NODE | Lever.LINKS_BETWEEN_NODES:
            return format_bandwidth(amount)
        case Lever.MEMORY:
            return format_gib(amount)
        case Lever.BATCH:
            return f"{amount:.0f} samples"
        case Lever.SEQUENCE:
            return f"{amount:.0f} tokens"


def _link(link: Link | None, otherwise: str) -> Link:
    if link is None:
        raise InputError(otherwise)
    return link


def _faster(cluster: ClusterProfile, tier: str, factor: float) -> ClusterProfile:
    """Multiply every rate of the tier by `factor`, published and measured alike; latency is
    unchanged."""
    link: Link = getattr(cluster, tier)
    rate = link.bandwidth_bytes_per_s
    faster = link.model_copy(
        update={
            "bandwidth_bytes_per_s": rate.model_copy(update={"value": rate.value * factor}),
            "fits": _scaled(link.fits, factor),
        }
    )
    axes = tuple(
        axis.model_copy(update={"fits": _scaled(axis.fits, factor)})
        if cluster.crosses_nodes(axis.group_size, axis.stride) == (tier == "inter")
        else axis
        for axis in cluster.axes
    )
    return cluster.model_copy(update={tier: faster, "axes": axes})


def _scaled(fits: dict[Collective, LinkFit], factor: float) -> dict[Collective, LinkFit]:
    return {
        kind: fit.model_copy(update={"busbw_bytes_per_s": fit.busbw_bytes_per_s * factor})
        for kind, fit in fits.items()
    }


def _with(facts: Facts, **changes: object) -> Facts:
    return facts.model_copy(update=changes)
