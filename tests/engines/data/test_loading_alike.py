"""Loaders that draw, and what several ranks must load alike."""

from __future__ import annotations

import itertools
import logging
import random
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset, IterableDataset, default_collate

from engines.data.loader import ShardedLoader
from engines.data.replica_batches import OwnRandomness
from engines.parallel import ParallelModel
from profiles.errors import BatchError
from tests.engines.cases import Case
from tests.engines.parity import spread
from tests.workers import Pool

ROWS, LENGTH, WIDTH = 4, 12, 6
TP = "tp=2 tensor_styles=blocks.*.0:column,blocks.*.3:row"
PP = "pp=2 schedule=gpipe microbatches=2 stages=blocks.1"


class Dropping(nn.Module):
    """Draws in its layers: ranks of one model draw different amounts."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Linear(WIDTH, 8), nn.Tanh(), nn.Dropout(0.2), nn.Linear(8, WIDTH))
            for _ in range(2)
        )
        self.head = nn.Linear(WIDTH, 3)

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = x + block(x)
        logits: Tensor = self.head(x)
        return logits


def _batch(rows: int) -> tuple[Tensor, Tensor]:
    torch.manual_seed(rows)
    return torch.randn(rows, WIDTH), torch.randint(0, 3, (rows,))


CASE = Case(Dropping, _batch)


class Examples(Dataset[tuple[Tensor, int]]):
    """Row i has i as its first element, and random numbers where `noisy`."""

    def __init__(self, *, noisy: bool = True) -> None:
        self.noisy = noisy

    def __len__(self) -> int:
        return LENGTH

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        row = torch.rand(WIDTH) + random.random() if self.noisy else torch.zeros(WIDTH)
        row[0] = index
        return row, index % 3


class Shuffled(IterableDataset[tuple[Tensor, int]]):
    def __iter__(self) -> Iterator[tuple[Tensor, int]]:
        order = torch.randperm(LENGTH).tolist()
        random.shuffle(order)
        return iter([Examples()[index] for index in order])


def _mixed(rows: list[Any]) -> tuple[Tensor, Tensor]:
    """Mixes rows with others of their batch, inputs and targets alike."""
    x, y = default_collate(rows)
    share, other = torch.rand(()), torch.randperm(len(x))
    target = nn.functional.one_hot(y, 3).float()
    return share * x + (1 - share) * x[other], share * target + (1 - share) * target[other]


def _own_batches() -> Iterator[tuple[Tensor, Tensor]]:
    for _ in range(3):
        yield torch.randn(ROWS, WIDTH), torch.randint(0, 3, (ROWS,))


LOADERS: dict[str, Callable[[], Any]] = {
    "augmented": lambda: DataLoader(Examples(), batch_size=ROWS, shuffle=True),
    "mixed": lambda: DataLoader(Examples(), batch_size=ROWS, collate_fn=_mixed),
    "stream": lambda: DataLoader(Shuffled(), batch_size=ROWS),
    "generated": _own_batches,
}


def _trained(kind: str, plan: str) -> list[list[float]]:
    """The inputs of each step."""
    random.seed(7)
    _, parallel = spread(CASE, plan, rows=ROWS)
    seen = []
    loader = parallel.shard(LOADERS[kind]())
    for _ in range(1 if kind == "generated" else 2):
        for batch in loader:
            parallel.train_step(batch)
            seen.append(batch[0].flatten().tolist())
    return seen


@pytest.mark.dist
@pytest.mark.parametrize("kind", LOADERS)
@pytest.mark.parametrize("plan", [TP, PP])
def test_ranks_of_one_model_load_alike_whatever_their_layers_draw(
    pool: Pool, plan: str, kind: str
) -> None:
    first, second = pool.run(_trained, kind, plan, world_size=2)
    assert first == second
    assert len({tuple(rows) for rows in first}) == len(first)


@pytest.mark.parametrize("kind", ["augmented", "stream"])
@pytest.mark.parametrize("taken", [1, 3, 4])
def test_a_resumed_pass_loads_what_it_would_have_loaded(kind: str, taken: int) -> None:
    """Three batches a pass; after the third it has ended, or is about to."""

    def sharded() -> ShardedLoader:
        return ShardedLoader(LOADERS[kind](), replica=0, replicas=1, seed=5, draws=OwnRandomness())

    loader = sharded()
    undisturbed = []
    for _ in range(2):
        for batch in loader:
            undisturbed.append((batch[0].tolist(), loader.state_dict()))
            torch.rand(3)  # a step
    resumed = sharded()
    resumed.load_state_dict(undisturbed[taken - 1][1])
    torch.rand(5)
    rest = [batch[0].tolist() for _ in range(2) for batch in resumed]
    wanted = [rows for rows, _ in undisturbed[taken:]]
    assert rest[: len(wanted)] == wanted


@pytest.mark.parametrize("workers", [1, 2])
def test_workers_of_a_resumed_pass_draw_what_they_would_have_drawn(workers: int) -> None:
    def sharded() -> ShardedLoader:
        loader = DataLoader(Examples(), batch_size=2, shuffle=True, num_workers=workers)
        return ShardedLoader(loader, replica=0, replicas=1, seed=5)

    loader = sharded()
    undisturbed = []
    for batch in loader:
        undisturbed.append(batch[0].tolist())
        if len(undisturbed) == 3:
            state = loader.state_dict()
    resumed = sharded()
    resumed.load_state_dict(state)
    assert [batch[0].tolist() for batch in resumed] == undisturbed[3:]


def _fitted_in_parts(
    kind: str, plan: str, folder: str, steps: tuple[int, ...]
) -> dict[str, Tensor]:
    """The parameters after a training that ended after each of these steps, and was resumed."""
    for until in steps:
        random.seed(7)
        _, parallel = spread(CASE, plan, rows=ROWS)
        if until != steps[0]:  # the process that goes on has drawn other numbers by now
            random.random()
            torch.rand(7)
        parallel.fit(LOADERS[kind](), steps=until, save=folder)
    return parallel.state_dict()


@pytest.mark.dist
@pytest.mark.parametrize("kind", ["augmented", "stream"])
@pytest.mark.parametrize("plan", [TP, "dp_replicate=2"])
def test_a_training_that_was_resumed_has_loaded_the_same(
    pool: Pool, tmp_path: Path, plan: str, kind: str
) -> None:
    whole, *_ = pool.run(_fitted_in_parts, kind, plan, str(tmp_path / "whole"), (5,), world_size=2)
    parts, *_ = pool.run(
        _fitted_in_parts, kind, plan, str(tmp_path / "parts"), (1, 4, 5), world_size=2
    )
    assert all(torch.equal(parts[name], value) for name, value in whole.items())


def _stream_of_unequal_ranks() -> str:
    random.seed(dist.get_rank())  # as ranks are whose script seeds nothing
    _, parallel = spread(CASE, "dp_replicate=2", rows=2)
    loader = parallel.shard(DataLoader(Shuffled(), batch_size=ROWS))
    try:
        for batch in loader:
            parallel.train_step(batch)
    except BatchError as error:
        return str(error)
    return ""


@pytest.mark.dist
def test_streams_that_ranks_shuffle_unlike_are_refused_in_the_first_step(pool: Pool) -> None:
    for error in pool.run(_stream_of_unequal_ranks, world_size=2):
        assert "the loaders of ranks yield different global batches" in error
        assert "`random.seed`" in error


class Notes(logging.Handler):
    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.texts: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.texts.append(record.getMessage())


def _stream_that_comes_apart() -> list[str]:
    _, parallel = spread(CASE, "dp_replicate=2", rows=2)
    loader, notes = parallel.shard(DataLoader(Shuffled(), batch_size=ROWS)), Notes()
    logging.getLogger("engines.data.same_rows").addHandler(notes)
    random.seed(7)
    for _ in range(3):
        for batch in loader:
            parallel.train_step(batch)
        random.seed(dist.get_rank())
    logging.getLogger("engines.data.same_rows").removeHandler(notes)
    return notes.texts


@pytest.mark.dist
def test_streams_that_come_apart_later_are_warned_of_once(pool: Pool) -> None:
    (warning,), others = pool.run(_stream_that_comes_apart, world_size=2)
    assert "the loaders of ranks yield different global batches" in warning
    assert others == []


class Halving(DataLoader[Any]):
    """A loader of the user's own: says itself what a pass is."""

    def __iter__(self) -> Iterator[Any]:  # type: ignore[override]
        for x, y in super().__iter__():
            yield x / 2, y


class Endless(DataLoader[Any]):
    """Three batches a pass of an order that never ends, as loaders whose workers stay have."""

    def __len__(self) -> int:
        return 2

    def __iter__(self) -> Iterator[Any]:  # type: ignore[override]
        return itertools.islice(super().__iter__(), len(self))


@pytest.mark.parametrize("kind", [Halving, Endless])
def test_a_loader_that_says_what_a_pass_is_is_asked(kind: type[DataLoader[Any]]) -> None:
    wanted = [x[:, 0].tolist() for x, _ in kind(Examples(), batch_size=ROWS)]
    parts = []
    for replica in range(2):
        loader = ShardedLoader(
            kind(Examples(), batch_size=ROWS), replica=replica, replicas=2, seed=5
        )
        assert len(loader) == len(wanted)
        parts.append([x[:, 0].tolist() for x, _ in loader])
    assert [a + b for a, b in zip(*parts, strict=True)] == wanted


@pytest.mark.parametrize("place", [0, 1])
def test_a_pass_within_a_pass_leaves_the_outer_one_in_its_place(place: int) -> None:
    loader = ShardedLoader(
        DataLoader(Examples(noisy=False), batch_size=ROWS), replica=1, replicas=2, seed=5
    )
    outer, states = [], []
    for number, (x, _) in enumerate(loader):
        outer.append(x[:, 0].tolist())
        if number == place:
            assert len(list(loader)) == 3
        states.append(loader.state_dict()["batches"])
        assert loader.state_dict()["epoch"] == 0
    assert outer == [[2, 3], [6, 7], [10, 11]]
    assert states == [1, 2, 3]
    assert loader.epoch == 1


def _fitted(parallel: ParallelModel) -> int:
    loader = parallel.shard(DataLoader(Examples(), batch_size=ROWS))

    def look(step: int, loss: Tensor) -> None:
        for batch in loader:
            parallel.eval_step(batch)

    return parallel.fit(loader, epochs=2, on_step=look).steps


def test_an_evaluation_on_the_same_loader_takes_no_epoch_from_a_fit() -> None:
    _, parallel = spread(CASE, "dp_replicate=1", rows=ROWS)
    assert _fitted(parallel) == 2 * LENGTH // ROWS
