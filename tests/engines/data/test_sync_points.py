"""The three points where the ranks of a DDP job meet: constructor, forward, backward. A rank that
does not come to one is named to the others within the timeout, and those who come late hear it."""

from __future__ import annotations

import time

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from engines.apply import apply_plan
from engines.parallel import ParallelModel
from engines.plan import Plan
from engines.runtime.failures import ROLL_CALL_S
from engines.runtime.world import World, join_world
from profiles.errors import RankError
from tests.engines.cases import CASES, cpu_ranks, profile_of
from tests.engines.parity import local_rows
from tests.workers import Pool

TIMEOUT_S = 1.0
ABSENT_S = TIMEOUT_S + ROLL_CALL_S + 1.0
LATE = 1


def _without_one(point: str) -> tuple[str, float]:
    """The error of a rank when rank 1 does not reach `point` in time, and after how long."""
    case = CASES["gpt"]
    model = case.build()
    profile, batch = profile_of(case, model), case.batch(6)
    is_late = dist.get_rank() == LATE

    def apply(world: World) -> ParallelModel:
        return apply_plan(
            model,
            Plan.parse("dp_replicate=3"),
            profile=profile,
            cluster=cpu_ranks(3),
            loss_fn=case.loss_fn,
            world=world,
        )

    if point != "constructor":
        parallel = apply(join_world())
        batch = local_rows(parallel, batch, 6)
        parallel.train_step(batch)
        if point == "backward" and is_late:
            block = parallel.module.get_submodule("blocks.1")
            block.register_forward_hook(lambda module, args, x: _Sleeps.apply(x))
    dist.barrier()  # the first time takes longer on one rank than on another
    world = join_world(timeout_s=TIMEOUT_S)
    began = time.monotonic()
    if is_late and point != "backward":
        time.sleep(ABSENT_S)
    try:
        if point == "constructor":
            apply(world)
        else:
            parallel.train_step(batch)
    except RankError as error:
        return error.what, time.monotonic() - began
    return "no error", time.monotonic() - began


class _Sleeps(torch.autograd.Function):
    """A backward that takes too long."""

    @staticmethod
    def forward(ctx: object, value: Tensor) -> Tensor:
        return value.clone()

    @staticmethod
    def backward(ctx: object, *gradients: Tensor) -> Tensor:
        time.sleep(ABSENT_S)
        return gradients[0]


@pytest.mark.dist
@pytest.mark.parametrize(
    ("point", "said"),
    [
        ("constructor", "rank 1 did not answer within 1 s"),
        (
            "forward",
            "lost contact with another rank while counting the rows of the batch: rank 1 did not"
            " come"
            " to it",
        ),
        (
            "backward",
            "lost contact with another rank while exchanging gradients: rank 1 did not come to it",
        ),
    ],
)
def test_a_missing_rank_is_named_within_the_timeout(pool: Pool, point: str, said: str) -> None:
    results = pool.run(_without_one, point, world_size=3, timeout_s=40)
    for rank, (text, seconds) in enumerate(results):
        if rank != LATE:
            assert text == said
            # The wait, the roll call, and what a step takes on a machine with other work.
            assert seconds < TIMEOUT_S + ROLL_CALL_S + 4.0
        elif point != "constructor":  # there it finds what the others left, and goes on alone
            assert text.startswith("lost contact with another rank while ")
            assert "did not come" not in text  # all others are there: it was late itself


def _existing_group() -> float:
    """Seconds until a rank gives up, in a group whose maker allowed minutes."""
    world = join_world(timeout_s=0.5)
    if world.rank == LATE:
        time.sleep(2.0)
        return 0.0
    began = time.monotonic()
    with pytest.raises(RuntimeError):
        dist.all_reduce(torch.zeros(1))
    return time.monotonic() - began


@pytest.mark.dist
def test_a_given_timeout_bounds_an_existing_process_group(pool: Pool) -> None:
    results = pool.run(_existing_group, world_size=2, timeout_s=40)
    assert 0.4 < results[0] < 1.9
