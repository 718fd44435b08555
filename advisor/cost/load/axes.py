"""Context and expert parallelism: communication, and effects on a unit's load.

A rank of the cp axis has 1/cp of a sample's tokens, and attention needs the keys and values of all
of them (ring attention, arXiv:2310.01889). A rank of the ep axis has 1/ep of the experts; tokens
are dispatched to them and combined again (GShard, arXiv:2006.16668).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from math import ceil

from advisor.cost.load.tensor import TensorExchange
from advisor.cost.load.unit_load import UnitLoad
from profiles.machine.cluster import Collective
from profiles.model.profile import ParameterShape, UnitCost, UnitProfile
from profiles.model.work import ProductKind

# Experts that a token is sent to where the profile does not say: assumed, as GShard and Mixtral.
EXPERTS_PER_TOKEN = 2
NUMBER_BYTES = 8  # int64


def over_tokens(
    load: UnitLoad, cost: UnitCost, *, cp: int, samples: float, element_bytes: int
) -> UnitLoad:
    """A block whose tokens are split over `cp` ranks; `samples` is a rank's share of a microbatch.

    The ring passes keys and values once in the forward; in the backward again, with their
    gradients, which are summed in fp32 and take one more hop, home. A rank holds its own and those
    in transit. (`engines.context.ring`)
    """
    if not load.is_block:
        return load
    own = _keys_and_values(cost, samples)
    whole = own * cp
    wide = own * max(1.0, 4 / element_bytes)
    home = wide * cp * cp / (cp - 1)  # of which a reduce-scatter sends (cp - 1) / cp
    names = "keys and values", "gradients of keys and values"
    ring = (
        TensorExchange(Collective.ALL_GATHER, names[0], whole, True, True, "cp"),
        TensorExchange(Collective.ALL_GATHER, names[0], whole, False, False, "cp"),
        TensorExchange(Collective.REDUCE_SCATTER, names[1], home, False, False, "cp"),
    )
    return replace(
        load,
        exchanges=(*load.exchanges, *ring),
        forward_transient_bytes=load.forward_transient_bytes + 2 * own,
        backward_transient_bytes=load.backward_transient_bytes + 2 * own + 2 * wide,
    )


def _keys_and_values(cost: UnitCost, samples: float) -> float:
    """Bytes of a rank's keys and values: outputs of the last two among three or more layers, or
    pieces of one, that read the block's first tensor; else as wide as the block."""
    first = [layer for layer in cost.layers if layer.same_input == 0]
    if len(first) >= 3:
        return sum(layer.output_bytes.at(samples) for layer in first[-2:])
    if len(first) == 1 and len(first[0].pieces) >= 3:
        pieces = first[0].pieces
        return first[0].output_bytes.at(samples) * sum(pieces[-2:]) / sum(pieces)
    return 2 * cost.output_bytes.at(samples)


def expert_bytes(unit: UnitProfile, *, ep: int) -> float:
    """Bytes of a unit's experts that `ep` ranks can split: weights with an expert dimension."""
    return float(sum(s.nbytes * s.count for s in unit.shapes if _is_shared(unit, s, ep)))


def _is_shared(unit: UnitProfile, shape: ParameterShape, ep: int) -> bool:
    return len(shape.sizes) == 3 and shape.sizes[0] in unit.experts and shape.sizes[0] % ep == 0


def without_experts(unit: UnitProfile, *, ep: int, shards: int = 1) -> UnitProfile:
    """Return `unit` with a rank's part of its experts, for the optimizer step.

    The result is later divided by `shards`, so experts, which are not sharded, are multiplied by
    it.
    """
    spared = expert_bytes(unit, ep=ep) * (1 - shards / ep)
    if not unit.experts:
        return unit

    def part(shape: ParameterShape) -> ParameterShape:
        if not _is_shared(unit, shape, ep):
            return shape
        first, *rest = shape.sizes
        return shape.model_copy(update={"sizes": (first // ep * shards, *rest)})

    update = {
        "parameter_bytes": round(unit.parameter_bytes - spared),
        "gradient_bytes": round(unit.gradient_bytes - spared),
        "shapes": tuple(map(part, unit.shapes)),
    }
    return unit.model_copy(update=update)


def split_experts(unit: UnitProfile, *, tp: int) -> UnitProfile:
    """Return `unit` with every expert's matrices split over `tp` ranks, as other layers' are."""
    spared = expert_bytes(unit, ep=1) * (1 - 1 / tp)
    if not spared:
        return unit

    def part(shape: ParameterShape) -> ParameterShape:
        if not _is_shared(unit, shape, 1):
            return shape
        *rest, last = shape.sizes
        return shape.model_copy(update={"sizes": (*rest, ceil(last / tp))})

    return unit.model_copy(
        update={
            "parameter_bytes": round(unit.parameter_bytes - spared),
            "gradient_bytes": round(unit.gradient_bytes - spared),
            "shapes": tuple(map(part, unit.shapes)),
        }
    )


def over_experts(
    load: UnitLoad,
    unit: UnitProfile,
    *,
    ep: int,
    per_token: int | None,
    is_sharded: bool,
    shards: int = 0,
    element_bytes: int = 2,
    is_torch: bool = True,
    routed: float = 0.0,
) -> UnitLoad:
    """A block whose experts are split over `ep` ranks: the same compute, for tokens of all of them.

    FSDP2 shards them among ranks that have the same ones, so that each of all `shards` ranks keeps
    as large a share of them as of the rest, and gathers its part. Otherwise a rank's experts are
    unsharded, in addition to its shards.

    Args:
        per_token: experts that each token is sent to, where that is known.
        is_sharded: whether FSDP2 shards the rest.
        shards: number of ranks that shard experts; 0 if they are unsharded.
        element_bytes: of the tokens sent.
        is_torch: the engines' experts, not those of a stack with states of its own.
        routed: copies of tokens that a rank sends, where it says beforehand how many go to each
            rank, and for which expert each is (`engines.experts.token_dispatch`).
    """
    experts = expert_bytes(unit, ep=ep)
    if not experts:
        return load
    are_partial = load.partial_gradient_bytes >= experts
    spared = experts if is_sharded and not shards else experts * (1 - 1 / ep)
    unsharded = 0.0
    if is_sharded:  # a share of the rank's part is sharded like the rest of the block
        unsharded = experts * (1 - 1 / ep) / shards if shards else experts / ep
    each = per_token or EXPERTS_PER_TOKEN
    dispatched, combined = _dispatched_bytes(
        load, each, element_bytes, is_split=bool(are_partial and is_torch)
    )
    in_transit = dispatched + combined
    return replace(
        load,
        parameter_bytes=load.parameter_bytes - spared,
        gradient_bytes=load.gradient_bytes - spared,
        partial_gradient_bytes=load.partial_gradient_bytes - experts * are_partial,
        # In other stacks ranks of the tp axis hold different experts.
        partial_expert_bytes=experts / (shards or ep) * are_partial * is_torch,
        unsharded_bytes=unsharded,
        expert_bytes=0.0 if is_sharded and not shards else experts / ep,
        expert_tensors=sum(s.count for s in unit.shapes if _is_shared(unit, s, ep)),
        forward_transient_bytes=load.forward_transient_bytes + in_transit,
        backward_transient_bytes=load.backward_transient_bytes + in_transit,
        exchanges=(
            *load.exchanges,
            *_token_dispatch(dispatched, combined, each),
            *(_routing(ep, routed) if routed and is_torch else ()),
        ),
    )


def _dispatched_bytes(
    load: UnitLoad, per_token: int, element_bytes: int, *, is_split: bool
) -> tuple[float, float]:
    """Bytes of tokens sent to experts and back: as wide as the experts' inputs and outputs, which
    may be narrower than the block (latent experts); as the block if unknown. Of a block that is
    split by tokens, input or output may be whole."""
    grouped = [each for each in load.work.products if each.kind is ProductKind.GROUPED]
    if not grouped:
        width = min(load.input_bytes, load.output_bytes) if is_split else load.output_bytes
        return per_token * width, per_token * width
    first, last = grouped[0], grouped[-1]
    return (
        element_bytes * first.m * first.repeats * first.k,
        element_bytes * last.m * last.repeats * last.n,
    )


def _routing(ep: int, routed: float) -> Iterator[TensorExchange]:
    """Number of tokens for each rank, and of the expert of each token."""
    for purpose, count in (("tokens to each rank", ep), ("expert of each token", routed)):
        payload = float(NUMBER_BYTES * count)
        yield TensorExchange(Collective.ALL_TO_ALL, purpose, payload, True, True, "ep")


def _token_dispatch(dispatched: float, combined: float, per_token: int) -> Iterator[TensorExchange]:
    for purpose, payload in (("tokens to experts", dispatched), ("tokens from experts", combined)):
        for in_forward in (True, False):
            yield TensorExchange(
                Collective.ALL_TO_ALL, purpose, payload, in_forward, in_forward, "ep", per_token
            )
