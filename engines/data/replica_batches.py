"""Index lists of a replica, and random numbers that loading has for itself."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator, Sized
from contextlib import contextmanager
from itertools import islice
from typing import Any, cast

import numpy as np
import torch
from torch.utils.data import DataLoader, Sampler, get_worker_info

from engines.runtime.random_states import random_states, restore_random_states, seed_all
from profiles.capture.batch.call import Batch

_OF_TORCH = ("torch", "torchdata")


def split_rows_evenly(rows: int, replicas: int) -> list[int]:
    """The number of rows of each replica: as equal as possible, the first ones one more.

    >>> split_rows_evenly(10, 4)
    [3, 3, 2, 2]
    """
    return [rows // replicas + (replica < rows % replicas) for replica in range(replicas)]


class SeededRows(list[int]):
    """Rows that a loading worker draws for with numbers of their own, transforms say: the same ones
    in a pass that was resumed, whatever the worker has loaded before."""

    seed: tuple[int, ...] = ()

    def __iter__(self) -> Iterator[int]:
        if self.seed and get_worker_info() is not None:
            seed_all(int(np.random.SeedSequence(self.seed).generate_state(1, np.uint64)[0] >> 1))
        return super().__iter__()


class ReplicaBatches(Sampler[list[int]]):
    """The index lists of one replica, drawn as they are needed."""

    def __init__(
        self, batches: Iterable[list[int]], replica: int, replicas: int, seed: int
    ) -> None:
        self.batches, self._replica, self._replicas = batches, replica, replicas
        self._seed = seed
        self._epoch = self._skip = 0
        self._rows: deque[int] = deque()

    def begin(self, epoch: int, *, skip: int = 0) -> deque[int]:
        """Draw those of `epoch` in the pass that is begun next, without the first `skip`.

        Returns how many real rows each drawn batch has that the loop has not taken yet: loading
        workers run ahead of it.
        """
        self._epoch, self._skip = epoch, skip
        self._rows = deque()
        return self._rows

    def __iter__(self) -> Iterator[list[int]]:
        rows, seed = self._rows, self._seed + self._epoch
        every = enumerate(_seeded(self.batches, seed))
        for number, batch in islice(every, self._skip, None):
            sizes = split_rows_evenly(len(batch), self._replicas)
            first = sum(sizes[: self._replica])
            mine = batch[first : first + sizes[self._replica]]
            rows.append(len(mine))
            # An empty list cannot be collated: load one row, the loop cuts it off again.
            loaded = SeededRows(mine or batch[:1])
            loaded.seed = (seed % 2**64, self._replica, number)
            yield loaded

    def __len__(self) -> int:
        return len(cast(Sized, self.batches))


class OwnRandomness:
    """Random states of loading, apart from the model's: they begin at a seed, or where those of the
    process are when they are first used."""

    def __init__(self, seed: int | None = None) -> None:
        self.states: dict[str, Any] | None = None
        if seed is not None:
            users = random_states()
            seed_all(seed)
            self.states = random_states()
            restore_random_states(users)

    @contextmanager
    def installed(self) -> Iterator[None]:
        users = random_states()
        restore_random_states(self.states or users)
        try:
            yield
        finally:
            self.states = random_states()
            restore_random_states(users)

    def each(self, batches: Iterable[Any]) -> Iterator[Any]:
        """`batches`, each drawn with these."""
        with self.installed():
            source = iter(batches)
        while True:
            with self.installed():
                try:
                    batch = next(source)
                except StopIteration:
                    return
            yield batch


def _seeded(batches: Iterable[list[int]], seed: int) -> Iterator[list[int]]:
    """`batches` in an order that depends on `seed` alone, drawn as they go."""
    return map(list, OwnRandomness(seed).each(batches))


def iterates_itself(loader: DataLoader[Batch]) -> bool:
    """True if a class of the user's own says what a pass over the loader is: other batches than
    its index lists make, or fewer."""
    kinds = (kind for kind in type(loader).__mro__ if kind is not object)
    own = [kind for kind in kinds if kind.__module__.partition(".")[0] not in _OF_TORCH]
    return any("__iter__" in vars(kind) or "__len__" in vars(kind) for kind in own)


def with_batches(
    loader: DataLoader[Batch], batches: ReplicaBatches, generator: torch.Generator
) -> DataLoader[Batch]:
    """The same loader with other index lists."""
    return DataLoader(
        loader.dataset,
        batch_sampler=batches,
        num_workers=loader.num_workers,
        collate_fn=loader.collate_fn,
        pin_memory=loader.pin_memory,
        timeout=loader.timeout,
        worker_init_fn=loader.worker_init_fn,
        multiprocessing_context=loader.multiprocessing_context,
        generator=generator,
        prefetch_factor=loader.prefetch_factor,
        persistent_workers=loader.persistent_workers,
    )
