"""A rank that stops, or has no data left, is named on the others under every plan, at once."""

from __future__ import annotations

import os
import re
import resource
import signal
import time
from collections.abc import Callable
from itertools import islice
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist
from torch.utils.data import DataLoader, IterableDataset

from engines.parallel import ParallelModel
from engines.runtime import heartbeat
from profiles.errors import FileError, RankError, RankMismatchError
from tests.engines.runtime.fault_jobs import answers, ends
from tests.nightly import nightly
from tests.soak.training import build, global_batches

PLANS = {
    "ddp": "dp_replicate=2",
    "ring": "dp_replicate=4",
    "zero3": "dp_shard=2",
    "tp": "tp=2",
    "pp": "pp=2 schedule=1f1b",
    "hsdp": "dp_replicate=2 dp_shard=2",
}
ALWAYS, LATER = ("ddp", "zero3", "pp"), ("tp", "hsdp")


def _ranks(plan: str) -> int:
    return 4 if plan in ("hsdp", "ring") else 2


def _stops_in_step_3(plan: str) -> str:
    parallel, _ = build(PLANS[plan], steps=5)

    def stop(*_: object) -> None:
        if parallel.step == 2 and dist.get_rank() == 1:
            time.sleep(1.0)  # gloo sums the rows of the batch beside the forward
            os.kill(os.getpid(), signal.SIGSTOP)

    last = [each for each in parallel.module.modules() if any(True for _ in each.parameters(False))]
    heartbeat.SILENT_S = 5.0  # a model is built by now, which may hold Python's lock for long
    last[-1].register_forward_pre_hook(stop)
    for batch in parallel.shard(global_batches()):
        parallel.train_step(batch)
    return "done"


@pytest.mark.dist
@pytest.mark.parametrize("plan", [*ALWAYS, *nightly(*LATER)])
def test_a_rank_that_is_stopped_in_a_step_is_named_with_the_step_and_the_collective(
    plan: str,
) -> None:
    for text in answers(_stops_in_step_3, plan, ranks=_ranks(plan), without=(1,)):
        assert "rank 1 shows no sign of life: it is stopped, or its node is gone" in text
        assert re.search(r"rank \d is in step 3, exchanging gradients \(gloo:", text), text
        assert re.search(r"it was last seen in step [123]|last seen between two steps", text), text


class Stream(IterableDataset[Any]):
    """Batches without a length; fewer on rank 1."""

    def __iter__(self) -> Any:
        return islice(global_batches(), 5 - 2 * dist.get_rank())


def sleep(parallel: ParallelModel) -> None:
    time.sleep(60)


def save(parallel: ParallelModel) -> None:
    parallel.save("never")


def exit_0(parallel: ParallelModel) -> None:
    ends()


AFTERWARDS: dict[str, Callable[[ParallelModel], None]] = {
    "sleeps": sleep,
    "saves": save,
    "exits": exit_0,
}


def _streams_of_two_lengths(plan: str, afterwards: str) -> str:
    parallel, _ = build(PLANS[plan], steps=5)
    for batch in parallel.shard(DataLoader(Stream(), batch_size=None)):
        parallel.train_step(batch)
    AFTERWARDS[afterwards](parallel)
    return "done"


@pytest.mark.dist
@pytest.mark.parametrize(
    ("plan", "afterwards"),
    [
        *[("ddp", each) for each in AFTERWARDS],
        *[("zero3", "saves"), ("pp", "saves"), ("tp", "saves")],
    ],
)
def test_a_stream_that_ends_earlier_on_a_rank_is_named_with_its_step(
    plan: str, afterwards: str
) -> None:
    began = time.monotonic()
    (text,) = answers(_streams_of_two_lengths, plan, afterwards, ranks=2, without=(1,))
    assert "the loader of rank 1 ended after step 3, with 3 batches, and others have more" in text
    assert time.monotonic() - began < 40


def _evaluates_too_early() -> str:
    parallel, _ = build(PLANS["ddp"], steps=5)
    batches = list(islice(parallel.shard(global_batches()), 4))
    try:
        for batch in batches[dist.get_rank() :]:
            parallel.train_step(batch)
        parallel.eval_step(batches[0])
    except RankMismatchError as error:
        return error.what
    return "done"


@pytest.mark.dist
def test_a_rank_that_evaluates_while_others_train_is_named() -> None:
    """Else its rows would count in their step."""
    said = "rank 0 has called `train_step`, rank 1 has called `eval_step`"
    for text in answers(_evaluates_too_early, ranks=2):
        assert text == f"ranks train and evaluate at once: {said}"


def _unequal_streams_that_begin_anew() -> str:
    """Rank 1 begins its second pass when rank 0 is in the first: both train on."""
    parallel, _ = build(PLANS["ddp"], steps=7)
    result = parallel.fit(DataLoader(Stream(), batch_size=None), steps=7)
    return f"{result.steps} {result.reason}"


@pytest.mark.dist
def test_streams_of_two_lengths_that_begin_anew_are_trained_on() -> None:
    assert answers(_unequal_streams_that_begin_anew, ranks=2) == ["7 steps"] * 2


def _exits_in_step_3(plan: str) -> str:
    parallel, _ = build(PLANS[plan], steps=5)
    for batch in parallel.shard(global_batches()):
        if parallel.step == 2 and dist.get_rank() == 1:
            os._exit(0)  # as by a signal, or a library of the user's: nothing is said
        parallel.train_step(batch)
    return "done"


@pytest.mark.dist
@pytest.mark.parametrize("plan", [*ALWAYS, "ring", *nightly(*LATER)])
def test_a_rank_that_ends_without_a_word_is_named(plan: str) -> None:
    """In a ring of four, one rank waits for no connection of the one that ends."""
    for text in answers(_exits_in_step_3, plan, ranks=_ranks(plan), without=(1,)):
        assert "lost contact with another rank" in text
        assert text.endswith("rank 1 did not come to it")


def _loses_rank_0(plan: str) -> str:
    """The process of rank 0 runs the store, in which a failure would be published."""
    parallel, _ = build(PLANS[plan], steps=5)
    try:
        for batch in parallel.shard(global_batches()):
            if parallel.step == 2 and dist.get_rank() == 0:
                os._exit(0)
            parallel.train_step(batch)
    except RankError as error:
        return str(error)
    return "done"


@pytest.mark.dist
@pytest.mark.parametrize("plan", [*ALWAYS, *nightly(*LATER)])
def test_a_rank_that_lost_rank_0_names_it_and_not_itself(plan: str) -> None:
    """Else it would be looked for where nothing failed."""
    ranks = _ranks(plan)
    for text in answers(_loses_rank_0, plan, ranks=ranks, without=(0,)):
        assert text.startswith("lost contact with another rank")
        assert "rank 0" in text
        assert "failed: " not in text


def _has_a_full_disk(folder: str) -> str:
    """Saves, goes on, and saves again where files of rank 1 may not grow."""
    parallel, _ = build(PLANS["zero3"], steps=5)
    batches = iter(parallel.shard(global_batches()))
    parallel.train_step(next(batches))
    parallel.save(folder)
    parallel.train_step(next(batches))
    if dist.get_rank() == 1:
        resource.setrlimit(resource.RLIMIT_FSIZE, (2048, resource.RLIM_INFINITY))
    try:
        parallel.save(folder)
    except FileError as error:
        parallel.train_step(next(batches))
        return f"{parallel.load(folder)} {error.what}"
    return "done"


@pytest.mark.dist
def test_a_disk_that_is_full_on_one_rank_is_named_and_the_save_before_is_left(
    tmp_path: Path,
) -> None:
    for text in answers(_has_a_full_disk, str(tmp_path), ranks=2):
        assert text.startswith("1 ")
        assert "rank 1: " in text
        assert "File too large" in text
