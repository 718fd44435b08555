"""Which rows of the global batch a replica sees."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sized
from typing import cast

import torch
from torch.utils.data import DataLoader, DistributedSampler, IterableDataset, Sampler

from profiles.batch import Batch, batch_size, split_rows


def shares(rows: int, replicas: int) -> list[int]:
    """How many of `rows` each replica takes: as equal as can be, the first ones one more.

    >>> shares(10, 4)
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
    on every replica, another one each epoch. A loader that is already split by a
    `DistributedSampler` passes through, with its epoch set.
    """

    def __init__(self, loader: Iterable[Batch], *, replica: int, replicas: int, seed: int) -> None:
        self.replica, self.replicas = replica, replicas
        self.epoch = 0
        self._source = loader
        self._indices: _ReplicaBatches | None = None
        self._sampler: DistributedSampler[object] | None = None
        if isinstance(loader, DataLoader):
            if isinstance(loader.sampler, DistributedSampler):
                self._sampler = loader.sampler
            elif loader.batch_sampler is not None and not isinstance(
                loader.dataset, IterableDataset
            ):
                self._indices = _ReplicaBatches(loader.batch_sampler, replica, replicas, seed)
                # Its own randomness: the user's is not touched, and loading workers of different
                # replicas augment differently.
                own = torch.Generator().manual_seed(seed + replica)
                self._source = _with_batches(loader, self._indices, loader.generator or own)

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
            rows = self._indices.draw(epoch)
            for batch, count in zip(self._source, rows, strict=True):
                yield batch if count else split_rows(batch, [0, batch_size(batch)])[0]
        else:
            for batch in self._source:
                parts = split_rows(batch, shares(batch_size(batch), self.replicas))
                yield parts[self.replica]


class _ReplicaBatches(Sampler[list[int]]):
    """The index lists of one replica, drawn for an epoch at a time."""

    def __init__(
        self, batches: Iterable[list[int]], replica: int, replicas: int, seed: int
    ) -> None:
        self._batches, self._replica, self._replicas = batches, replica, replicas
        self._seed = seed
        self._drawn: list[list[int]] = []

    def draw(self, epoch: int) -> list[int]:
        """Draw an epoch; how many real rows each batch has for this replica."""
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(self._seed + epoch)
            whole = [list(batch) for batch in self._batches]
        rows = []
        self._drawn = []
        for batch in whole:
            sizes = shares(len(batch), self._replicas)
            first = sum(sizes[: self._replica])
            mine = batch[first : first + sizes[self._replica]]
            rows.append(len(mine))
            # An empty list cannot be collated: load one row, the caller cuts it off again.
            self._drawn.append(mine or batch[:1])
        return rows

    def __iter__(self) -> Iterator[list[int]]:
        return iter(self._drawn)

    def __len__(self) -> int:
        return len(cast(Sized, self._batches))


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
