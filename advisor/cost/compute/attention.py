"""Fused attention on an accelerator: tiles of queries and keys, and what each of them costs.

A block of threads holds a tile of queries and walks along the keys. Tiles at the edges are computed
whole, the diagonal of a causal mask too, heads are padded to the widths that kernels are built for,
and before and after its walk a block loads its queries, writes its output and waits.
"""

from __future__ import annotations

from functools import lru_cache
from math import ceil

from advisor.cost.load.work import AttentionLoad
from profiles.machine.cluster import Device
from profiles.model.work import AttentionKernel

TILE = 64
"""Edge of the smallest tile, in queries and in keys (names of the kernels that ran on an H200)."""
WIDTHS_OF_HOPPER = (64, 128, 256)
STEP_OF_WIDTHS = 32
"""Head widths of cuDNN's kernels on Hopper, by the same names; of the second generation any
multiple (flash-attn, csrc/flash_attn: hdim32 to hdim256)."""
ENDS = {True: 140.0, False: 200.0}
"""Keys that a block could walk past in the time of its ends, forward and backward: cuDNN's kernels
for heads of 64 at 256 to 1,120 keys, by a profiler in steps on an H200. `make gpu` times them by
themselves (part b, attention) and by class in steps (part f)."""
DRAWS = {True: 33.0, False: 25.0}
"""Instructions to draw whether a score is dropped, by the same steps: GPT-2 XL and T5 drop some."""


def computed_share(
    call: AttentionLoad, device: Device, *, forward: bool, pace: float = 1.0
) -> float:
    """Share of a kernel's best rate that is left for the FLOP that count, 0 to 1.

    Args:
        pace: of a walk along the keys, over that of matrix units in 16 bits.
    """
    if not call.queries:
        return 1.0
    is_later = call.kernel is AttentionKernel.FLASH3 and device.is_hopper_or_later
    return _share(call.queries, call.keys, call.is_causal, pace * ENDS[forward]) * (
        call.width / padded_width(call.width, is_later=is_later)
    )


def padded_width(width: int, *, is_later: bool) -> int:
    """Width of the kernel that takes heads of `width`."""
    if is_later:
        return next((each for each in WIDTHS_OF_HOPPER if width <= each), width)
    return ceil(width / STEP_OF_WIDTHS) * STEP_OF_WIDTHS


def drawn(call: AttentionLoad, *, forward: bool) -> float:
    """Instructions for random numbers, over all lanes."""
    return call.scores * DRAWS[forward] if call.dropout else 0.0


@lru_cache(maxsize=4096)
def _share(queries: int, keys: int, is_causal: bool, ends: float) -> float:
    rows, columns = (ceil(count / TILE) * TILE for count in (queries, keys))
    walked, seen = float(columns), float(keys)
    if is_causal and queries == keys:
        # A tile of queries walks to its own last key.
        walked, seen = (columns + TILE) / 2, keys / 2
    return (queries * seen) / (rows * (walked + ends))
