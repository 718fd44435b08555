"""A training that is stopped in an epoch and resumed equals the undisturbed one to the bit."""

from __future__ import annotations

import math
import shutil
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from engines.apply import apply_plan
from engines.parallel import ParallelModel
from engines.plan import Plan
from profiles.capture.capture import capture
from profiles.errors import FileError, InputError, PlanMismatchError
from tests.engines.cases import cpu_ranks
from tests.engines.state.checkpoint.test_save_and_load import adamw
from tests.workers import Pool


class Dropped(nn.Module):
    """Two blocks with dropout, which draws random numbers in every step."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Linear(12, 24), nn.GELU(), nn.Dropout(0.3), nn.Linear(24, 12))
            for _ in range(2)
        )
        self.head = nn.Linear(12, 5)

    def forward(self, inputs: Tensor) -> Tensor:
        for block in self.blocks:
            inputs = inputs + block(inputs)
        return self.head(inputs)


def job(plan: str) -> tuple[ParallelModel, Any, Any]:
    """A model, a shuffled loader of 7 batches and a schedule."""
    torch.manual_seed(3)
    model, parsed = Dropped(), Plan.parse(plan)
    data = TensorDataset(torch.randn(40, 12), torch.randint(0, 5, (40,)))
    loss = nn.functional.cross_entropy
    sample = (torch.randn(6, 12), torch.randint(0, 5, (6,)))
    parallel = apply_plan(
        model,
        parsed,
        profile=capture(model, sample, loss_fn=loss),
        cluster=cpu_ranks(parsed.world_size),
        loss_fn=loss,
        sample=sample,
        optimizer=adamw,
    )
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(parallel.optimizer, T_max=20)
    parallel.register(schedule=schedule)
    loader = parallel.shard(DataLoader(data, batch_size=6, shuffle=True))
    return parallel, loader, schedule


def losses(plan: str, folder: str, *, first: int, last: int, saved_in: str) -> list[float]:
    """Of steps `first` to `last`, resumed where `first` is no beginning."""
    parallel, loader, schedule = job(plan)
    if first:
        torch.manual_seed(99)  # another process has another state
        assert parallel.load(folder) == first
    result: list[float] = []
    while parallel.step < last:
        for batch in loader:
            result.append(parallel.train_step(batch).item())
            schedule.step()
            if parallel.step == last:
                break
    if saved_in == "background":
        parallel.async_save(folder).wait()
    elif saved_in:
        parallel.save(folder)
    return result


@pytest.mark.dist
@pytest.mark.parametrize(
    "plan",
    [
        "dp_replicate=1",
        "dp_replicate=2",
        "dp_replicate=2 compression=powersgd",
        "dp_replicate=2 zero=1",
        "dp_shard=2",
        "tp=2 tensor_styles=blocks.*.0:column,blocks.*.3:row",
        "pp=2 microbatches=2 schedule=1f1b stages=blocks.1",
    ],
)
def test_losses_after_a_resume_are_those_of_the_undisturbed_run(
    pool: Pool, tmp_path: Path, plan: str
) -> None:
    size, folder = Plan.parse(plan).world_size, str(tmp_path)
    through = pool.run(run, plan, folder, 0, 18, "", world_size=size)[0]
    pool.run(run, plan, folder, 0, 10, "foreground", world_size=size)  # in the second epoch
    resumed = pool.run(run, plan, folder, 10, 18, "background", world_size=size)[0]
    assert resumed == through[10:]


def run(plan: str, folder: str, first: int, last: int, saved_in: str) -> list[float]:
    return losses(plan, folder, first=first, last=last, saved_in=saved_in)


@pytest.mark.dist
def test_another_plan_goes_on_with_the_same_batches_and_rate(pool: Pool, tmp_path: Path) -> None:
    folder = str(tmp_path)
    pool.run(run, "dp_replicate=2", folder, 0, 10, "foreground", world_size=2)
    shutil.copytree(tmp_path, tmp_path / "copy")
    parallel, loader, schedule = job("dp_replicate=1")
    assert parallel.load(tmp_path / "copy") == 10
    assert schedule.get_last_lr() == pytest.approx([0.01 * (1 + math.cos(math.pi * 10 / 20)) / 2])
    assert sum(1 for _ in loader) == 7 - 3


def fed_back(plan: str, folder: str, warning: str) -> float:
    """Weights of a resumed training, with a warning of rank 0."""
    parallel, _, _ = job(plan)
    is_told = warning and dist.get_rank() == 0
    with pytest.warns(UserWarning, match=warning) if is_told else nullcontext():
        parallel.load(folder)
    return sum(parameter.double().sum().item() for parameter in parallel.module.parameters())


@pytest.mark.dist
def test_other_plans_leave_out_what_powersgd_would_have_sent_and_say_so(
    pool: Pool, tmp_path: Path
) -> None:
    folder = str(tmp_path)
    pool.run(run, "dp_replicate=2 compression=powersgd", folder, 0, 4, "foreground", world_size=2)
    cases = {
        "dp_replicate=2 compression=powersgd": "",
        "dp_replicate=2": "left out: this plan compresses no gradients",
        "dp_replicate=2 compression=powersgd compression_rank=2": "factors of another rank",
        "dp_replicate=3 compression=powersgd": "2 ranks saved it, these are 3",
    }
    weights = {
        weight
        for plan, warning in cases.items()
        for weight in pool.run(
            fed_back, plan, folder, warning, world_size=Plan.parse(plan).world_size
        )
    }
    assert len(weights) == 1


def two_folders(folder: str) -> str:
    parallel, _, _ = job("dp_replicate=2")
    try:
        parallel.save(f"{folder}/{dist.get_rank()}")
    except PlanMismatchError as error:
        return str(error)
    return "saved"


@pytest.mark.dist
def test_ranks_that_name_different_folders_are_named(pool: Pool, tmp_path: Path) -> None:
    for text in pool.run(two_folders, str(tmp_path), world_size=2):
        assert "ranks disagree on the checkpoint folder: rank 0 has 0, rank 1 has 1" in text
    assert not list(tmp_path.iterdir())


def test_an_object_without_a_state_is_refused() -> None:
    parallel, _, _ = job("dp_replicate=1")
    with pytest.raises(InputError, match="`schedule` is an int, without `state_dict`"):
        parallel.register(schedule=3)  # type: ignore[arg-type]


class Average:
    """An object that takes no state that lacks its value."""

    def __init__(self) -> None:
        self.value, self.key = 1.0, "value"

    def state_dict(self) -> dict[str, Any]:
        return {self.key: self.value}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.value = state["value"]


@pytest.mark.dist
def test_an_object_that_refuses_its_state_on_one_rank_leaves_all_as_it_was(
    pool: Pool, tmp_path: Path
) -> None:
    assert pool.run(refused_states, str(tmp_path), world_size=2) == [True, True]


def refused_states(folder: str) -> bool:
    parallel, loader, schedule = job("dp_replicate=2")
    average = Average()
    parallel.register(average=average)
    for batch in loader:
        parallel.train_step(batch)
        schedule.step()
    average.key = "value" if dist.get_rank() == 0 else "of an older class"
    average.value = 2.0
    parallel.save(folder)
    average.key = "value"

    later = schedule.state_dict(), average.value
    for batch in loader:
        parallel.train_step(batch)
        schedule.step()
    before = {n: p.detach().clone() for n, p in parallel.module.named_parameters()}
    average.value = 3.0
    with pytest.raises(FileError, match=r"`average` refuses its state .*KeyError: 'value'"):
        parallel.load(folder)
    assert schedule.state_dict() != later[0]
    assert average.value == 3.0
    assert parallel.step == 14
    return all(torch.equal(p, before[n]) for n, p in parallel.module.named_parameters())
