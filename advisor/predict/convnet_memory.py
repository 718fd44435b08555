"""Bytes of convolutional networks: states, what the backward needs, what is in work."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

from advisor.predict.convnet_constants import FITTED, ConvnetConstants
from advisor.predict.convnet_step import cut
from advisor.predict.setup import Setup
from profiles.convnets.layers import Block, Network

# Authors who leave a batch out of their table took what fits: the rule for blank cells.
FILLED_SHARE = 0.9


@dataclass(frozen=True, slots=True, kw_only=True)
class ConvnetMemory:
    """The fullest device.

    Attributes:
        allocated_bytes: tensors at the fullest moment, as `torch.cuda.max_memory_allocated` counts.
        reserved_bytes: of the card, as `nvidia-smi` shows: caches and the context too.
        fits: what is needed, caches given back, is no more than the card has.
    """

    allocated_bytes: float
    reserved_bytes: float
    fits: bool


def convnet_memory(setup: Setup, constants: ConvnetConstants = FITTED) -> ConvnetMemory:
    """Of `setup.network`.

    Raises:
        ValueError: the setup is of a transformer.
    """
    if setup.network is None:
        raise ValueError("only networks of convolutions are counted here")
    blocks, stages = setup.network.blocks, setup.layout.pp
    bounds = cut([block.forward_flop + 1.0 for block in blocks], stages)
    capacity = setup.cluster.device.memory_bytes.value
    allocated = _fullest(setup, blocks, bounds)
    if stages > 1 and allocated + constants.context_bytes > capacity:
        # Who runs out of memory moves the borders.
        each = setup.layout.microbatch * _element(setup)
        held = [_states(setup, block.parameters) + each * block.kept for block in blocks]
        bounds = cut(held, stages)
        allocated = min(allocated, _fullest(setup, blocks, bounds))
    needed = allocated + constants.context_bytes
    reserved = allocated * (1 + constants.cache_share) + constants.context_bytes
    return ConvnetMemory(
        allocated_bytes=allocated,
        # Before the allocator fails it gives back what it only caches.
        reserved_bytes=max(needed, min(reserved, capacity)),
        fits=needed <= capacity,
    )


def filled(setup: Setup, constants: ConvnetConstants = FITTED) -> Setup:
    """The setup with the largest microbatch that leaves a tenth of the memory free; at least 1."""
    room = FILLED_SHARE * setup.cluster.device.memory_bytes.value

    def takes(samples: int) -> float:
        layout = replace(setup.layout, microbatch=samples)
        found = convnet_memory(replace(setup, layout=layout), constants)
        return found.allocated_bytes + constants.context_bytes

    low, high = 1, 2
    while takes(high) <= room:
        low, high = high, 2 * high
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if takes(middle) <= room else (low, middle)
    return replace(setup, layout=replace(setup.layout, microbatch=low), filled=True)


def least_allocated(setup: Setup, constants: ConvnetConstants = FITTED) -> float:
    """What the setup allocates at least: one sample at once where its batch was only assumed."""
    if setup.filled:
        setup = replace(setup, layout=replace(setup.layout, microbatch=1))
    return convnet_memory(setup, constants).allocated_bytes


def _fullest(setup: Setup, blocks: Sequence[Block], bounds: Sequence[int]) -> float:
    return max(_allocated(setup, blocks[low:high]) for low, high in pairwise(bounds))


def _allocated(setup: Setup, blocks: Sequence[Block]) -> float:
    """Bytes of a device that holds these blocks, in its backward.

    GPipe keeps a stage's input for each microbatch and computes the stage again, one at a time;
    without recompute it keeps everything of all microbatches.
    """
    software, layout = setup.software, setup.layout
    kept = float(sum(block.kept for block in blocks))
    in_flight = layout.accumulation if layout.pp > 1 else 1
    if software.recompute == "full":
        waiting = float(in_flight * blocks[0].input_elements)
    else:
        waiting = (in_flight - 1) * kept
    # Backward goes from the last block to the first and lets go of what each kept. In work are the
    # gradients of a block's widest map, on both ways around it.
    fullest = 0.0
    for block in reversed(blocks):
        fullest = max(fullest, kept + 2 * max(layer.outputs for layer in block.layers))
        kept -= block.kept
    states = _states(setup, sum(block.parameters for block in blocks))
    maps = layout.microbatch * _element(setup) * (waiting + fullest)
    return states + maps + _batch_bytes(setup)


def _states(setup: Setup, parameters: float) -> float:
    """Weights, gradients, optimizer states, DDP's buckets and autocast's copies."""
    software, element = setup.software, _element(setup)
    each = software.weight_bytes + software.gradient_bytes
    each += software.master_bytes + software.moment_bytes
    each += software.reduce_bytes if setup.layout.dp > 1 else 0.0
    each += element if element < software.weight_bytes else 0.0
    return parameters * each


def _element(setup: Setup) -> int:
    """Bytes of an element of a map."""
    return 2 if setup.dtype in ("float16", "bfloat16") else 4


def _batch_bytes(setup: Setup) -> float:
    """The images, in fp32, and those that are fetched ahead."""
    assert isinstance(setup.network, Network)
    return 2 * 4 * 3 * setup.network.pixels**2 * setup.layout.microbatch
