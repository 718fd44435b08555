"""Heartbeats of the ranks in the rendezvous store, which tell which rank died.

A rank that dies closes its connections, but what the others see is "connection closed" or nothing
at all; the hearts tell which rank it was. They beat from threads of their own with connections of
their own, so a rank that waits for another one is still heard.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from datetime import timedelta

import torch.distributed as dist

from profiles.torch_compat import second_line

BEAT_S = 0.5
# A rank is silent that missed four beats: a busy machine delays one or two.
SILENT_S = 2.0
# An answer from the store, when its host may be gone.
STORE_PATIENCE_S = 5.0
LEFT = b"left"  # in place of a count, once a rank has ended its part by itself


@dataclass(frozen=True, slots=True)
class Absent:
    """Ranks that do not beat any more: those that fell silent, and those that left."""

    silent: list[int]
    left: list[int]


@contextmanager
def beating(store: dist.Store, key: str, rank: int) -> Iterator[None]:
    """Let this rank be heard under `key` while the body runs."""
    line = second_line(store)
    line.set_timeout(timedelta(seconds=STORE_PATIENCE_S))
    line.set(f"{key}/{rank}", "0")
    is_over = threading.Event()

    def beat() -> None:
        count = 0
        while not is_over.wait(BEAT_S):
            count += 1
            try:
                line.set(f"{key}/{rank}", str(count))
            except (dist.DistError, RuntimeError):
                return  # the store's host is gone: nobody listens

    heart = threading.Thread(target=beat, name="bench heart", daemon=True)
    heart.start()
    try:
        yield
    finally:
        is_over.set()
        heart.join()
        with suppress(dist.DistError, RuntimeError):
            line.set(f"{key}/{rank}", LEFT.decode())


def absent_ranks(store: dist.Store, key: str, ranks: int) -> Absent | None:
    """The ranks whose hearts do not beat; None where the store itself does not answer."""
    try:
        line = second_line(store)
        line.set_timeout(timedelta(seconds=STORE_PATIENCE_S))
        before = _beats(line, key, ranks)
        time.sleep(SILENT_S)
        after = _beats(line, key, ranks)
    except (dist.DistError, RuntimeError):
        return None
    still = [rank for rank in range(ranks) if before[rank] == after[rank]]
    return Absent(
        silent=[rank for rank in still if after[rank] != LEFT],
        left=[rank for rank in still if after[rank] == LEFT],
    )


def _beats(line: dist.Store, key: str, ranks: int) -> list[bytes | None]:
    keys = [f"{key}/{rank}" for rank in range(ranks)]
    return [line.get(name) if line.check([name]) else None for name in keys]
