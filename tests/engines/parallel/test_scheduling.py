"""A schedule that a plan steps: its rates are those of torch's own loop, also after a resume."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch.optim import Optimizer
from torch.optim.lr_scheduler import (
    ChainedScheduler,
    ConstantLR,
    CosineAnnealingLR,
    CosineAnnealingWarmRestarts,
    CyclicLR,
    ExponentialLR,
    LambdaLR,
    LinearLR,
    LRScheduler,
    OneCycleLR,
    ReduceLROnPlateau,
    SequentialLR,
)

from engines.parallel import ParallelModel
from profiles.errors import InputError
from tests.engines.cases import CASES
from tests.engines.parity import alone, local_rows, parallelize, sgd
from tests.nightly import nightly
from tests.workers import Pool

Factory = Callable[[Optimizer], LRScheduler]
FACTORIES: dict[str, Factory] = {
    "LambdaLR": lambda o: LambdaLR(o, lambda step: min(1.0, (step + 1) / 4)),
    "CosineAnnealingLR": lambda o: CosineAnnealingLR(o, T_max=8),
    "CosineAnnealingWarmRestarts": lambda o: CosineAnnealingWarmRestarts(o, T_0=3),
    "OneCycleLR": lambda o: OneCycleLR(o, max_lr=0.1, total_steps=12),
    "CyclicLR": lambda o: CyclicLR(o, base_lr=0.01, max_lr=0.1, step_size_up=3),
    "SequentialLR": lambda o: SequentialLR(
        o, [LinearLR(o, 0.1, total_iters=3), ExponentialLR(o, 0.9)], milestones=[3]
    ),
    "ChainedScheduler": lambda o: ChainedScheduler(
        [ConstantLR(o, 0.5, total_iters=2), ExponentialLR(o, 0.9)]
    ),
}
STEPS = 6


def rates_of_torch(factory: Factory) -> list[float]:
    """The rate that each of twice STEPS steps is made with, in a loop without us."""
    optimizer = sgd([torch.nn.Parameter(torch.ones(1))])
    scheduler, rates = factory(optimizer), []
    for _ in range(2 * STEPS):
        rates.append(rate(optimizer))
        optimizer.step()
        scheduler.step()
    return rates


def rate(optimizer: Optimizer) -> float:
    return float(optimizer.param_groups[0]["lr"])


def trained_rates(parallel: ParallelModel, steps: int = STEPS) -> list[float]:
    rates = []
    for _ in range(steps):
        rates.append(rate(parallel.optimizer))
        parallel.train_step(local_rows(parallel, CASES["gpt"].batch(4), 4))
    return rates


OFTEN = "LambdaLR", "OneCycleLR"


@pytest.mark.parametrize(
    "name", [*OFTEN, *nightly(*(name for name in FACTORIES if name not in OFTEN))]
)
def test_a_scheduler_of_torch_steps_with_the_optimizer_and_is_resumed(
    name: str, tmp_path: Path
) -> None:
    parallels = [alone("gpt", optimizer=sgd, scheduler=FACTORIES[name])[1] for _ in range(2)]
    first = trained_rates(parallels[0])
    parallels[0].save(tmp_path)
    assert parallels[1].load(tmp_path) == STEPS
    assert first + trained_rates(parallels[1]) == rates_of_torch(FACTORIES[name])


def _resumed(plan: str, folder: str) -> list[float]:
    _, _, first = parallelize("gpt", plan, scheduler=FACTORIES["SequentialLR"])
    first.save(folder)  # before any step: states are made by one of zeros, which is none
    rates = trained_rates(first)
    first.save(folder)
    _, _, second = parallelize("gpt", plan, scheduler=FACTORIES["SequentialLR"])
    second.load(folder)
    return rates + trained_rates(second)


@pytest.mark.dist
@pytest.mark.parametrize(
    "plan",
    [
        "dp_shard=2",
        "pp=2 schedule=gpipe microbatches=2 stages=blocks.1",
        *nightly("dp_replicate=2", "dp_replicate=2 updates=local sync_every=2"),
    ],
)
def test_every_rank_follows_the_schedule_through_a_resume(
    pool: Pool, tmp_path: Path, plan: str
) -> None:
    wanted = rates_of_torch(FACTORIES["SequentialLR"])
    assert pool.run(_resumed, plan, str(tmp_path), world_size=2) == [wanted, wanted]


def test_loops_of_one_s_own_and_fit_step_it_once() -> None:
    _, parallel = alone("gpt", optimizer=sgd, scheduler=FACTORIES["LambdaLR"])
    inputs, targets = CASES["gpt"].batch(4)
    assert CASES["gpt"].loss_fn is not None
    CASES["gpt"].loss_fn(parallel(inputs), targets).backward()
    parallel.optimizer.step()
    parallel.fit([(inputs, targets)] * 2, steps=3, scheduler=parallel.scheduler)
    assert rate(parallel.optimizer) == rates_of_torch(FACTORIES["LambdaLR"])[3]


def test_the_schedule_s_own_rates_are_scaled_with_the_optimizer_s() -> None:
    _, parallel = alone("gpt", optimizer=sgd, scheduler=FACTORIES["SequentialLR"])
    parallel.scale_learning_rate(tuned_at=4, batch=8)
    wanted = [2 * each for each in rates_of_torch(FACTORIES["SequentialLR"])[:STEPS]]
    assert trained_rates(parallel) == pytest.approx(wanted)


def test_what_is_no_factory_of_a_scheduler_is_refused() -> None:
    optimizer = sgd([torch.nn.Parameter(torch.ones(1))])
    with pytest.raises(InputError, match="`scheduler` is an ExponentialLR: the plan's own"):
        alone("gpt", optimizer=sgd, scheduler=ExponentialLR(optimizer, 0.9))
    with pytest.raises(InputError, match="`scheduler` made an ExponentialLR that is none of the"):
        alone("gpt", optimizer=sgd, scheduler=lambda own: ExponentialLR(optimizer, 0.9))
    with pytest.raises(InputError, match="`scheduler` made a NoneType"):
        alone("gpt", optimizer=sgd, scheduler=lambda own: None)
    with pytest.raises(InputError, match="wants a metric at each step"):
        alone("gpt", optimizer=sgd, scheduler=ReduceLROnPlateau)
    _, parallel = alone("gpt", optimizer=sgd, scheduler=FACTORIES["LambdaLR"])
    other = ExponentialLR(parallel.optimizer, 0.9)
    with pytest.raises(InputError, match="there are two schedulers"):
        parallel.fit([CASES["gpt"].batch(4)], steps=1, scheduler=other)
