"""The ranks of this job: joining, the device of a rank, and agreeing on one plan.

Every wait here is bounded, and a wait that runs out names the rank that was missing.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from engines.plan import Plan
from engines.runtime.activity import activity
from engines.runtime.data_place import earlier_end
from engines.runtime.failed_step import reported_failure
from engines.runtime.failures import (
    close_all_connections,
    first_failure,
    has_store,
    roll_call,
    wait_for_text,
    why_absent,
)
from engines.runtime.failures import is_lost_contact as is_lost_contact
from engines.runtime.failures import name_ranks as name_ranks
from engines.runtime.heartbeat import end_heartbeat, is_beating, start_heartbeat
from engines.runtime.rendezvous import attempt_store
from profiles.errors import InputError, PlanMismatchError, RankError
from profiles.record.bounds import MOST_TIMEOUT_S, require_positive
from profiles.torch_compat import bound_waits, default_store, start_all_reduce

DEFAULT_TIMEOUT_S = 600.0


@dataclass(frozen=True, slots=True)
class World:
    """This process among all: global rank, number of ranks, and the device it drives.

    `is_fake`: the other ranks do not exist, see `engines.runtime.fake_world`.
    """

    rank: int
    size: int
    device: torch.device
    timeout_s: float
    is_fake: bool = False


def join_world(*, timeout_s: float | None = None) -> World:
    """Join the job that the launcher started, or started again; alone without a launcher.

    Uses NCCL for CUDA tensors and gloo for CPU tensors. `timeout_s` bounds every wait of the job,
    ten minutes unless said. An existing process group is used; its collectives are bounded by
    `timeout_s` where that is given, else by their own timeout. From here on ranks give signs of
    life: see `engines.runtime.heartbeat`.

    Raises:
        InputError: the launcher's variables are incomplete, ranks share a GPU, or `timeout_s` is no
            time.
        RankError: a rank did not join in time.
    """
    if timeout_s is not None:
        require_positive(timeout_s, "timeout_s", most=MOST_TIMEOUT_S)
    if dist.group.WORLD is not None and timeout_s is not None:
        bound_waits(dist.group.WORLD, timedelta(seconds=timeout_s))
    timeout_s = DEFAULT_TIMEOUT_S if timeout_s is None else timeout_s
    if not dist.is_initialized() and "WORLD_SIZE" in os.environ:
        missing = [name for name in _LAUNCHER if name not in os.environ]
        if missing:
            raise InputError(
                f"WORLD_SIZE is set but {' and '.join(missing)} not: the launcher is incomplete",
                hints=["start the job with `torchrun --nproc-per-node N script.py`"],
            )
        _device(int(os.environ.get("LOCAL_RANK", os.environ["RANK"])))  # before NCCL takes one
        backend = "cpu:gloo,cuda:nccl" if torch.cuda.is_available() else "gloo"
        try:
            store, rank, size = attempt_store(timeout_s=timeout_s)
            if torch.cuda.is_available():
                require_own_gpu(store, rank)
            timeout = timedelta(seconds=timeout_s)
            dist.init_process_group(
                backend, store=store, rank=rank, world_size=size, timeout=timeout
            )
        except (dist.DistError, TimeoutError) as error:
            first = str(error).splitlines()[0]
            raise RankError(
                f"rank {os.environ['RANK']} of {os.environ['WORLD_SIZE']} could not join the job"
                f" within {timeout_s:.0f} s: {first}"
            ) from None
    if not dist.is_initialized():
        return World(rank=0, size=1, device=_device(0), timeout_s=timeout_s)
    local_rank = int(os.environ.get("LOCAL_RANK", dist.get_rank()))
    is_fake = dist.get_backend() == "fake"
    if not is_fake:
        start_heartbeat()
    return World(
        rank=dist.get_rank(),
        size=dist.get_world_size(),
        device=_device(local_rank),
        timeout_s=timeout_s,
        is_fake=is_fake,
    )


def require_own_gpu(store: dist.Store, rank: int) -> None:
    """Refuse ranks that share a GPU when they join: NCCL does in its first message.

    Launchers that show each rank one GPU alone call all of them 0, so that GPUs go by their ids.

    Raises:
        InputError: another rank has this rank's GPU.
    """
    device = torch.cuda.current_device()
    key = f"gpu {getattr(torch.cuda.get_device_properties(device), 'uuid', rank)}"
    first = store.compare_set(key, "", str(rank)).decode()
    if first == str(rank):
        return
    count, local = torch.cuda.device_count(), os.environ.get("LOCAL_WORLD_SIZE", "?")
    raise InputError(
        f"rank {rank} and rank {first} have the same GPU: NCCL wants one for each",
        where=f"{local} ranks on this node, {count} GPU{'s' * (count != 1)}",
        hints=[
            f"start {count} rank{'s' * (count != 1)} on this node: --nproc-per-node {count}",
            "or hide GPUs, and let ranks compute on the CPU: CUDA_VISIBLE_DEVICES=",
        ],
    )


@contextmanager
def rank_error_context(doing: str) -> Iterator[None]:
    """Around code with collectives: raise a broken connection as a `RankError`.

    A failed rank closes its connections or stops answering; the others notice in their next
    collective, after the group's timeout at the latest. Then they call the roll. (Where
    NCCL waits in vain its watchdog ends the process instead, with the collective in its log.)

    Raises:
        RankError: names the rank that is gone or did not answer; torch's own error is the cause.
    """
    try:
        with activity.doing(doing):
            yield
    except RuntimeError as error:
        if not is_lost_contact(error):
            raise
        failure = first_failure() or reported_failure() or str(earlier_end(activity.data) or "")
        failure = failure or _missing()
        raise RankError(
            f"lost contact with another rank while {doing}{failure and f': {failure}'}",
            where=f"rank {dist.get_rank()} of {dist.get_world_size()}",
            hints=["look at the output of the other ranks: one failed first"],
        ) from error


def _missing() -> str:
    """The ranks that this rank waited for in vain; empty where all have lost contact alike."""
    if is_beating():
        close_all_connections()  # in a ring, others wait for this rank alone
    absent = roll_call()
    if not has_store():
        return "the rendezvous store is gone too, as a rule on the node of rank 0"
    return f"{name_ranks(absent)} did not come to it" if absent else ""


def leave_world() -> None:
    """Leave the job that `join_world` joined; nothing to do alone."""
    end_heartbeat()
    if dist.is_initialized():
        dist.destroy_process_group()


_LAUNCHER = ("RANK", "MASTER_ADDR", "MASTER_PORT")


def _device(local_rank: int) -> torch.device:
    if not torch.cuda.is_available():
        return torch.device("cpu")
    device = torch.device("cuda", local_rank % torch.cuda.device_count())
    torch.cuda.set_device(device)
    return device


def require_same_plan(plan: Plan, world: World) -> None:
    """Compare the plans of all ranks before the first collective; see `require_same`."""
    require_same("plan", f"{plan.fingerprint[:8]} {plan}", world)


def require_same(what: str, text: str, world: World) -> None:
    """Compare the ranks' `text`: a short name, then the content.

    Raises:
        PlanMismatchError: names the ranks of each text.
        RankError: names the ranks that did not answer within `world.timeout_s`.
    """
    texts = texts_of_ranks(what, text, world)
    if len(set(texts)) > 1:
        names = {rank: text.split()[0] for rank, text in enumerate(texts)}
        raise PlanMismatchError(
            f"ranks disagree on the {what}: {say_holders(names)}",
            where="\n".join(
                ": ".join(text.split(" ", maxsplit=1)) for text in dict.fromkeys(texts)
            ),
            hints=[
                f"give every rank the same {what}: one plan.json on a shared path, or one string"
            ],
        )


def texts_of_ranks(what: str, text: str, world: World) -> list[str]:
    """Every rank's `text`, in rank order, on all ranks; all of them call it with the same `what`.

    They go through the rendezvous store, not through a collective, so that ranks which would run
    different collectives raise instead of hanging.

    Raises:
        RankError: names the ranks that did not answer within `world.timeout_s`.
    """
    if world.size == 1:
        return [text]
    store = default_store()
    generation = store.add(f"advisor/{what}/calls/{world.rank}", 1)
    key = f"advisor/{what}/{generation}/"
    store.set(f"{key}{world.rank}", text)
    texts: list[str] = []
    absent: list[int] = []
    for rank in range(world.size):
        # Once the wait for one rank timed out, the others have had the same time.
        patience_s = 1.0 if absent else world.timeout_s
        known = wait_for_text(store, f"{key}{rank}", rank=rank, timeout_s=patience_s)
        if known is None:
            absent.append(rank)
            continue
        texts.append(known)
    if absent:
        raise RankError(
            why_absent(absent[0])
            or f"{name_ranks(absent)} did not answer within {world.timeout_s:.0f} s",
            where=f"rank {world.rank} of {world.size}, comparing the {what}",
            hints=["look at the output of the missing ranks: they failed earlier or never started"],
        )
    return texts


def say_holders(texts: Mapping[int, str]) -> str:
    """Say which ranks have which text: "ranks 0-2 have (64, 32), rank 3 has (64, 16)"."""
    holders: dict[str, list[int]] = {}
    for rank, text in texts.items():
        holders.setdefault(text, []).append(rank)
    return ", ".join(
        f"{name_ranks(ranks)} {'has' if len(ranks) == 1 else 'have'} {text}"
        for text, ranks in holders.items()
    )


def sum_over_ranks(
    values: list[float], world: World, *, group: dist.ProcessGroup | None = None
) -> list[float]:
    """Element-wise sums of small host numbers over all ranks, or over those of `group`.

    Sent by the CPU where the group has a CPU backend, so that no GPU is waited for.
    """
    return _reduce(values, world, dist.ReduceOp.SUM, group)()


def start_sum_over_ranks(values: list[float], world: World) -> Callable[[], list[float]]:
    """`sum_over_ranks` that is waited for by calling the result."""
    return _reduce(values, world, dist.ReduceOp.SUM, None)


def largest_over_ranks(values: list[float], world: World) -> list[float]:
    """Element-wise maxima of small host numbers over all ranks; see `sum_over_ranks`."""
    return _reduce(values, world, dist.ReduceOp.MAX, None)()


def _reduce(
    values: list[float], world: World, operation: Any, group: dist.ProcessGroup | None
) -> Callable[[], list[float]]:
    if world.size == 1:
        return lambda: values
    on_cpu = "gloo" in str(dist.get_backend_config(group))
    tensor = torch.tensor(values, dtype=torch.float64, device="cpu" if on_cpu else world.device)
    work = start_all_reduce(tensor, operation, group)

    def finish() -> list[float]:
        if work is not None:  # of fake groups there is none
            work.wait()
        return [float(value) for value in tensor.tolist()]

    return finish
