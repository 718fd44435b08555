"""A training that is ended and started again equals one that was left alone, to the last bit."""

from __future__ import annotations

import functools
import math
import os
import re
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.optim.lr_scheduler import ReduceLROnPlateau
from torch.utils.data import DataLoader, IterableDataset, TensorDataset

from engines.parallel import ParallelModel
from engines.parallel.fit import FitResult
from engines.state.checkpoint.folder import complete_saves, unlock
from engines.state.checkpoint.manifest import read_manifest
from profiles.errors import FileError, InputError, RankError, RankMismatchError
from tests.engines.cases import token_loss
from tests.nightly import nightly
from tests.soak.training import PLANS, build, global_batches
from tests.workers import Pool

STEPS = 14
"""More than a pass over the data, which has nine batches."""
ALONE = "dp_replicate=1"


def train(plan: str, folder: str | None, **options: Any) -> tuple[FitResult, list[float]]:
    """The result of `fit` in a process that just began, and the loss of each step."""
    parallel, scheduler = build(plan, steps=STEPS)
    losses: list[float] = []
    result = parallel.fit(
        global_batches(),
        **{"steps": STEPS, "save": folder, "scheduler": scheduler} | options,
        on_step=lambda step, loss: losses.append(loss.item()),
    )
    return result, losses


def _train_until(plan: str, folder: str, steps: int) -> list[float]:
    return train(plan, folder, steps=steps)[1]


def content(folder: str | Path) -> tuple[list[str], Any, Any]:
    """Of the newest save: hashes of its files, its values, and those of each rank."""
    manifest = read_manifest(complete_saves(Path(folder))[0])
    return [file.sha256 for file in manifest.files.values()], manifest.values, manifest.ranks


@pytest.mark.dist
@pytest.mark.parametrize(
    "plan",
    [PLANS["pp2"], *nightly(*(PLANS[n] for n in ("ddp", "zero1", "zero3", "tp2", "hsdp")))],
)
def test_a_training_in_three_parts_equals_one_without_a_break(
    pool: Pool, tmp_path: Path, plan: str
) -> None:
    """Breaks after the first step, and at the end of a pass over the data."""
    whole, parts = str(tmp_path / "whole"), str(tmp_path / "parts")
    wanted = pool.run(_train_until, plan, whole, STEPS, world_size=4)
    results = [pool.run(_train_until, plan, parts, steps, world_size=4) for steps in (1, 9, STEPS)]
    for rank in range(4):
        assert [loss for part in results for loss in part[rank]] == wanted[rank]
    assert content(parts) == content(whole)


def test_saves_come_in_the_interval_and_at_the_end_and_the_newest_are_retained(
    tmp_path: Path,
) -> None:
    result, losses = train(ALONE, str(tmp_path), save_every=4, keep_last=2)
    saves = [path.name for path in complete_saves(tmp_path)]
    assert saves == ["step-00000014", "step-00000012"]
    assert result == FitResult(STEPS, losses[-1], tmp_path / "step-00000014", "steps")


def test_a_training_that_was_done_does_nothing_more(tmp_path: Path) -> None:
    train(ALONE, str(tmp_path))
    again, losses = train(ALONE, str(tmp_path))
    assert again == FitResult(STEPS, None, None, "steps")
    assert losses == []
    assert [path.name for path in complete_saves(tmp_path)] == ["step-00000014"]


def test_a_training_may_begin_anew_beside_its_older_saves(tmp_path: Path) -> None:
    first = train(ALONE, str(tmp_path), steps=3)
    again = train(ALONE, str(tmp_path), steps=3, resume=None)
    assert again[1] == first[1]
    assert again[0].saved == tmp_path / "step-00000003.1"


def test_epochs_are_counted_over_breaks(tmp_path: Path) -> None:
    """A pass has nine batches; the break is inside the second one."""
    whole = train(ALONE, None, steps=None, epochs=3)
    first = train(ALONE, str(tmp_path), epochs=3, steps=11)
    rest = train(ALONE, str(tmp_path), steps=None, epochs=3)
    assert (first[0].reason, rest[0].reason) == ("steps", "epochs")
    assert rest[0].steps == 27
    assert first[1] + rest[1] == whole[1]
    done = train(ALONE, str(tmp_path), steps=None, epochs=3)
    assert done[0] == FitResult(27, None, None, "epochs")


def test_a_loader_that_is_at_its_end_ends_the_training() -> None:
    parallel, _ = build(ALONE, steps=STEPS)
    batches = iter(list(global_batches())[:5])
    assert parallel.fit(batches, steps=STEPS).reason == "epochs"
    assert parallel.step == 5


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"steps": None}, "this training has no end"),
        ({"steps": 0}, "`steps=0` wants one or more"),
        ({"steps": math.nan}, "`steps=nan` wants one or more, a whole number"),
        ({"steps": math.inf}, "`steps=inf` wants one or more, a whole number"),
        ({"epochs": 1.5}, "`epochs=1.5` wants one or more, a whole number"),
        ({"save_every": math.nan, "save": "runs"}, "`save_every=nan` wants one step or more"),
        ({"save_every": 5}, "`save_every=5` names no folder"),
        ({"save_every": 0, "save": "runs"}, "`save_every=0` wants one step or more"),
        ({"resume": "newest"}, "`resume='newest'` is neither"),
    ],
)
def test_arguments_that_contradict_each_other_are_refused(
    options: dict[str, Any], message: str
) -> None:
    parallel = _untrained()
    with pytest.raises(InputError, match=message):
        parallel.fit(global_batches(), **{"steps": STEPS} | options)
    assert parallel.step == 0


@functools.cache
def _untrained() -> ParallelModel:
    return build(ALONE, steps=STEPS)[0]


def test_a_loader_without_batches_and_a_scheduler_that_wants_a_metric_are_refused() -> None:
    parallel, _ = build(ALONE, steps=STEPS)
    with pytest.raises(InputError, match="the loader yields no batch"):
        parallel.fit([], steps=2)
    plateau = ReduceLROnPlateau(parallel.optimizer)
    with pytest.raises(InputError, match="wants a metric"):
        parallel.fit(global_batches(), steps=2, scheduler=plateau)


def test_saves_that_are_all_damaged_are_no_fresh_start(tmp_path: Path) -> None:
    train(ALONE, str(tmp_path), steps=2)
    (tmp_path / "step-00000002" / "rank-00000.safetensors").write_bytes(b"cut off")
    with pytest.raises(FileError, match="is damaged"):
        train(ALONE, str(tmp_path))


@contextmanager
def own_handler(number: int) -> Iterator[list[int]]:
    """The signals that a handler of the script's own heard meanwhile."""
    heard: list[int] = []

    def hear(number: int, frame: FrameType | None) -> None:
        heard.append(number)

    before = signal.signal(number, hear)
    try:
        yield heard
        assert signal.getsignal(number) is hear
    finally:
        signal.signal(number, before)


def _send_at(steps: int, number: int) -> Callable[[int, Tensor], None]:
    def send(step: int, loss: Tensor) -> None:
        if step == steps:
            os.kill(os.getpid(), number)

    return send


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGUSR1])
def test_a_signal_ends_the_training_between_two_steps_with_a_save(
    tmp_path: Path, number: signal.Signals
) -> None:
    whole = train(ALONE, None)[1]
    parallel, scheduler = build(ALONE, steps=STEPS)
    with own_handler(number) as heard:
        result = parallel.fit(
            global_batches(),
            steps=STEPS,
            save=tmp_path,
            scheduler=scheduler,
            on_step=_send_at(3, number),
        )
    assert heard == [number]
    assert result == FitResult(3, whole[2], tmp_path / "step-00000003", "signal")
    unlock(tmp_path)
    assert train(ALONE, str(tmp_path))[1] == whole[3:]


def test_handlers_are_back_after_an_error_and_nothing_is_saved(tmp_path: Path) -> None:
    parallel, _ = build(ALONE, steps=STEPS)

    def fail(step: int, loss: Tensor) -> None:
        raise KeyError("the script's own")

    with own_handler(signal.SIGTERM), pytest.raises(KeyError):
        parallel.fit(global_batches(), steps=STEPS, save=tmp_path, on_step=fail)
    assert list(tmp_path.iterdir()) == []


def test_in_a_thread_signals_are_left_alone(tmp_path: Path) -> None:
    results = []
    thread = threading.Thread(target=lambda: results.append(train(ALONE, str(tmp_path), steps=2)))
    with own_handler(signal.SIGTERM):
        thread.start()
        thread.join()
    assert results[0][0].reason == "steps"


def _signal_at_one_rank(plan: str, folder: str, number: int) -> FitResult:
    """Steps of a few milliseconds, more than ranks ask each other after."""
    parallel, scheduler = build(plan, steps=STEPS)
    sent = _send_at(20, number) if dist.get_rank() == 1 else None
    return parallel.fit(
        global_batches(), steps=200, save=folder, scheduler=scheduler, on_step=sent, grace_s=20
    )


@pytest.mark.dist
@pytest.mark.parametrize(
    ("plan", "number"),
    [
        ("dp_replicate=2", signal.SIGTERM),
        ("pp=2 schedule=1f1b", signal.SIGUSR1),
        ("dp_replicate=2 updates=local sync_every=8", signal.SIGTERM),
    ],
)
def test_a_signal_at_one_rank_ends_all_ranks_after_the_same_step(
    pool: Pool, tmp_path: Path, plan: str, number: signal.Signals
) -> None:
    first, second = pool.run(_signal_at_one_rank, plan, str(tmp_path), int(number), world_size=2)
    assert (first.reason, second.reason) == ("signal", "signal")
    assert first.steps == second.steps
    assert 20 <= first.steps <= 20 + 16
    assert first.saved == second.saved == tmp_path / f"step-{first.steps:08d}"


def _absent_from_the_save(folder: str) -> tuple[str, float]:
    """The error of the first rank, where the second one is gone when the state is saved."""
    parallel, _ = build("dp_replicate=2", steps=STEPS)
    if dist.get_rank() == 1:

        def fail(*args: Any, **options: Any) -> None:
            raise RankError("gone")

        parallel._start_save = fail  # type: ignore[method-assign, assignment]
    ended: list[float] = []

    def send(step: int, loss: Tensor) -> None:
        ended[:] = [time.monotonic()]
        _send_at(3, signal.SIGTERM)(step, loss)

    try:
        parallel.fit(global_batches(), steps=STEPS, save=folder, on_step=send, grace_s=2)
    except RankError as error:
        return error.what, time.monotonic() - ended[0]
    return "no error", 0.0


@pytest.mark.dist
def test_after_a_signal_a_save_waits_for_other_ranks_as_long_as_the_scheduler_does(
    pool: Pool, tmp_path: Path
) -> None:
    """The job itself would wait for a minute."""
    error, waited_s = pool.run(_absent_from_the_save, str(tmp_path), world_size=2)[0]
    assert re.fullmatch("rank 1 did not answer within [12] s", error)
    assert waited_s < 30


def _classic(folder: str, steps: int | None) -> list[float]:
    """Losses of a loop of one's own, which is told to end after so many steps."""
    parallel, scheduler = build("dp_replicate=2", steps=STEPS)
    parallel.register(scheduler=scheduler)
    loader = parallel.shard(global_batches())
    losses = []
    with parallel.until_signal(folder, save_every=4) as stop:
        while parallel.step < STEPS and stop.signal is None:
            for ids, targets in loader:
                loss = token_loss(parallel(ids), targets)
                loss.backward()
                assert not stop()  # no step since the last call
                parallel.optimizer.step()
                parallel.optimizer.zero_grad()
                scheduler.step()
                losses.append(loss.item())
                if parallel.step == steps and dist.get_rank() == 0:
                    os.kill(os.getpid(), signal.SIGUSR1)
                if stop() or parallel.step == STEPS:
                    break
    return losses


@pytest.mark.dist
def test_a_classic_loop_is_resumed_by_three_lines(pool: Pool, tmp_path: Path) -> None:
    whole = pool.run(_classic, str(tmp_path / "whole"), None, world_size=2)
    first = pool.run(_classic, str(tmp_path / "parts"), 6, world_size=2)
    rest = pool.run(_classic, str(tmp_path / "parts"), None, world_size=2)
    for rank in range(2):
        assert len(first[rank]) < STEPS
        assert first[rank] + rest[rank] == whole[rank]
    assert content(tmp_path / "parts") == content(tmp_path / "whole")
    assert torch.tensor(whole[0]).isfinite().all()


class Stream(IterableDataset[tuple[Tensor, ...]]):
    """Rows without a length."""

    def __iter__(self) -> Iterator[tuple[Tensor, ...]]:
        rows: TensorDataset = global_batches().dataset  # type: ignore[assignment]
        return (rows[number] for number in range(len(rows)))


def test_a_stream_that_does_not_know_its_length_trains_and_resumes(tmp_path: Path) -> None:
    for steps in (3, 5):
        parallel, _ = build(ALONE, steps=STEPS)
        loader = DataLoader(Stream(), batch_size=16)
        assert parallel.fit(loader, steps=steps, save=tmp_path).steps == steps
    assert parallel.fit(loader, epochs=1, save=tmp_path).steps == 9


def _different_lengths(is_fit: bool) -> str:
    parallel, _ = build("dp_replicate=2", steps=STEPS)
    batches = list(global_batches())[: 3 - dist.get_rank()]
    try:
        if is_fit:
            parallel.fit(batches, epochs=1)
        for batch in parallel.shard(batches):
            parallel.train_step(batch)
    except RankMismatchError as error:
        return str(error)
    return "no error"


@pytest.mark.dist
@pytest.mark.parametrize("is_fit", [True, False])
def test_loaders_of_different_lengths_are_refused_before_the_first_step(
    pool: Pool, is_fit: bool
) -> None:
    """Under DDP the rank with more batches would wait for the other one in its last step."""
    for text in pool.run(_different_lengths, is_fit, world_size=2):
        assert "length of the loader in batches: rank 0 has 3, rank 1 has 2" in text
        assert "the same loader of global batches" in text
