"""Sharding of a data loader: the rows of the global batch that a replica sees."""

from __future__ import annotations

import itertools
import logging
import os
from collections.abc import Iterable, Iterator, Sized
from dataclasses import dataclass, field
from itertools import islice
from typing import Any, cast

import torch
from torch.utils.data import (
    DataLoader,
    DistributedSampler,
    IterableDataset,
    SequentialSampler,
)

from engines.data.prefetch import CopiesAhead
from engines.data.replica_batches import (
    OwnRandomness,
    ReplicaBatches,
    iterates_itself,
    with_batches,
)
from engines.data.replica_batches import split_rows_evenly as split_rows_evenly
from engines.data.same_rows import fingerprint
from engines.plan import Plan
from engines.runtime.activity import activity
from engines.runtime.data_place import DataPlace
from engines.runtime.preflight import shared_memory, shm_free_bytes
from engines.runtime.random_states import random_states, restore_random_states
from engines.runtime.rank_agreement import Topic
from profiles.capture.batch.call import Batch
from profiles.capture.batch.dims import Dims
from profiles.capture.batch.rows import batch_size, split_rows
from profiles.capture.fakes.object_states import ObjectState, generator_states
from profiles.errors import BatchError, InputError, a_type
from profiles.model.profile import ModelProfile

log = logging.getLogger(__name__)

_numbers = itertools.count()
"""Of loaders: ranks make theirs in the same order."""


class ShardedLoader:
    """A loader of global batches, seen by one replica: its rows of every batch.

    All replicas together see exactly what one process would see: every row once, none repeated or
    dropped, in batches of the same global size. The last batch may be uneven; a replica without a
    row in it gets a batch of zero rows, and `train_step` gives it no weight.

    A `DataLoader` over an indexed dataset is split by index, so a rank loads only its own rows;
    anything else that yields batches is split by row after loading. Shuffling draws the same order
    on every replica, another one each epoch: torch's, numpy's and Python's random numbers are
    seeded while the sampler draws, and put back. A loader that is already split by a
    `DistributedSampler` passes through, with its epoch set. A class of the user's own that says
    what a pass is gives whole batches.

    A pass may begin while another is under way, of an evaluation say: each goes on in its place.

    Args:
        dims: of the batches, where they are known; see `profiles.capture.batch.dims`.
        copies: to the device, begun one batch ahead where workers load and pin the batches.
        draws: random numbers of loading in this process, where several ranks make up a replica:
            they load the same rows, whatever each has drawn in its layers.

    Attributes:
        print: of the whole batch that was handed out last, where every rank read all of it.

    Raises:
        InputError: nothing that yields batches, or a shuffled loader without automatic batches,
            whose order the ranks cannot share.
    """

    def __init__(
        self,
        loader: Iterable[Batch],
        *,
        replica: int,
        replicas: int,
        seed: int,
        dims: Dims | None = None,
        copies: CopiesAhead | None = None,
        draws: OwnRandomness | None = None,
    ) -> None:
        if not isinstance(loader, Iterable):
            raise InputError(
                f"{a_type(loader)} yields no batches",
                where="parallel.shard",
                hints=["give a DataLoader, or anything that yields global batches"],
            )
        self.replica, self.replicas = replica, replicas
        self._number, self._passes = next(_numbers), 0
        self._dims = dims or None
        self._copies, self._draws = copies, draws
        self.print = 0
        self.epoch = 0
        self._source = loader
        self._indices: ReplicaBatches | None = None
        self._sampler: DistributedSampler[object] | None = None
        self._generator: torch.Generator | None = None
        self._samplers: list[object] = []
        self._pass = _Pass()
        self._resumed: _Pass | None = None
        if not isinstance(loader, DataLoader) or isinstance(loader.dataset, IterableDataset):
            return
        inner = getattr(loader.batch_sampler, "sampler", loader.sampler)
        if isinstance(inner, DistributedSampler):
            self._sampler = inner
        elif iterates_itself(loader):
            pass
        elif loader.batch_sampler is not None:
            self._indices = ReplicaBatches(loader.batch_sampler, replica, replicas, seed)
            # Its own randomness: the user's is not touched, and loading workers of different
            # replicas augment differently.
            self._generator = loader.generator or torch.Generator().manual_seed(seed + replica)
            self._source = with_batches(loader, self._indices, self._generator)
            self._samplers = [loader.batch_sampler, inner]
        elif not isinstance(inner, SequentialSampler):
            raise InputError(
                "a DataLoader with batch_size=None and its own order cannot be split: ranks would"
                " draw different orders",
                hints=["give it a batch_size or a batch_sampler"],
            )

    def warn_of_shared_memory(self, profile: ModelProfile) -> None:
        """Log it where /dev/shm is too small for what the loading workers hand over."""
        source = self._source
        if not isinstance(source, DataLoader) or not source.num_workers:
            return
        rows = source.batch_size or self._rows_of_a_batch()
        risks = shared_memory(
            free_bytes=shm_free_bytes(),
            workers=source.num_workers,
            prefetch=source.prefetch_factor or 1,
            batch_bytes=profile.batch_bytes.at(rows),
            ranks=int(os.environ.get("LOCAL_WORLD_SIZE", "1")),
        )
        for risk in risks:
            log.warning("%s", risk)

    def _rows_of_a_batch(self) -> int:
        """Rows of this replica's batch, of a loader that was split by index; 0 if not known."""
        size = getattr(self._indices.batches, "batch_size", 0) if self._indices else 0
        return -(-size // self.replicas)

    def set_epoch(self, epoch: int) -> None:
        """Choose the shuffle of the next pass; without it each pass takes the next epoch."""
        if self._resumed is not None and self._resumed.epoch != epoch:
            self._resumed = None
        self.epoch = epoch

    def __len__(self) -> int:
        return len(cast(Sized, self._source))

    @property
    def length(self) -> int | None:
        """Batches of a pass; None of a stream that does not say it."""
        try:
            return len(self)
        except TypeError:  # a DataLoader has `__len__` even if its dataset has none
            return None

    @property
    def is_in_pass(self) -> bool:
        """True if a pass has begun and not ended."""
        return self._pass.random is not None

    def __iter__(self) -> Iterator[Batch]:
        resumed, self._resumed = self._resumed, None
        around = self._pass if self._pass.is_under_way else None
        of = resumed or _Pass(self.epoch, 0, self._states(), *self._drawn())
        if resumed is not None:
            self._draw_from(resumed)
        self._take(of)
        batches = self._batches(of)
        if self._draws is not None:
            batches = self._draws.each(batches)
        if resumed is not None and not self._is_stateful:
            self._skip(batches, resumed)
        if self._copies is not None and self._copies.is_on and self._loads_aside:
            batches = self._copies.ahead(batches)
        try:
            for batch in batches:
                self._take_again(of)
                of.batches += 1
                self._note_place()
                yield batch
            self._take_again(of)
            self._note_place()  # another loader may have been read meanwhile
            activity.end_pass()
            self._pass = _Pass(epoch=self.epoch)
        finally:
            of.is_under_way = False
            if around is not None and around.is_under_way:
                self._pass, around.is_under_way = around, False  # until it goes on

    def _take(self, of: _Pass) -> None:
        """Let `of` be the pass that is under way."""
        self._pass, of.is_under_way = of, True
        self.epoch = of.epoch + 1
        self._passes += 1
        self._note_place()

    def _take_again(self, of: _Pass) -> None:
        """`_take` it where another pass was made meanwhile."""
        if not of.is_under_way or self._pass is not of:
            self._take(of)

    def _skip(self, batches: Iterator[Batch], resumed: _Pass) -> None:
        """Read what a resumed pass has had. Its randomness is that of the pass's start; the
        training's goes on as it was loaded."""
        users = random_states()
        drawn = self._draws.states if self._draws is not None else None
        restore_random_states(resumed.random or users)
        if self._draws is not None:
            self._draws.states = resumed.random if self._to_read(resumed.batches) else drawn
        for _ in islice(batches, self._to_read(resumed.batches)):
            pass
        restore_random_states(users)
        if self._draws is not None:
            self._draws.states = drawn or self._draws.states

    def _states(self) -> dict[str, Any]:
        """The random states that loading has by now."""
        return (self._draws and self._draws.states) or random_states()

    def _note_place(self) -> None:
        activity.data = DataPlace(
            loader=self._number, passes=self._passes, batches=self._pass.batches
        )

    def _drawn(self) -> tuple[torch.Tensor | None, list[Any]]:
        """States of the loader's generator, and of its samplers', by now."""
        generator = self._generator.get_state() if self._generator is not None else None
        return generator, [state.part for state in self._of_samplers()]

    def _draw_from(self, start: _Pass) -> None:
        if self._generator is not None and start.generator is not None:
            self._generator.set_state(start.generator)
        for state, part in zip(self._of_samplers(), start.samplers, strict=False):
            state.put(part)

    def _of_samplers(self) -> list[ObjectState]:
        return [
            state
            for each in self._samplers
            for state in generator_states(getattr(each, "__dict__", {}))
        ]

    def state_dict(self) -> dict[str, Any]:
        """The place in the data: of the next batch of this pass, for a resumed training."""
        of = self._pass
        generator, samplers = (of.generator, of.samplers) if of.random else self._drawn()
        state: dict[str, Any] = {
            "epoch": of.epoch if of.random else self.epoch,
            "batches": of.batches,
            "random": of.random,
            "generator": generator,
            "samplers": samplers,
        }
        if self._draws is not None:
            state["drawn"] = self._draws.states
        if self._is_stateful:
            state["source"] = cast(Any, self._source).state_dict()
        return state

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Let the next pass go on where `state_dict` was taken, in the same order.

        Index lists are skipped without loading rows; a source that is no indexed dataset is read up
        to there, unless it has a `load_state_dict` of its own.
        """
        self.epoch = state["epoch"]
        self._resumed = None
        if self._draws is not None and state.get("drawn") is not None:  # earlier saves have none
            self._draws.states = state["drawn"]
        at = _Pass(self.epoch, state["batches"], state["random"], state["generator"])
        at.samplers = state.get("samplers", [])  # earlier saves have none
        if at.random is not None:
            self._resumed = at
        else:
            self._draw_from(at)
        if self._is_stateful and "source" in state:
            cast(Any, self._source).load_state_dict(state["source"])

    @property
    def _is_stateful(self) -> bool:
        """True if the source knows its own place, as torchdata's StatefulDataLoader does."""
        return self._indices is None and hasattr(self._source, "load_state_dict")

    @property
    def _loads_aside(self) -> bool:
        """True if a batch may be fetched early: workers load it, so that no random number of this
        process is drawn for it, it is pinned, and its place in the data is counted here."""
        source = self._source
        if not isinstance(source, DataLoader) or self._is_stateful:
            return False
        return source.num_workers > 0 and source.pin_memory

    def _to_read(self, batches: int) -> int:
        """Batches to read and drop: none where index lists are skipped."""
        return 0 if self._indices is not None else batches

    def _batches(self, of: _Pass) -> Iterator[Batch]:
        if self._sampler is not None:
            self._sampler.set_epoch(of.epoch)
            yield from self._source
        elif self._indices is not None:
            drawn = self._indices.begin(of.epoch, skip=of.batches)
            for batch in self._source:
                has_rows = drawn.popleft()
                yield batch if has_rows else self._rows(batch, [0, 1])[0]
        else:
            for batch in self._source:
                self.print = fingerprint(batch) if self.replicas > 1 else 0
                rows = split_rows_evenly(batch_size(batch, self._dims), self.replicas)
                yield self._rows(batch, rows)[self.replica]

    def _rows(self, batch: Batch, sizes: list[int]) -> list[Batch]:
        return split_rows(batch, sizes, self._dims)

    def require_room(self, plan: Plan) -> None:
        """Require that the plan holds the batches that the loader says it yields.

        Raises:
            BatchError: they have more rows than its global batch.
        """
        source = self._source if isinstance(self._source, DataLoader) else None
        batches = self._indices.batches if self._indices else getattr(source, "batch_sampler", None)
        rows, most = getattr(batches, "batch_size", None), plan.global_batch_size
        if type(rows) is not int or most is None:
            return
        rows *= self.replicas if self._sampler is not None else 1
        if rows > most:
            raise BatchError(
                f"the loader yields {rows} rows, the plan's global batch has {most}",
                where=f"plan: {plan}",
                hints=[f"plan for it: `auto_parallelize(..., global_batch_size={rows})`"],
            )


@dataclass(slots=True)
class _Pass:
    """One pass over the data: its epoch, the batches handed out, and the random states and those
    of the generators of the loader and its samplers when it began."""

    epoch: int = 0
    batches: int = 0
    random: dict[str, Any] | None = None
    generator: torch.Tensor | None = None
    samplers: list[Any] = field(default_factory=list)
    is_under_way: bool = False


def length_topic(loaders: Iterable[ShardedLoader]) -> Topic:
    """Batches of each loader: ranks that leave an epoch at different steps wait for each other."""
    lengths = [loader.length for loader in loaders]
    return Topic(
        "length of the loader",
        {"in batches": ["unknown" if length is None else str(length) for length in lengths]},
        "give every rank the same loader of global batches, which `parallel.shard` splits; or the"
        " same number of batches of its own: DistributedSampler(..., drop_last=True)",
    )
