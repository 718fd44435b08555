"""Saved and loaded states: any plan to any plan, whole under the original names."""

from __future__ import annotations

import time
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from engines.plan import Plan
from profiles.errors import FileError, InputError, ModelError, RankError
from tests.engines.cases import CASES
from tests.engines.parity import alone, local_rows, parallelize, relative
from tests.nightly import nightly
from tests.workers import Pool


def _save(plan: str, folder: str) -> tuple[dict[str, Tensor], float]:
    case, _, parallel = parallelize("tied-frozen-unused", plan)
    for rows in (8, 6):
        parallel.train_step(local_rows(parallel, case.batch(rows), rows))
    parallel.save(folder)
    state = {name: value.clone() for name, value in parallel.state_dict().items()}
    loss = parallel.train_step(local_rows(parallel, case.batch(8), 8)).item()
    return state, loss


def _load(plan: str, folder: str) -> tuple[dict[str, Tensor], float]:
    case, _, parallel = parallelize("tied-frozen-unused", plan)
    parallel.load(folder)
    state = {name: value.clone() for name, value in parallel.state_dict().items()}
    parallel.train_step(local_rows(parallel, case.batch(8), 8))
    return state, parallel.eval_step(local_rows(parallel, case.batch(4), 4)).item()


@pytest.mark.dist
@pytest.mark.parametrize(
    ("saved", "loaded"),
    [
        ("dp_shard=4", "dp_replicate=2 zero=1"),
        ("dp_replicate=2 dp_shard=2", "dp_replicate=1"),
        *nightly(("dp_replicate=2", "dp_shard=4"), ("dp_replicate=1", "dp_replicate=2 zero=2")),
    ],
)
def test_a_checkpoint_of_one_plan_loads_under_another(
    pool: Pool, tmp_path: Path, saved: str, loaded: str
) -> None:
    folder = str(tmp_path / "checkpoint")
    state, _ = pool.run(_save, saved, folder, world_size=Plan.parse(saved).world_size)[0]
    same = pool.run(_load, saved, folder, world_size=Plan.parse(saved).world_size)
    other = pool.run(_load, loaded, folder, world_size=Plan.parse(loaded).world_size)
    for back, loss in (*same, *other):
        assert back.keys() == state.keys()
        assert all(torch.equal(back[n], state[n]) for n in state)
        # One more step with the loaded momentum ends at the same place.
        assert loss == pytest.approx(same[0][1], rel=1e-5)


def test_a_save_that_fails_leaves_the_older_ones(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import engines.state.checkpoint.save

    _, parallel = alone("gpt")
    parallel.save(tmp_path)
    before = parallel.state_dict()["head.weight"].clone()
    parallel.train_step(CASES["gpt"].batch(4))

    def no_space(*args: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(engines.state.checkpoint.save, "write_shard", no_space)
    with pytest.raises(FileError, match=r"cannot write .*rank 0: .*No space left"):
        parallel.save(tmp_path)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["latest", "lock", "step-00000000"]
    parallel.load(tmp_path)
    assert torch.equal(parallel.state_dict()["head.weight"], before)


def test_a_folder_without_a_checkpoint_is_an_error(tmp_path: Path) -> None:
    _, parallel = alone("gpt")
    with pytest.raises(FileError, match="has no complete checkpoint"):
        parallel.load(tmp_path)


def adamw(parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=0.01)


def _first_steps(plan: str, how: str, folder: str) -> dict[str, Tensor]:
    """Parameters after two steps: undisturbed, saved before them, or loaded before them."""
    case, _, parallel = parallelize("tied-frozen-unused", plan, optimizer=adamw)
    if how == "saved":
        parallel.save(folder)
    if how == "loaded":
        parallel.load(folder)
    if how == "loaded-late":  # states of earlier steps must go
        parallel.train_step(local_rows(parallel, case.batch(4), 4))
        parallel.load(folder)
    for rows in (8, 6):
        parallel.train_step(local_rows(parallel, case.batch(rows), rows))
    return {name: value.clone() for name, value in parallel.state_dict().items()}


@pytest.mark.dist
@pytest.mark.parametrize("plan", ["dp_shard=2", *nightly("dp_replicate=2")])
def test_saving_before_the_first_step_counts_no_step(pool: Pool, tmp_path: Path, plan: str) -> None:
    folder = str(tmp_path / "checkpoint")
    undisturbed = pool.run(_first_steps, plan, "undisturbed", folder, world_size=2)[0]
    for how in ("saved", "loaded", "loaded-late"):
        results = pool.run(_first_steps, plan, how, folder, world_size=2)[0]
        # Adam's first step is lr whatever the gradient; a second one counted would change it.
        assert max(relative(results[n], undisturbed[n]) for n in results) < 1e-6, how


def test_a_load_that_fails_leaves_the_optimizer_alone(tmp_path: Path) -> None:
    _, small = alone("lstm")
    small.save(tmp_path / "checkpoint")
    _, other = alone("gpt")
    with pytest.raises(FileError, match="belongs to another model"):
        other.load(tmp_path / "checkpoint")
    assert not other.optimizer.state


def _resume(plan: str, folder: str, *, stop: bool) -> dict[str, Tensor]:
    case, _, parallel = parallelize("gpt", plan, optimizer=adamw)
    parallel.train_step(local_rows(parallel, case.batch(8), 8))
    if stop:
        parallel.save(folder)
        case, _, parallel = parallelize("gpt", plan, optimizer=adamw)
        parallel.load(folder)
    parallel.train_step(local_rows(parallel, case.batch(6), 6))
    return {name: value.clone() for name, value in parallel.state_dict().items()}


def test_adams_states_come_back(tmp_path: Path) -> None:
    folder = str(tmp_path / "checkpoint")
    through = _resume("dp_replicate=1", folder, stop=False)
    resumed = _resume("dp_replicate=1", folder, stop=True)
    assert all(torch.equal(resumed[n], through[n]) for n in through)


def test_states_of_another_optimizer_are_refused(tmp_path: Path) -> None:
    case, _, parallel = parallelize("gpt", "dp_replicate=1", optimizer=adamw)
    parallel.train_step(case.batch(4))
    parallel.save(tmp_path / "checkpoint")
    _, _, other = parallelize("gpt", "dp_replicate=1")
    other.train_step(case.batch(4))
    with pytest.raises(FileError, match=r"had exp_avg, .*this one has momentum_buffer"):
        other.load(tmp_path / "checkpoint")


def test_a_checkpoint_of_another_model_is_refused_with_a_name(tmp_path: Path) -> None:
    _, small = alone("lstm")
    small.save(tmp_path / "checkpoint")
    _, other = alone("gpt")
    with pytest.raises(FileError, match="belongs to another model: it has 10 tensors") as caught:
        other.load(tmp_path / "checkpoint")
    assert "only here: blocks.0" in str(caught.value)


def _load_whole(plan: str) -> list[str]:
    """`load_state_dict` with states that fit, that lack keys and that have more."""
    _, reference, parallel = parallelize("tied-frozen-unused", plan)
    wanted = {name: value + 1 for name, value in reference.state_dict().items()}
    keys = parallel.load_state_dict(wanted)
    assert (keys.missing_keys, keys.unexpected_keys) == ([], [])
    got = parallel.state_dict()
    assert all(torch.equal(got[n], wanted[n]) for n in wanted)

    one = {"norm.weight": torch.zeros(32)}
    messages = []
    for state in (one, {**wanted, "extra": torch.ones(2)}):
        try:
            parallel.load_state_dict(state)
        except ModelError as error:
            messages.append(str(error))
    got = parallel.state_dict()
    assert all(torch.equal(got[n], wanted[n]) for n in wanted)  # refused: nothing was written

    keys = parallel.load_state_dict({**one, "extra": torch.ones(2)}, strict=False)
    assert keys.missing_keys == [n for n in wanted if n != "norm.weight"]
    assert keys.unexpected_keys == ["extra"]
    got = parallel.state_dict()
    assert all(torch.equal(got[n], one.get(n, wanted[n])) for n in wanted)
    assert parallel.load_state_dict({}, strict=False).missing_keys == list(wanted)
    return messages


@pytest.mark.dist
@pytest.mark.parametrize("plan", ["dp_replicate=1", "dp_replicate=2", "dp_shard=2"])
def test_whole_states_are_loaded_as_the_unwrapped_model_would(pool: Pool, plan: str) -> None:
    for lacking, exceeding in pool.run(_load_whole, plan, world_size=Plan.parse(plan).world_size):
        wanted = CASES["tied-frozen-unused"].build().state_dict()
        assert f"{len(wanted) - 1} tensors missing, 0 unexpected" in lacking
        assert "missing: position" in lacking
        assert "0 tensors missing, 1 unexpected" in exceeding
        assert "unexpected: extra" in exceeding
        assert "strict=False" in exceeding


def _wrong_shape(plan: str) -> str:
    _, reference, parallel = parallelize("gpt", plan)
    state = {**reference.state_dict(), "head.weight": torch.ones(3, 3)}
    try:
        parallel.load_state_dict(state)
    except ModelError as error:
        return str(error)
    return "no error"


@pytest.mark.dist
@pytest.mark.parametrize("plan", ["dp_replicate=2", "dp_shard=2"])
def test_a_tensor_of_another_shape_is_refused_by_name(pool: Pool, plan: str) -> None:
    for text in pool.run(_wrong_shape, plan, world_size=2):
        assert "`head.weight` is (61, 32) in the model, (3, 3) in the state" in text


def _inside_another_module(plan: str) -> tuple[list[str], float]:
    _, reference, parallel = parallelize("gpt", plan)
    state = nn.ModuleDict({"student": parallel, "other": nn.Linear(2, 2)}).state_dict()
    wanted = reference.state_dict()
    error = max((state[f"student.{n}"] - value).abs().max().item() for n, value in wanted.items())
    return list(state), error


@pytest.mark.dist
@pytest.mark.parametrize("plan", ["dp_replicate=2", "dp_shard=2"])
def test_inside_another_module_names_have_the_prefix(pool: Pool, plan: str) -> None:
    original = list(CASES["gpt"].build().state_dict())
    for names, error in pool.run(_inside_another_module, plan, world_size=2):
        assert names == [*(f"student.{n}" for n in original), "other.weight", "other.bias"]
        assert error == 0


def _unwritable(plan: str, folder: str) -> str:
    case, _, parallel = parallelize("gpt", plan)
    try:
        parallel.save(folder)
    except FileError as error:
        said = str(error)
    parallel.train_step(local_rows(parallel, case.batch(4), 4))  # all ranks go on together
    return said


@pytest.mark.dist
@pytest.mark.parametrize("plan", ["dp_replicate=2", "dp_shard=2"])
def test_a_folder_that_cannot_be_written_fails_on_every_rank(
    pool: Pool, tmp_path: Path, plan: str
) -> None:
    (tmp_path / "file").write_text("not a folder")
    folder = str(tmp_path / "file" / "checkpoint")
    first, second = pool.run(_unwritable, plan, folder, world_size=2, timeout_s=20)
    assert f"cannot write `{folder}`: Not a directory" in first
    assert f"rank 0: cannot write `{folder}`: Not a directory" in second


def test_a_save_in_the_background_that_fails_is_warned_of_without_a_wait(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def fail(*args: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("engines.state.checkpoint.save.write_shard", fail)
    _, parallel = alone("gpt")
    saving = parallel.async_save(tmp_path)
    assert saving._thread is not None
    saving._thread.join()
    assert [record.getMessage() for record in caplog.records] == [
        f"the save in the background failed: cannot write `{tmp_path}`: rank 0:"
        " [Errno 28] No space left on device"
    ]
    with pytest.raises(FileError):
        parallel.async_save(tmp_path)  # the next one raises it, before it begins
    assert [path.name for path in tmp_path.iterdir()] == ["lock"]


class Unsavable:
    """An object whose state is no value of a checkpoint on some rank."""

    def __init__(self, value: object) -> None:
        self.value = value

    def state_dict(self) -> dict[str, object]:
        if isinstance(self.value, Exception):
            raise self.value
        return {"value": self.value}

    def load_state_dict(self, state: dict[str, object]) -> None: ...


def _failing_on_one_rank(plan: str, folder: str, cause: str) -> tuple[str, list[str], float]:
    import engines.state.checkpoint.save as saving

    case, _, parallel = parallelize("gpt", plan)
    is_bad, write = parallel._job.rank == 1, saving.write_shard
    parallel.save(folder)
    parallel.train_step(local_rows(parallel, case.batch(4), 4))
    if cause == "value":
        parallel.register(own=Unsavable(object() if is_bad else 1))
    elif cause == "state":
        parallel.register(own=Unsavable(ValueError("of the user") if is_bad else 1))
    elif is_bad:
        errors = {"memory": MemoryError(), "disk": OSError(28, "No space left on device")}

        def fail(*args: object) -> None:
            raise errors[cause]

        saving.write_shard = fail  # type: ignore[assignment]
    began = time.monotonic()
    try:
        parallel.async_save(folder).wait()
    except (FileError, InputError, RankError) as error:
        said = error.what
    except ValueError as error:
        said = f"rank 1: {error}"
    finally:
        saving.write_shard = write
    took_s = time.monotonic() - began
    parallel.train_step(local_rows(parallel, case.batch(4), 4))  # all ranks go on together
    return said, sorted(path.name for path in Path(folder).iterdir()), took_s


@pytest.mark.dist
@pytest.mark.parametrize(
    ("cause", "said"),
    [
        ("memory", "rank 1: MemoryError"),
        ("disk", "rank 1: [Errno 28] No space left on device"),
        ("value", "own"),
        ("state", "of the user"),
    ],
)
def test_a_save_that_fails_on_one_rank_fails_on_all_at_once_and_leaves_the_older_one(
    pool: Pool, tmp_path: Path, cause: str, said: str
) -> None:
    ended = pool.run(_failing_on_one_rank, "dp_shard=2", str(tmp_path), cause, world_size=2)
    for text, names, took_s in ended:
        assert said in text
        assert names == ["latest", "lock", "step-00000000"]
        assert took_s < 10


def _interrupted(folder: str, rank: int) -> tuple[str, bool]:
    import engines.state.checkpoint.save as saving

    _, _, parallel = parallelize("gpt", "dp_shard=2")
    write = saving.write_shard

    def interrupt(*args: object) -> None:
        raise KeyboardInterrupt

    if parallel._job.rank == rank:
        saving.write_shard = interrupt  # type: ignore[assignment]
    try:
        parallel.save(folder)
    except FileError as error:
        return error.what, any(Path(folder).glob("step-*"))
    except KeyboardInterrupt:
        return "interrupted", any(Path(folder).glob("step-*"))
    finally:
        saving.write_shard = write
    return "saved", True


@pytest.mark.dist
@pytest.mark.parametrize("rank", [0, 1])
def test_an_interruption_in_a_save_is_one_on_its_rank_and_the_others_name_it(
    pool: Pool, tmp_path: Path, rank: int
) -> None:
    """Else a script that goes on without a save could not be ended by Ctrl-C."""
    said = ["", ""]
    said[rank] = "interrupted"
    said[1 - rank] = f"cannot write `{tmp_path}`: rank {rank}: KeyboardInterrupt"
    ended = pool.run(_interrupted, str(tmp_path), rank, world_size=2)
    assert ended == [(text, False) for text in said]
