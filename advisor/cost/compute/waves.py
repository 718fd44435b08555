"""Wave quantization: distribution of a product's tiles over multiprocessors.

A kernel computes one tile of the result on each multiprocessor at a time. Tiles at the edges are
computed whole, and the last wave leaves multiprocessors idle (NVIDIA, Matrix Multiplication
Background User's Guide, tile and wave quantization).
"""

from __future__ import annotations

from functools import lru_cache
from math import ceil

from advisor.cost.load.work import ProductLoad
from profiles.machine.catalogue import multiprocessors
from profiles.machine.cluster import Device
from profiles.model.work import ProductKind

# Library tiles, with their relative rates: smaller ones read more per multiplication (the same
# guide, figure 6: 64 x 64 at about two thirds).
TILES = ((256, 128, 1.0), (128, 256, 1.0), (128, 128, 0.9), (128, 64, 0.75), (64, 64, 0.65))


def wave_share(device: Device, product: ProductLoad, *, forward: bool) -> float | None:
    """Rate of a product relative to one whose tiles fill every wave, up to 1.

    None for devices whose multiprocessors are unknown.

    A backward has two: (m, k), and (k, n), whose sums are over rows: long ones, which libraries
    split where tiles are few.
    """
    count = multiprocessors(device.name)
    if count is None:
        return None
    # Products of experts and of heads are one kernel.
    batch = 1.0 if product.kind is ProductKind.LINEAR else product.repeats
    columns = product.n if forward else product.k
    share = _share(product.m, columns, batch, count)
    return share if forward else 2 / (1 / share + 1)


@lru_cache(maxsize=65536)
def _share(rows: float, columns: float, batch: float, multiprocessors: int) -> float:
    best = 0.0
    for height, width, rate in TILES:
        tiles = batch * ceil(rows / height) * ceil(columns / width)
        # Fewer tiles than multiprocessors: split-k.
        split = max(1, multiprocessors // ceil(tiles))
        waves = ceil(tiles * split / multiprocessors)
        room = waves * multiprocessors * height * width / split
        best = max(best, rate * batch * rows * columns / room)
    return best
