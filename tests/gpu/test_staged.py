"""Messages of two ranks through main memory arrive; tried with tensors of the CPU."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from torch.distributed import _functional_collectives as functional

from tests.gpu.ranks import collectives, run_pair
from tests.gpu.staged import staged
from tests.workers import Pool

CPU = torch.device("cpu")


@pytest.mark.dist
def test_collectives_are_those_by_hand(pool: Pool) -> None:
    for results in pool.run(collectives, True, world_size=2):
        assert set(results.values()) == {""}, results


@pytest.mark.dist
@pytest.mark.parametrize(
    "settings",
    [
        "dp_shard=2 accumulation=2",
        "pp=2 microbatches=2 schedule=1f1b stages=blocks.1",
        "tp=2 sequence_parallel=true",
    ],
)
def test_two_ranks_train_as_plain_torch(pool: Pool, settings: str) -> None:
    rows = run_pair(pool, 2, "gpt, small", settings, is_staged=True)
    assert {row.term for row in rows} == {"loss", "gradients", "parameters after 3 steps"}
    assert not any(row.is_beyond for row in rows)


@pytest.mark.dist
def test_dtypes_and_reductions_that_gloo_does_not_know(pool: Pool) -> None:
    pool.run(beyond_gloo, world_size=2)


def beyond_gloo() -> None:
    group, mine = dist.group.WORLD, dist.get_rank() + 1.0
    assert group is not None
    narrow = torch.full((3, 2), mine, dtype=torch.float8_e4m3fn)
    with staged(CPU):
        mean = torch.full((2, 3), mine).t()
        dist.all_reduce(mean, op=dist.ReduceOp.AVG)
        dist.broadcast(narrow, src=1)
        short = torch.tensor([300, -300], dtype=torch.int16)
        dist.all_reduce(short)
        flag = torch.tensor([mine == 1.0, False])
        dist.all_reduce(flag, op=dist.ReduceOp.MAX)
        summed = functional.all_reduce(torch.full((3, 2), mine), "avg", group) + 0
    assert torch.equal(mean, torch.full((3, 2), 1.5))
    assert torch.equal(summed, torch.full((3, 2), 1.5))
    assert torch.equal(narrow.float(), torch.full((3, 2), 2.0))
    assert flag.tolist() == [True, False]
    assert short.tolist() == [600, -600]
    with pytest.raises(RuntimeError, match="Invalid scalar type"):  # as before
        dist.broadcast(narrow, src=1)


@pytest.mark.dist
def test_lists_of_tensors_go_to_the_ranks_they_are_for(pool: Pool) -> None:
    pool.run(lists, world_size=2)


def lists() -> None:
    rank, counts = dist.get_rank(), (2, 3)
    mine = counts[rank]
    first, second = torch.full((mine,), 1.0), torch.full((mine,), 2.0)

    def own(*sizes: int) -> list[torch.Tensor]:
        return [torch.full((size,), rank + 1.0) for size in sizes]

    with staged(CPU):
        came = [torch.empty(mine), torch.empty(mine)]
        dist.all_to_all(came, own(*counts))
        rows = torch.empty(2 * mine, 4)
        dist.all_to_all_single(rows, own(5)[0][:, None].repeat(1, 4), [mine, mine], [*counts])
        part = torch.empty(mine)
        dist.reduce_scatter(part, own(*counts))
        gathered = [torch.empty(2), torch.empty(2)] if rank == 1 else None
        dist.gather(own(2)[0], gathered, dst=1)
        scattered = torch.empty(2)
        dist.scatter(scattered, own(2, 2) if rank == 1 else None, src=1)
        reduced = own(2)[0]
        dist.reduce(reduced, dst=1)
    assert torch.equal(torch.cat(came), torch.cat([first, second]))
    assert torch.equal(rows[:, 0], torch.cat([first, second]))
    assert torch.equal(part, first + second)
    assert torch.equal(scattered, torch.full((2,), 2.0))
    assert reduced.tolist() == ([3.0, 3.0] if rank == 1 else [1.0, 1.0])
    if gathered is not None:
        assert torch.cat(gathered).tolist() == [1.0, 1.0, 2.0, 2.0]


@pytest.mark.dist
def test_messages_pass_one_another_and_are_there_once_waited_for(pool: Pool) -> None:
    pool.run(messages, world_size=2)


def messages() -> None:
    other = 1 - dist.get_rank()
    room = torch.zeros(2, 3).t()
    with staged(CPU):
        sent, received = dist.batch_isend_irecv(
            [
                dist.P2POp(dist.isend, torch.full((3, 2), other + 1.0), other),
                dist.P2POp(dist.irecv, room, other),
            ]
        )
        assert not room.any()
        received.wait()
        sent.wait()
        assert torch.equal(room, torch.full((3, 2), 2.0 - other))
        room.zero_()
        received.wait()
        assert not room.any()
