"""A training that is saved under one plan and goes on under another: its state and its losses.

The model drops nothing, so that all plans compute the same function. The training that saved goes
on undisturbed, and its losses are those that the other plan should have. What the other plan holds
after its load is read from a save of its own, which should be the first one bit for bit.
"""

from __future__ import annotations

import json
import time
from collections.abc import Collection, Iterable, Iterator, Mapping
from pathlib import Path

import torch
from torch import Tensor

from engines.parallel import ParallelModel
from engines.plan import Plan
from engines.state.checkpoint.folder import complete_saves, unlock
from engines.state.checkpoint.manifest import Manifest, read_manifest
from engines.state.checkpoint.shard_file import ShardReader
from engines.state.checkpoint.training_state import MODEL, OPTIMIZER
from tests.soak.report import PlanPair
from tests.soak.training import PLANS, build, global_batches
from tests.workers import Pool

ALL = {**PLANS, "one": "dp_replicate=1", "two": "dp_shard=2"}
"""Plans by name: of four ranks, of one, and of two."""
SAVED, LAST = 6, 14
"""Steps. A pass has nine, so that the other plan draws the order of the next one itself."""
MOST_LOSS = 1e-5
"""Relative, as in the tests of loads under another plan: plans add in other orders."""
RUN_S = 300.0
NOTHING_ALIKE = 1e9
"""In place of a difference of what cannot be compared."""


def _undisturbed(plan: str, folder: str) -> tuple[list[float], dict[str, Tensor]]:
    """Losses of the steps after the save, and the whole weights that were saved."""
    losses, weights = [], {}
    for parallel, loss in _trained(plan, ""):
        losses.append(loss)
        if parallel.step == SAVED:
            weights = _saved(parallel, folder)
    return losses[SAVED:], weights


def _resumed(plan: str, folder: str, again: str) -> tuple[list[float], dict[str, Tensor]]:
    """Losses of the steps after the load, and the whole weights that were loaded, saved anew."""
    losses, weights = [], {}
    for parallel, loss in _trained(plan, folder):
        if parallel.step == SAVED:
            weights = _saved(parallel, again)
        else:
            losses.append(loss)
    return losses, weights


def _trained(plan: str, folder: str) -> Iterator[tuple[ParallelModel, float]]:
    """The model after each step until `LAST`; with a `folder`, after its load first."""
    parallel, scheduler = build(plan, steps=LAST, drop=0.0)
    parallel.register(scheduler=scheduler)
    loader = parallel.shard(global_batches())
    if folder:
        assert parallel.load(folder) == SAVED
        yield parallel, 0.0
    while True:
        for batch in loader:
            loss = parallel.train_step(batch).item()
            scheduler.step()
            yield parallel, loss
            if parallel.step == LAST:
                return


def _saved(parallel: ParallelModel, folder: str) -> dict[str, Tensor]:
    parallel.save(folder)
    unlock(Path(folder))
    return {name: value.clone() for name, value in parallel.state_dict().items()}


class SavedTraining:
    """A training under the plan `name` of `ALL`, saved in `folder` and taken to its end."""

    def __init__(self, name: str, folder: Path, pool: Pool) -> None:
        self._name, self._folder, self._pool = name, folder, pool
        ranks = Plan.parse(ALL[name]).world_size
        (self._losses, self._weights), *_ = pool.run(
            _undisturbed, ALL[name], str(folder), world_size=ranks, timeout_s=RUN_S
        )

    def under(self, name: str, folder: Path) -> PlanPair:
        """Go on under another plan, which saves in `folder` what it loaded."""
        began = time.monotonic()
        ranks = Plan.parse(ALL[name]).world_size
        every = self._pool.run(
            _resumed, ALL[name], str(self._folder), str(folder), world_size=ranks, timeout_s=RUN_S
        )
        took_s = time.monotonic() - began
        first, second = SharedContent(self._folder), SharedContent(folder)
        losses = max(_of_losses(self._losses, losses) for losses, _ in every)
        weights = max(
            largest_difference(self._weights, first.tensors(MODEL), MODEL),
            *(largest_difference(self._weights, loaded) for _, loaded in every),
            second.differ_from(first, MODEL),
        )
        states = second.differ_from(first, OPTIMIZER)
        wrong = [f"weights by {weights:.2g}"] * (weights > 0)
        wrong += [f"states by {states:.2g}"] * (states > 0)
        wrong += [f"losses by {losses:.2g}"] * (losses > MOST_LOSS)
        wrong += second.other_values(first)
        return PlanPair(
            saved=self._name,
            loaded=name,
            saved_plan=ALL[self._name],
            loaded_plan=ALL[name],
            steps=LAST - SAVED,
            weights=weights,
            states=states,
            losses=losses,
            seconds=round(took_s, 1),
            differences=tuple(f"{self._name} to {name}: {text}" for text in wrong),
        )


class SharedContent:
    """Content of a save that belongs to all of its ranks together."""

    def __init__(self, folder: Path) -> None:
        path = complete_saves(folder)[0]
        self._manifest: Manifest = read_manifest(path)
        self._reader = ShardReader(path, self._manifest)

    def tensors(self, prefix: str) -> dict[str, Tensor]:
        names = [name for name in self._manifest.tensors if name.startswith(prefix)]
        return {name: self._reader.tensor(name) for name in names}

    def differ_from(self, other: SharedContent, prefix: str) -> float:
        return largest_difference(other.tensors(prefix), self.tensors(prefix))

    def other_values(self, other: SharedContent) -> list[str]:
        """Names of values, such as an optimizer's settings, that are not those of `other`."""
        ours, theirs = self._manifest.values, other._manifest.values
        same = {
            key for key in ours.keys() & theirs.keys() if _text(ours[key]) == _text(theirs[key])
        }
        return [f"another `{key}`" for key in sorted((ours.keys() | theirs.keys()) - same)]


def _text(value: object) -> str:
    return json.dumps(value, sort_keys=True)


def largest_difference(
    wanted: Mapping[str, Tensor], got: Mapping[str, Tensor], prefix: str = ""
) -> float:
    """The largest difference of an element; `NOTHING_ALIKE` of other names, shapes or dtypes.

    Args:
        prefix: that the names of `got` have beyond those of `wanted`.
    """
    if {f"{prefix}{name}" for name in wanted} != got.keys() or not wanted:
        return NOTHING_ALIKE
    largest = 0.0
    for name, tensor in wanted.items():
        other = got[f"{prefix}{name}"]
        if tensor.shape != other.shape or tensor.dtype != other.dtype:
            return NOTHING_ALIKE
        if not torch.equal(tensor, other):
            largest = max(largest, (tensor.double() - other.double()).abs().max().item())
    return largest


def _of_losses(wanted: list[float], got: list[float]) -> float:
    """The largest relative difference."""
    if len(wanted) != len(got):
        return NOTHING_ALIKE
    return max(abs(ours / theirs - 1) for theirs, ours in zip(wanted, got, strict=True))


def paired(
    saved: Iterable[str], loaded: Collection[str], folder: Path, known: Iterable[PlanPair]
) -> Iterator[PlanPair]:
    """Each of `saved` under each of `loaded`, names of `ALL`, but for pairs that are known."""
    done = {(pair.saved, pair.loaded) for pair in known}
    pool = Pool(max(Plan.parse(plan).world_size for plan in ALL.values()))
    try:
        for first in saved:
            left = [second for second in loaded if (first, second) not in done]
            if left:
                training = SavedTraining(first, folder / first, pool)
                for second in left:
                    yield training.under(second, folder / f"{first} {second}")
    finally:
        pool.close()
