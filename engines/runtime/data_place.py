"""Place of ranks in their data: a rank whose loader ended while others go on is named by it.

Lengths of loaders are compared before the first step; those of streams are known at their end.
"""

from __future__ import annotations

from contextlib import suppress

import torch.distributed as dist

from profiles.record import Record, json_object
from profiles.torch_compat import default_store, is_tcp

_ENDED = "advisor/data ended/"


class DataPlace(Record):
    """The batch that a rank took last.

    Attributes:
        loader: its number, in the order in which a rank made its own.
        passes: over it that were begun, this one included.
        batches: taken in this pass.
    """

    loader: int
    passes: int
    batches: int

    @property
    def key(self) -> str:
        """Of the store, where the first rank at the end of this pass says so."""
        return f"{_ENDED}{self.loader}/{self.passes}"


class DataEnd(Record):
    """The first end of a pass.

    Attributes:
        batches: that the pass had there.
        step: that the rank was in last; None before the first.
    """

    rank: int
    batches: int
    step: int | None

    def __str__(self) -> str:
        step = "before its first step" if self.step is None else f"after step {self.step}"
        return (
            f"the loader of rank {self.rank} ended {step}, with {self.batches} batches, and others"
            " have more: give every rank the same loader of global batches, which"
            " `parallel.shard` splits, or as many batches"
        )


def publish_end(place: DataPlace, *, step: int | None) -> None:
    """Tell the other ranks that this one is at the end of a pass."""
    if dist.is_initialized() and dist.get_world_size() > 1 and is_tcp(store := default_store()):
        end = DataEnd(rank=dist.get_rank(), batches=place.batches, step=step)
        with suppress(RuntimeError):  # the process that runs the store may be gone
            store.compare_set(place.key, "", end.model_dump_json())


def earlier_end(place: DataPlace | None, store: dist.Store | None = None) -> DataEnd | None:
    """The end of this pass on a rank that had fewer batches; None where there was none.

    Args:
        store: the connection to use, the default group's unless said.
    """
    if place is None:
        return None
    with suppress(RuntimeError):
        store = store or default_store()
        if store.check([place.key]):
            end = DataEnd.build(json_object(store.get(place.key).decode()))
            return end if end.batches < place.batches else None
    return None
