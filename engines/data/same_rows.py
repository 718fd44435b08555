"""Rows that ranks must have alike: those of one replica, and global batches that all read whole.

Ranks send a print of what they have with their counts, as a number and its square.
"""

from __future__ import annotations

import logging
import zlib
from collections.abc import Iterable
from typing import Protocol

import torch

from engines.plan import Plan
from engines.runtime.world import World
from profiles.capture.batch.call import Batch
from profiles.capture.batch.tree import batch_tensors, describe
from profiles.errors import BatchError

log = logging.getLogger(__name__)

FINGERPRINT_ELEMENTS = 2**14  # of a tensor; batches that differ do so in every row


class Read(Protocol):
    """A loader; `print`: of the batch that it read whole last, 0 where it read a part."""

    print: int


def fingerprint(batch: Batch) -> int:
    """20 bits of the rows: shapes, and the first bytes of every tensor that the host has."""
    checksum = zlib.crc32(describe(batch).encode())
    for tensor in batch_tensors(batch):
        if tensor.device.type == "cpu":  # of others it would wait for the device in every step
            values = tensor.values() if tensor.is_nested else tensor
            first = values.detach().reshape(-1)[:FINGERPRINT_ELEMENTS].contiguous()
            checksum = zlib.crc32(first.view(torch.uint8).numpy().tobytes(), checksum)
    return checksum % 2**20


def are_equal(total: float, squares: float, *, count: int) -> bool:
    """True if `count` numbers with this sum and sum of squares are equal.

    They are if and only if the square of their sum is their count times the sum of their squares
    (Cauchy-Schwarz). The sums are integers below 2**53, so they are exact.
    """
    return int(total) ** 2 == count * int(squares)


def print_of_whole(loaders: Iterable[Read]) -> list[float]:
    """A print of the global batches that these have read since the last step, and its square."""
    own = 0
    for loader in loaders:
        own, loader.print = (own + loader.print) % 2**20, 0
    return [float(own), float(own) ** 2]


def report_other_whole(world: World, plan: Plan, *, is_first: bool) -> None:
    """Say that ranks took their rows out of global batches that differ: by an error in the first
    step, and by a warning where streams come apart later, at the end of the shorter one say.

    Raises:
        BatchError: it is the first step.
    """
    what = (
        "the loaders of ranks yield different global batches: of the rows that each rank takes out"
        " of its own, some would be trained on twice, and others never"
    )
    hints = [
        "seed alike on every rank what shuffles (`random.seed`, `numpy.random.seed`,"
        " `torch.manual_seed`), or give it a generator of its own with one seed",
        "or give a DataLoader over an indexed dataset: its order is the same on all ranks",
    ]
    if is_first:
        raise BatchError(what, where=f"rank {world.rank}, plan: {plan}", hints=hints)
    if world.rank == 0:
        log.warning("%s. %s", what, hints[0])
