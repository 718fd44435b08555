"""Copies ahead: the order of copies, waits and steps, on a stream that only takes notes."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.utils.data import DataLoader, TensorDataset

from engines.data.loader import ShardedLoader
from engines.data.prefetch import CopiesAhead

CPU = torch.device("cpu")


class Notes:
    """A stream without a device: copies are made at once, and everything is written down."""

    def __init__(self) -> None:
        self.lines: list[str] = []
        self._marks = 0

    def copy(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        self.lines.append(f"copy {int(tensors[0].sum())}")
        return [tensor.clone() for tensor in tensors]

    def mark(self) -> int:
        self._marks += 1
        return self._marks

    def wait(self, mark: int, copies: Sequence[Tensor]) -> None:
        self.lines.append(f"wait {mark}")


def trained(notes: Notes, batches: list[Tensor]) -> list[Tensor]:
    copies, seen = CopiesAhead(CPU, notes), []
    for batch in copies.ahead(batches):
        seen.append(copies.moved(batch))
        notes.lines.append(f"step {int(batch.sum())}")
    return seen


def test_the_next_batch_is_copied_before_a_step_and_a_step_waits_for_its_own() -> None:
    notes = Notes()
    batches = [torch.tensor([float(number)]) for number in (1, 2, 3)]
    seen = trained(notes, batches)
    assert notes.lines == [
        *("copy 1", "copy 2", "wait 1", "step 1"),
        *("copy 3", "wait 2", "step 2"),
        *("wait 3", "step 3"),
    ]
    assert all(torch.equal(own, batch) for own, batch in zip(seen, batches, strict=True))
    assert all(own is not batch for own, batch in zip(seen, batches, strict=True))


def test_one_batch_and_none_are_handed_out_too() -> None:
    assert len(trained(Notes(), [torch.ones(1)])) == 1
    assert trained(Notes(), []) == []


def test_what_was_written_to_after_its_copy_is_copied_again() -> None:
    copies, batch = CopiesAhead(CPU, Notes()), torch.ones(2)
    (given,) = copies.ahead([batch])
    assert given is batch
    batch.mul_(3)
    assert copies.moved(batch).tolist() == [3.0, 3.0]


def test_the_host_s_batch_is_handed_out_and_an_unknown_one_is_moved() -> None:
    copies = CopiesAhead(CPU, Notes())
    (first, second) = copies.ahead([{"x": torch.ones(1), "name": "a"}, {"x": torch.zeros(1)}])
    assert first["name"] == "a"
    assert copies.moved(second["x"]).item() == 0.0
    other = torch.full((1,), 7.0)
    assert copies.moved(other) is other


def _sharded(notes: Notes, **options: object) -> ShardedLoader:
    data = TensorDataset(torch.arange(8.0))
    loader = DataLoader(data, batch_size=2, **options)  # type: ignore[arg-type]
    return ShardedLoader(loader, replica=0, replicas=1, seed=0, copies=CopiesAhead(CPU, notes))


def test_only_batches_that_workers_load_and_pin_are_fetched_early() -> None:
    for options in ({}, {"num_workers": 1}):
        notes = Notes()
        assert len(list(_sharded(notes, **options))) == 4
        assert notes.lines == []


def test_a_resumed_pass_goes_on_at_the_batch_that_was_not_handed_out() -> None:
    notes = Notes()
    sharded = _sharded(notes)
    sharded.__class__ = _Aside
    batches = iter(sharded)
    assert [next(batches)[0].tolist() for _ in range(2)] == [[0.0, 1.0], [2.0, 3.0]]
    state = sharded.state_dict()
    assert notes.lines == ["copy 1", "copy 5", "copy 9"]
    again = _sharded(Notes())
    again.load_state_dict(state)
    assert [batch[0].tolist() for batch in again] == [[4.0, 5.0], [6.0, 7.0]]


class _Aside(ShardedLoader):
    """Loads as if workers did."""

    _loads_aside = True  # type: ignore[assignment]


def test_arguments_are_moved_and_containers_that_are_there_stay_the_same() -> None:
    there = CopiesAhead(torch.device("meta"), Notes())
    cache = {"keys": [torch.ones(2, device="meta")]}
    (ids,), names = there.here(((torch.ones(3),), {"mask": torch.ones(3), "cache": cache}))
    assert ids.is_meta
    assert names["mask"].is_meta
    assert there.here(((ids,), {"cache": cache}))[1]["cache"] is cache
