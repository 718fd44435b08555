"""Sharding of a data loader: the rows of the global batch that a replica sees."""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Iterable, Iterator, Sized
from contextlib import contextmanager
from typing import cast

import numpy as np
import torch
from torch.utils.data import (
    DataLoader,
    DistributedSampler,
    IterableDataset,
    Sampler,
    SequentialSampler,
)

from profiles.capture.batch import Batch, batch_size, split_rows
from profiles.errors import InputError


def split_rows_evenly(rows: int, replicas: int) -> list[int]:
    """The number of rows of each replica: as equal as possible, the first ones one more.

    >>> split_rows_evenly(10, 4)
    [3, 3, 2, 2]
    """
    return [rows // replicas + (replica < rows % replicas) for replica in range(replicas)]


class ShardedLoader:
    """A loader of global batches, seen by one replica: its rows of every batch.

    All replicas together see exactly what one process would see: every row once, none repeated or
    dropped, in batches of the same global size. The last batch may be uneven; a replica without a
    row in it gets a batch of zero rows, and `train_step` gives it no weight.

    A `DataLoader` over an indexed dataset is split by index, so a rank loads only its own rows;
    anything else that yields batches is split by row after loading. Shuffling draws the same order
    on every replica, another one each epoch: torch's, numpy's and Python's random numbers are
    seeded while the sampler draws, and put back. A loader that is already split by a
    `DistributedSampler` passes through, with its epoch set.

    Raises:
        InputError: a shuffled loader without automatic batches, whose order the ranks cannot share.
    """

    def __init__(self, loader: Iterable[Batch], *, replica: int, replicas: int, seed: int) -> None:
        self.replica, self.replicas = replica, replicas
        self.epoch = 0
        self._source = loader
        self._indices: _ReplicaBatches | None = None
        self._sampler: DistributedSampler[object] | None = None
        if not isinstance(loader, DataLoader) or isinstance(loader.dataset, IterableDataset):
            return
        inner = getattr(loader.batch_sampler, "sampler", loader.sampler)
        if isinstance(inner, DistributedSampler):
            self._sampler = inner
        elif loader.batch_sampler is not None:
            self._indices = _ReplicaBatches(loader.batch_sampler, replica, replicas, seed)
            # Its own randomness: the user's is not touched, and loading workers of different
            # replicas augment differently.
            own = torch.Generator().manual_seed(seed + replica)
            self._source = _with_batches(loader, self._indices, loader.generator or own)
        elif not isinstance(inner, SequentialSampler):
            raise InputError(
                "a DataLoader with batch_size=None and its own order cannot be split: ranks would"
                " draw different orders",
                hints=["give it a batch_size or a batch_sampler"],
            )

    def set_epoch(self, epoch: int) -> None:
        """Choose the shuffle of the next pass; without it each pass takes the next epoch."""
        self.epoch = epoch

    def __len__(self) -> int:
        return len(cast(Sized, self._source))

    def __iter__(self) -> Iterator[Batch]:
        epoch, self.epoch = self.epoch, self.epoch + 1
        if self._sampler is not None:
            self._sampler.set_epoch(epoch)
            yield from self._source
        elif self._indices is not None:
            self._indices.begin(epoch)
            for batch in self._source:
                has_rows = self._indices.rows.popleft()
                yield batch if has_rows else split_rows(batch, [0, batch_size(batch)])[0]
        else:
            for batch in self._source:
                parts = split_rows(batch, split_rows_evenly(batch_size(batch), self.replicas))
                yield parts[self.replica]


class _ReplicaBatches(Sampler[list[int]]):
    """The index lists of one replica, drawn as they are needed.

    `rows` holds how many real rows each drawn batch has that the loop has not taken yet: loading
    workers run ahead of it.
    """

    def __init__(
        self, batches: Iterable[list[int]], replica: int, replicas: int, seed: int
    ) -> None:
        self._batches, self._replica, self._replicas = batches, replica, replicas
        self._seed = seed
        self._epoch = 0
        self.rows: deque[int] = deque()

    def begin(self, epoch: int) -> None:
        self._epoch = epoch
        self.rows = deque()

    def __iter__(self) -> Iterator[list[int]]:
        rows = self.rows
        for batch in _seeded(self._batches, self._seed + self._epoch):
            sizes = split_rows_evenly(len(batch), self._replicas)
            first = sum(sizes[: self._replica])
            mine = batch[first : first + sizes[self._replica]]
            rows.append(len(mine))
            # An empty list cannot be collated: load one row, the loop cuts it off again.
            yield mine or batch[:1]

    def __len__(self) -> int:
        return len(cast(Sized, self._batches))


def _seeded(batches: Iterable[list[int]], seed: int) -> Iterator[list[int]]:
    """`batches` in an order that depends on `seed` alone, drawn as they go."""
    state = _RandomState.of_seed(seed)
    with state.installed():
        source = iter(batches)
    while True:
        with state.installed():
            try:
                batch = list(next(source))
            except StopIteration:
                return
        yield batch


class _RandomState:
    """Random states of torch, numpy and Python for a sampler, separate from the user's."""

    def __init__(self) -> None:
        self._torch = torch.get_rng_state()
        self._numpy = np.random.get_state()
        self._python = random.getstate()

    @classmethod
    def of_seed(cls, seed: int) -> _RandomState:
        users = cls()
        torch.random.default_generator.manual_seed(seed)
        np.random.seed(seed % 2**32)
        random.seed(seed)
        fresh = cls()
        users._install()
        return fresh

    @contextmanager
    def installed(self) -> Iterator[None]:
        users = _RandomState()
        self._install()
        try:
            yield
        finally:
            left_off = _RandomState()
            vars(self).update(vars(left_off))
            users._install()

    def _install(self) -> None:
        torch.set_rng_state(self._torch)
        np.random.set_state(self._numpy)
        random.setstate(self._python)


def _with_batches(
    loader: DataLoader[Batch], batches: _ReplicaBatches, generator: torch.Generator
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
