"""`shard` splits global batches so that all replicas together see what one process would see."""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable, Iterator

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    Dataset,
    DistributedSampler,
    IterableDataset,
    RandomSampler,
    Sampler,
    TensorDataset,
)

from engines.data.loader import ShardedLoader, split_rows_evenly
from profiles.errors import InputError
from tests.engines.cases import CASES
from tests.engines.parity import parallelize, reference_loss, relative
from tests.workers import Pool


class Rows(Dataset[Tensor]):
    """Row i is the number i; remembers which rows were loaded."""

    def __init__(self, length: int) -> None:
        self.length = length
        self.loaded: list[int] = []

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> Tensor:
        self.loaded.append(index)
        return torch.tensor([index])


class Stream(IterableDataset[Tensor]):
    def __iter__(self):  # type: ignore[no-untyped-def]
        return iter(torch.arange(11).view(-1, 1))


def epochs(loader: object, replica: int, replicas: int, count: int = 1) -> list[list[list[int]]]:
    sharded = ShardedLoader(loader, replica=replica, replicas=replicas, seed=5)  # type: ignore[arg-type]
    return [[batch.flatten().tolist() for batch in sharded] for _ in range(count)]


@pytest.mark.parametrize("replicas", [1, 2, 3, 4])
@pytest.mark.parametrize("length", [8, 10, 11, 13])
def test_replicas_together_see_every_row_once_in_batches_of_the_same_size(
    replicas: int, length: int
) -> None:
    loader = DataLoader(Rows(length), batch_size=4)
    seen = [epochs(loader, r, replicas)[0] for r in range(replicas)]
    whole = [batch.flatten().tolist() for batch in loader]
    assert [len(part) for part in seen] == [len(whole)] * replicas
    for number, batch in enumerate(whole):
        assert [row for part in seen for row in part[number]] == batch


def test_shares_differ_by_at_most_one() -> None:
    assert split_rows_evenly(10, 4) == [3, 3, 2, 2]
    assert split_rows_evenly(2, 4) == [1, 1, 0, 0]


def test_shuffling_is_the_same_on_every_replica_and_another_each_epoch() -> None:
    runs = []
    for replica in range(2):
        torch.manual_seed(replica)  # ranks whose random states differ
        runs.append(epochs(DataLoader(Rows(12), batch_size=4, shuffle=True), replica, 2, count=2))
    orders = []
    for first, second in zip(*runs, strict=True):
        order = [row for a, b in zip(first, second, strict=True) for row in a + b]
        assert sorted(order) == list(range(12))
        orders.append(order)
    assert orders[0] != orders[1]
    assert orders[0] != list(range(12))


def test_the_users_random_state_is_not_touched() -> None:
    torch.manual_seed(3)
    before = torch.get_rng_state()
    epochs(DataLoader(Rows(8), batch_size=4, shuffle=True), 0, 2)
    assert torch.equal(torch.get_rng_state(), before)


def test_a_rank_loads_only_its_own_rows() -> None:
    rows = Rows(12)
    epochs(DataLoader(rows, batch_size=4), 1, 2)
    assert rows.loaded == [2, 3, 6, 7, 10, 11]


def test_set_epoch_repeats_a_shuffle() -> None:
    loader = ShardedLoader(
        DataLoader(Rows(12), batch_size=4, shuffle=True), replica=0, replicas=2, seed=1
    )
    first = [b.flatten().tolist() for b in loader]
    loader.set_epoch(0)
    assert [b.flatten().tolist() for b in loader] == first


def test_streams_and_plain_lists_are_split_by_row() -> None:
    stream = DataLoader(Stream(), batch_size=4)
    assert epochs(stream, 1, 2)[0] == [[2, 3], [6, 7], [10]]
    assert epochs([torch.arange(5).view(-1, 1)], 0, 2)[0] == [[0, 1, 2]]


def test_tuples_are_split_also_for_a_replica_without_rows() -> None:
    data = TensorDataset(torch.arange(5), torch.arange(5) * 10)
    sharded = ShardedLoader(DataLoader(data, batch_size=4), replica=3, replicas=4, seed=0)
    parts = [(a.tolist(), b.tolist()) for a, b in sharded]
    assert parts == [([3], [30]), ([], [])]


def test_a_loader_that_is_already_split_passes_through() -> None:
    rows = Rows(12)
    sampler: DistributedSampler[Tensor] = DistributedSampler(
        rows, num_replicas=2, rank=1, shuffle=True, seed=0
    )
    loader = DataLoader(rows, batch_size=3, sampler=sampler)
    first, second = epochs(loader, 1, 2, count=2)
    assert first != second  # the sampler's epoch advances
    assert len(loader) == len(first) == 2


def _uneven(plan: str) -> float:
    """An epoch of 10 samples in batches of 4 over 4 replicas: the last has 2 rows for 4 ranks."""
    case, reference, parallel = parallelize("gpt", plan)
    ids, targets = CASES["gpt"].batch(10)  # type: ignore[misc]
    loader = DataLoader(TensorDataset(ids, targets), batch_size=4)
    optimizer = torch.optim.SGD(reference.parameters(), lr=0.05, momentum=0.9)
    worst = 0.0
    for batch, part in zip(loader, parallel.shard(loader), strict=True):
        optimizer.zero_grad()
        expected = reference_loss(reference, case, tuple(batch))
        expected.backward()
        optimizer.step()
        loss = parallel.train_step(tuple(part))
        worst = max(worst, abs(loss.item() - expected.item()) / expected.item())
    after = parallel.state_dict()
    drift = max(relative(after[n], value) for n, value in reference.state_dict().items())
    return max(worst, drift)


@pytest.mark.dist
@pytest.mark.parametrize("plan", ["dp_replicate=4", "dp_shard=4", "dp_replicate=4 accumulation=2"])
def test_an_uneven_last_batch_weighs_every_sample_the_same(pool: Pool, plan: str) -> None:
    assert max(pool.run(_uneven, plan, world_size=4)) < 1e-5


class Endless(Sampler[int]):
    """Draws for ever; counts how many were drawn."""

    def __init__(self) -> None:
        self.drawn = 0

    def __iter__(self) -> Iterator[int]:
        for index in itertools.cycle(range(16)):
            self.drawn += 1
            yield index


def test_an_endless_sampler_is_drawn_as_needed() -> None:
    sampler = Endless()
    loader = DataLoader(Rows(16), batch_size=4, sampler=sampler)
    sharded = iter(ShardedLoader(loader, replica=1, replicas=2, seed=0))
    assert [next(sharded).flatten().tolist() for _ in range(5)] == [
        [2, 3],
        [6, 7],
        [10, 11],
        [14, 15],
        [2, 3],
    ]
    assert sampler.drawn == 20


class Shuffled(Sampler[list[int]]):
    """Batches of 4 out of 16 rows, shuffled by a function of the user's."""

    def __init__(self, shuffle: Callable[[list[int]], object]) -> None:
        self.shuffle = shuffle

    def __iter__(self) -> Iterator[list[int]]:
        order = list(range(16))
        self.shuffle(order)
        for start in range(0, 16, 4):
            # Drawn between batches as well: the user's own random numbers run in between.
            rest = order[start:]
            self.shuffle(rest)
            order[start:] = rest
            yield order[start : start + 4]

    def __len__(self) -> int:
        return 4


def _torch_shuffle(order: list[int]) -> None:
    order[:] = [order[i] for i in torch.randperm(len(order)).tolist()]


SHUFFLES = {"python": random.shuffle, "numpy": np.random.shuffle, "torch": _torch_shuffle}


@pytest.mark.parametrize("library", SHUFFLES)
def test_samplers_of_the_users_own_draw_alike_on_every_replica(library: str) -> None:
    runs = []
    for replica in range(2):
        _seed_all(100 + replica)  # ranks whose random states differ
        loader = DataLoader(Rows(16), batch_sampler=Shuffled(SHUFFLES[library]))
        sharded = ShardedLoader(loader, replica=replica, replicas=2, seed=5)
        seen = []
        for batch in sharded:
            _draw_from_all()  # the loop may use random numbers, other ones on each rank
            seen.append(batch.flatten().tolist())
        runs.append(seen)
    order = [row for a, b in zip(*runs, strict=True) for row in a + b]
    assert sorted(order) == list(range(16))
    assert order != list(range(16))


class Drawing(Sampler[int]):
    """Rows in an order that a generator of its own draws."""

    def __init__(self, kind: str) -> None:
        self.python, self.numpy = random.Random(3), np.random.default_rng(3)
        self.kind = kind

    def __iter__(self) -> Iterator[int]:
        order = list(range(10))
        if self.kind == "python":
            self.python.shuffle(order)
        else:
            self.numpy.shuffle(order)
        return iter(order)

    def __len__(self) -> int:
        return 10


def _drawing_loader(kind: str) -> DataLoader[Tensor]:
    own, rows = torch.Generator().manual_seed(3), Rows(10)
    if kind == "loader":
        return DataLoader(rows, batch_size=4, shuffle=True, generator=own)
    sampler = RandomSampler(rows, generator=own) if kind == "torch" else Drawing(kind)
    if kind == "numpy":
        return DataLoader(rows, batch_sampler=BatchSampler(sampler, 4, drop_last=False))
    return DataLoader(rows, batch_size=4, sampler=sampler)


@pytest.mark.parametrize("taken", [3, 4, 5, 6])
@pytest.mark.parametrize("kind", ["loader", "torch", "python", "numpy"])
def test_a_resumed_pass_goes_on_in_the_order_of_generators_that_samplers_have(
    kind: str, taken: int
) -> None:
    """Of three batches a pass; after 3 and 6 the pass has ended, or is about to."""
    sharded = ShardedLoader(_drawing_loader(kind), replica=0, replicas=1, seed=5)
    undisturbed = [
        (batch.flatten().tolist(), sharded.state_dict()) for _ in range(3) for batch in sharded
    ]
    resumed = ShardedLoader(_drawing_loader(kind), replica=0, replicas=1, seed=5)
    resumed.load_state_dict(undisturbed[taken - 1][1])
    rest = [batch.flatten().tolist() for _ in range(3) for batch in resumed]
    wanted = [rows for rows, _ in undisturbed[taken:]]
    assert rest[: len(wanted)] == wanted


@pytest.mark.parametrize("kind", ["loader", "torch", "python", "numpy"])
def test_a_pass_after_a_save_between_two_draws_the_order_that_it_would_have_drawn(
    kind: str,
) -> None:
    sharded = ShardedLoader(_drawing_loader(kind), replica=0, replicas=1, seed=5)
    list(sharded)
    between = sharded.state_dict()
    resumed = ShardedLoader(_drawing_loader(kind), replica=0, replicas=1, seed=5)
    resumed.load_state_dict(between)
    rows = [[batch.flatten().tolist() for batch in loader] for loader in (resumed, sharded)]
    assert rows[0] == rows[1]


@pytest.mark.parametrize("library", SHUFFLES)
def test_no_random_state_of_the_user_is_touched_while_a_sampler_draws(library: str) -> None:
    loader = DataLoader(Rows(16), batch_sampler=Shuffled(SHUFFLES[library]))
    _seed_all(3)
    expected = [_draw_from_all() for _ in range(4)]
    _seed_all(3)
    results = [_draw_from_all() for _ in ShardedLoader(loader, replica=0, replicas=2, seed=5)]
    assert results == expected


def _seed_all(seed: int) -> None:
    random.seed(seed)
    np.random.seed(seed)
    torch.manual_seed(seed)


def _draw_from_all() -> tuple[float, float, float]:
    return random.random(), float(np.random.rand()), torch.rand(()).item()


def test_batches_of_a_distributed_sampler_pass_through() -> None:
    seen = []
    for replica in range(2):
        rows = Rows(16)
        sampler: DistributedSampler[Tensor] = DistributedSampler(
            rows, num_replicas=2, rank=replica, shuffle=True, seed=0
        )
        loader = DataLoader(rows, batch_sampler=BatchSampler(sampler, 4, drop_last=False))
        first, second = epochs(loader, replica, 2, count=2)
        assert first != second  # the sampler's epoch advances
        assert [len(batch) for batch in first] == [4, 4]  # not cut a second time
        seen.append([row for batch in first for row in batch])
    assert sorted(seen[0] + seen[1]) == list(range(16))


@pytest.mark.parametrize("options", [{"shuffle": True}, {"sampler": Endless()}])
def test_an_order_of_single_rows_that_cannot_be_shared_is_refused(
    options: dict[str, object],
) -> None:
    loader = DataLoader(Rows(16), batch_size=None, **options)  # type: ignore[arg-type]
    with pytest.raises(InputError, match="batch_size=None and its own order") as caught:
        ShardedLoader(loader, replica=0, replicas=2, seed=0)
    assert "give it a batch_size or a batch_sampler" in str(caught.value)


def test_ready_made_batches_in_order_are_split_by_row() -> None:
    batches = [torch.arange(start, start + 4).view(-1, 1) for start in (0, 4)]
    loader: DataLoader[Tensor] = DataLoader(batches, batch_size=None)  # type: ignore[arg-type]
    assert epochs(loader, 1, 2)[0] == [[2, 3], [6, 7]]


def test_worker_processes_see_the_same_batches_and_augment_independently() -> None:
    loader = DataLoader(Noisy(8), batch_size=4, shuffle=True, num_workers=1)
    rows, noise = [], []
    for replica in range(2):
        torch.manual_seed(0)
        for batch in ShardedLoader(loader, replica=replica, replicas=2, seed=5):
            rows += batch[:, 0].tolist()
            noise += batch[:, 1].tolist()
    assert sorted(rows) == list(range(8))
    assert len(set(noise)) == 8  # every row its own noise, also across replicas


class Noisy(Dataset[Tensor]):
    """Row i is i and a random number."""

    def __init__(self, length: int) -> None:
        self.length = length

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> Tensor:
        return torch.stack([torch.tensor(float(index)), torch.rand(())])
