"""Ranks that share one device, and one rank under NCCL.

NCCL refuses two ranks on one device, so that there it is one: every collective is made, of one.
gloo lets two ranks share a device, but takes CUDA tensors for all-reduces and broadcasts alone, as
in DDP. Else what two ranks send each other goes through main memory, see `tests.gpu.staged`: each
kernel and copy on the device, and its stream, is as among devices of their own.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator

import torch
import torch.distributed as dist
from torch import Tensor

from engines.optional.aggregation.aggregate import aggregate
from engines.plan import Aggregation
from engines.runtime.world import join_world, largest_over_ranks, sum_over_ranks
from profiles.machine.bench import bench
from profiles.machine.probe import probe
from profiles.torch_compat import all_gather_single, reduce_scatter_single
from tests.gpu.case import Case
from tests.gpu.exactness import compared
from tests.gpu.results import Row, Unit
from tests.gpu.setting import Setting
from tests.gpu.staged import staged
from tests.workers import Pool

NCCL, GLOO = "cpu:gloo,cuda:nccl", "cpu:gloo,cuda:gloo"
LIMIT_S = 75.0
ALONE = (
    ("gpt", "zero=3 accumulation=2"),
    ("gpt", "zero=1 precision=bf16"),
    ("gpt", "zero=3 offload=states"),
)
GLOO_PAIR = ("gpt", "dp_replicate=2")
"""By gloo as it is."""
PAIRS = (
    ("gpt", "dp_replicate=2"),
    ("gpt", "dp_shard=2 accumulation=2"),
    ("gpt", "dp_replicate=2 zero=1"),
    ("gpt", "tp=2"),
    ("gpt", "tp=2 sequence_parallel=true"),
    ("gpt", "pp=2 microbatches=2 schedule=1f1b stages=blocks.1"),
    ("gpt", "dp_replicate=2 aggregation=ring"),
    ("gpt", "dp_replicate=2 precision=bf16 compression=bf16"),
    ("gpt", "cp=2"),
    ("resnet-batch-norm", "dp_replicate=2 sync_batch_norm=true"),
    ("gpt", "dp_shard=2 offload=states"),
    ("gpt", "dp_shard=2 precision=fp8"),
    ("gpt", "tp=2 sequence_parallel=true precision=fp8"),
)
SMALL_PAIRS = (("gpt, small", "dp_replicate=2"),)


def cases(*, is_small: bool) -> list[Case]:
    """Pools of CUDA ranks start anew for each backend; on a CPU the kept pool of the tests can be
    given to `run_pair`."""
    if is_small:
        return []
    return [
        Case("1 rank, nccl: collectives", functools.partial(_collected, 1, NCCL), LIMIT_S),
        Case("1 rank, nccl: bench", functools.partial(_benched, 1, NCCL), LIMIT_S),
        *(
            Case(
                f"1 rank, nccl: {name}, {settings}",
                functools.partial(_compared, 1, NCCL, name, settings),
                LIMIT_S,
            )
            for name, settings in ALONE
        ),
        *(
            Case(
                f"2 ranks, {'staged' if is_staged else 'gloo'}: {name}, {settings}",
                functools.partial(_compared, 2, GLOO, name, settings, is_staged=is_staged),
                LIMIT_S,
            )
            for name, settings, is_staged in (
                (*GLOO_PAIR, False),
                *((*pair, True) for pair in PAIRS),
            )
        ),
        Case(
            "2 ranks, staged: collectives",
            functools.partial(_collected, 2, GLOO, is_staged=True),
            LIMIT_S,
        ),
    ]


POOLED = ("1 rank,", "2 ranks,")
"""How the names of these cases begin."""
_POOLS: dict[tuple[int, str], Pool] = {}


def _pool(ranks: int, backend: str) -> Pool:
    """Kept for the next case: a rank imports torch and makes a context for seconds."""
    if (ranks, backend) not in _POOLS:
        for other in _POOLS.values():
            other.close()
        _POOLS.clear()
        _POOLS[ranks, backend] = Pool(ranks, backend=backend)
    return _POOLS[ranks, backend]


def close_pools() -> None:
    """End the ranks that are left."""
    for pool in _POOLS.values():
        pool.close()
    _POOLS.clear()


def _compared(
    ranks: int,
    backend: str,
    name: str,
    settings: str,
    setting: Setting,
    *,
    is_staged: bool = False,
) -> Iterator[Row]:
    yield from run_pair(_pool(ranks, backend), ranks, name, settings, is_staged=is_staged)


def run_pair(
    pool: Pool, ranks: int, name: str, settings: str, *, is_staged: bool = False
) -> list[Row]:
    """The worst of the ranks, row by row."""
    of_ranks = pool.run(
        _rows_of_rank, name, settings, is_staged, world_size=ranks, timeout_s=LIMIT_S - 5
    )
    return [max(rows, key=lambda row: row.measured) for rows in zip(*of_ranks, strict=True)]


def _rows_of_rank(name: str, settings: str, is_staged: bool) -> list[Row]:
    device = join_world().device
    torch.backends.cuda.matmul.allow_tf32 = False
    torch.backends.cudnn.allow_tf32 = False
    with staged(device) if is_staged else contextlib.nullcontext():
        return compared(name, settings, device)


def _collected(
    ranks: int, backend: str, setting: Setting, *, is_staged: bool = False
) -> Iterator[Row]:
    of_ranks = _pool(ranks, backend).run(
        collectives, is_staged, world_size=ranks, timeout_s=LIMIT_S - 5
    )
    for name, outcome in of_ranks[0].items():
        others = [results[name] for results in of_ranks[1:]]
        text = next((t for t in (outcome, *others) if t), "")
        yield Row(term=name, unit=Unit.ERROR, measured=float(bool(text)), limit=0.0, note=text)


def collectives(is_staged: bool = False) -> dict[str, str]:
    """Every collective that the engines call, on tensors of the device; what was wrong with it.

    Each rank has its number plus one in every element, so that results follow by hand.
    """
    world = join_world()
    ranks, mine, device = world.size, world.rank + 1.0, world.device
    total = ranks * (ranks + 1) / 2

    def full(value: float, count: int = 4) -> Tensor:
        return torch.full((count,), value, device=device)

    def all_reduce() -> bool:
        tensor = full(mine)
        dist.all_reduce(tensor)
        return torch.equal(tensor, full(total))

    def all_gather() -> bool:
        tensor = full(0.0, 4 * ranks)
        all_gather_single(tensor, full(mine))
        return torch.equal(tensor, torch.cat([full(r + 1.0) for r in range(ranks)]))

    def reduce_scatter() -> bool:
        tensor = full(0.0)
        reduce_scatter_single(tensor, full(mine, 4 * ranks))
        return torch.equal(tensor, full(total))

    def all_to_all() -> bool:
        tensor = full(0.0, 4 * ranks)
        dist.all_to_all_single(tensor, full(mine, 4 * ranks))
        return torch.equal(tensor, torch.cat([full(r + 1.0) for r in range(ranks)]))

    def broadcast() -> bool:
        tensor = full(mine)
        dist.broadcast(tensor, src=0)
        return torch.equal(tensor, full(1.0))

    def asynchronous() -> bool:
        tensor = full(mine)
        work = dist.all_reduce(tensor, async_op=True)
        assert work is not None
        work.wait()
        return torch.equal(tensor, full(total))

    def ring() -> bool:
        return ranks == 1 or torch.equal(aggregate(full(mine), kind=Aggregation.RING), full(total))

    def host_numbers() -> bool:
        return sum_over_ranks([mine], world) == [total] and largest_over_ranks([mine], world) == [
            float(ranks)
        ]

    def barrier() -> bool:
        dist.barrier()
        return True

    wanted: dict[str, Callable[[], bool]] = {
        "all-reduce": all_reduce,
        "all-reduce, asynchronous": asynchronous,
        "all-gather": all_gather,
        "reduce-scatter": reduce_scatter,
        "all-to-all": all_to_all,
        "broadcast": broadcast,
        "sends of a ring": ring,
        "numbers of the host": host_numbers,
        "barrier": barrier,
    }
    results = {}
    with staged(device) if is_staged else contextlib.nullcontext():
        for name, work in wanted.items():
            try:
                results[name] = "" if work() else "another result"
            except RuntimeError as error:
                results[name] = (str(error).splitlines() or ["?"])[0][:200]
    return results


def _benched(ranks: int, backend: str, setting: Setting) -> Iterator[Row]:
    """The bench inside a group times the GPU: its rates are those of the bench without one."""
    (rate,) = _pool(ranks, backend).run(_benched_rate, world_size=1, timeout_s=LIMIT_S - 5)
    alone = setting.bench or bench(setting.sheet, budget_s=5.0)
    wanted = alone.device.memory_bandwidth_bytes_per_s.value
    yield Row(
        term="memory bandwidth, of the one without a group",
        unit=Unit.ERROR,
        measured=abs(rate / wanted - 1),
        limit=0.15,
    )


def _benched_rate() -> float:
    join_world()
    return bench(probe(), budget_s=5.0).device.memory_bandwidth_bytes_per_s.value
