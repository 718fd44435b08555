"""The running job as the bench sees it: its ranks, what is timed, and how they agree."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from datetime import timedelta

import torch
import torch.distributed as dist

from profiles.errors import InputError, RankError
from profiles.machine.bench.heart import Absent, absent_ranks, beating
from profiles.torch_compat import all_gather_single, default_store

# What a rank says to all others, in bytes: a host's name has 64 at most (POSIX HOST_NAME_MAX).
WORD_BYTES = 256


@dataclass(frozen=True, slots=True)
class Job:
    """One rank among all.

    Attributes:
        device: what is timed: a GPU where the job has NCCL, else the processor.
        group: all ranks, with a bound on every wait; for what the ranks tell each other. None where
            there is one.
        group_device: where the tensors of `group` live.
        patience: that bound.
        began_s: `time.perf_counter()` at the start.
    """

    rank: int
    ranks: int
    device: torch.device
    group: dist.ProcessGroup | None
    group_device: torch.device
    patience: timedelta
    began_s: float

    def slowest(self, values: Sequence[float]) -> list[float]:
        """Element-wise maximum over all ranks: the same on every rank, so they decide alike."""
        if self.group is None:
            return list(values)
        tensor = torch.tensor(values, dtype=torch.float64, device=self.group_device)
        dist.all_reduce(tensor, op=dist.ReduceOp.MAX, group=self.group)
        return [float(value) for value in tensor.tolist()]

    def fastest(self, values: Sequence[float]) -> list[float]:
        """Element-wise minimum over all ranks."""
        return [-value for value in self.slowest([-value for value in values])]

    def barrier(self) -> None:
        """Wait until every rank has finished what it does."""
        self.finish()
        self.slowest([0.0])

    def finish(self) -> None:
        """Wait for this rank's own GPU."""
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)

    def elapsed_s(self) -> float:
        """Seconds since the start, the slowest rank's."""
        return self.slowest([time.perf_counter() - self.began_s])[0]

    def of_rank(self, source: int, text: str) -> str:
        """That rank's text on every rank."""
        if self.group is None:
            return text
        payload = torch.tensor(list(text.encode()), dtype=torch.uint8, device=self.group_device)
        size = torch.tensor([payload.numel()], device=self.group_device)
        dist.broadcast(size, src=source, group=self.group)
        if self.rank != source:
            payload = torch.empty(int(size.item()), dtype=torch.uint8, device=self.group_device)
        dist.broadcast(payload, src=source, group=self.group)
        return bytes(payload.tolist()).decode()

    def of_all(self, word: str) -> list[str]:
        """Every rank's word, in rank order; no longer than `WORD_BYTES`."""
        if self.group is None:
            return [word]
        said = word.encode()[:WORD_BYTES].ljust(WORD_BYTES, b"\0")
        mine = torch.tensor(list(said), dtype=torch.uint8, device=self.group_device)
        heard = torch.empty(self.ranks * WORD_BYTES, dtype=torch.uint8, device=self.group_device)
        all_gather_single(heard, mine, group=self.group)
        rows = heard.view(self.ranks, WORD_BYTES).tolist()
        return [bytes(row).rstrip(b"\0").decode(errors="replace") for row in rows]


@contextmanager
def joined(*, patience_s: float) -> Iterator[Job]:
    """This rank's part in a job whose process group exists; what breaks in it names the rank.

    A process without a process group is a job of one.

    Raises:
        RankError: a rank did not come or answer within `patience_s`, or died.
    """
    began, patience = time.perf_counter(), timedelta(seconds=patience_s)
    if not dist.is_initialized() or dist.get_world_size() == 1:
        device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
        yield Job(0, 1, device, None, device, patience, began)
        return
    rank, ranks, store = dist.get_rank(), dist.get_world_size(), default_store()
    device, group_device = timed_devices(str(dist.get_backend_config()))
    with ExitStack() as stack:
        try:
            key = f"bench/{store.add(f'bench/turn/{rank}', 1)}/heart"
            stack.enter_context(beating(store, key, rank))
        except RuntimeError as error:  # torch's own: the store's host is gone
            raise _broken(error, time.perf_counter() - began, None) from error
        group: dist.ProcessGroup | None = None
        try:
            group = dist.new_group(timeout=patience)
            assert group is not None
            yield Job(rank, ranks, device, group, group_device, patience, began)
        except RuntimeError as error:  # torch's own: a timeout, a closed connection, no memory
            waited = time.perf_counter() - began
            raise _broken(error, waited, absent_ranks(store, key, ranks)) from error
        finally:
            if group is not None:
                dist.destroy_process_group(group)


def require_group() -> None:
    """
    Raises:
        InputError: there is no process group.
    """
    if not dist.is_initialized():
        raise InputError(
            "the bench needs a process group",
            hints=["start it with `torchrun --nproc-per-node N`, and init_process_group first"],
        )


def timed_devices(backends: str) -> tuple[torch.device, torch.device]:
    """Devices that are timed and that hold the ranks' messages, from the job's backends.

    >>> timed_devices("cpu:gloo,cuda:gloo")
    (device(type='cpu'), device(type='cpu'))
    """
    if "nccl" not in backends or not torch.cuda.is_available():
        return torch.device("cpu"), torch.device("cpu")
    here = torch.device("cuda", torch.cuda.current_device())
    return here, torch.device("cpu") if "gloo" in backends else here


def _broken(error: RuntimeError, waited_s: float, absent: Absent | None) -> RankError:
    first = (str(error).splitlines() or [type(error).__name__])[0]
    rank, ranks = dist.get_rank(), dist.get_world_size()
    if absent is None:
        who = "the process that holds the rendezvous store (rank 0's, or its launcher) is gone"
    elif absent.silent:
        who = f"{_named(absent.silent)} went silent"
    elif absent.left:
        who = f"{_named(absent.left)} stopped with an error of its own"
    else:
        who = "all ranks still answer"
    named = absent is not None and (absent.silent or absent.left)
    return RankError(
        f"the bench broke off after {waited_s:.0f} s: {who}",
        where=f"rank {rank} of {ranks}: {first}",
        hints=[f"see what {'that' if named else 'each'} rank printed last"],
    )


def _named(ranks: Sequence[int]) -> str:
    return f"rank{'s' if len(ranks) > 1 else ''} {', '.join(map(str, ranks))}"
