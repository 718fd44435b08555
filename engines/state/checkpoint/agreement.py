"""Messages of ranks that save or load together: bytes over the group, results over the store."""

from __future__ import annotations

import json
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Protocol

import torch
import torch.distributed as dist

from engines.runtime.failures import wait_for_text, why_absent
from engines.runtime.world import World
from profiles.errors import AdvisorError, FileError, RankError
from profiles.torch_compat import default_store, second_line


class Peers(Protocol):
    """The ranks of a save or a load, this one among them; `ranks` are global, the first leads."""

    ranks: list[int]
    rank: int

    @property
    def leads(self) -> bool: ...

    def gather(self, value: Any) -> list[Any] | None: ...

    def broadcast(self, value: Any) -> Any: ...


class Alone:
    """One process, or one that acts without the others."""

    def __init__(self, rank: int = 0) -> None:
        self.ranks, self.rank = [rank], rank

    leads = True

    def gather(self, value: Any) -> list[Any] | None:
        return [value]

    def broadcast(self, value: Any) -> Any:
        return value


class GroupOfRanks:
    """Ranks of a process group, None for all; values travel as compressed JSON, not as pickles."""

    def __init__(self, world: World, group: dist.ProcessGroup | None) -> None:
        self._group, self._world = group, world
        self.ranks = dist.get_process_group_ranks(group or dist.group.WORLD)
        self.rank = world.rank
        on_cpu = "gloo" in str(dist.get_backend_config(group))
        self._device = torch.device("cpu") if on_cpu else world.device

    @property
    def leads(self) -> bool:
        return self.rank == self.ranks[0]

    def gather(self, value: Any) -> list[Any] | None:
        """The values of all ranks on the first, in their order; None elsewhere."""
        content = _packed(value)
        sizes = [torch.zeros(1, dtype=torch.int64, device=self._device) for _ in self.ranks]
        dist.all_gather(sizes, torch.tensor([len(content)], device=self._device), group=self._group)
        longest = max(int(size) for size in sizes)
        padded = torch.zeros(longest, dtype=torch.uint8, device=self._device)
        padded[: len(content)] = content.to(self._device)
        into = [torch.empty_like(padded) for _ in self.ranks] if self.leads else None
        dist.gather(padded, into, group=self._group, group_dst=0)
        if into is None:
            return None
        return [_unpacked(each[: int(size)]) for each, size in zip(into, sizes, strict=True)]

    def broadcast(self, value: Any) -> Any:
        """The first rank's value, on all."""
        content = _packed(value) if self.leads else torch.empty(0, dtype=torch.uint8)
        size = torch.tensor([len(content)], device=self._device)
        dist.broadcast(size, group=self._group, group_src=0)
        sent = torch.empty(int(size), dtype=torch.uint8, device=self._device)
        if self.leads:
            sent.copy_(content)
        dist.broadcast(sent, group=self._group, group_src=0)
        return _unpacked(sent)


def _packed(value: Any) -> torch.Tensor:
    content = zlib.compress(json.dumps(value).encode(), level=1)
    return torch.frombuffer(bytearray(content), dtype=torch.uint8)


def _unpacked(content: torch.Tensor) -> Any:
    return json.loads(zlib.decompress(content.cpu().numpy().tobytes()))


def peers_of(world: World, group: dist.ProcessGroup | None) -> Peers:
    """The ranks of `group`, None for all ranks of the job."""
    if world.size == 1 or world.is_fake:
        return Alone(world.rank)
    return GroupOfRanks(world, group)


def on_first(peers: Peers, work: Callable[[], Any]) -> Any:
    """The result of `work` on the first rank, as JSON gives it; where it fails all ranks raise.

    Raises:
        FileError: `work` failed, on the first rank with its own error.
    """
    outcome: dict[str, Any] = {}
    failure: Exception | None = None
    if peers.leads:
        try:
            outcome = {"result": work()}
        except (AdvisorError, OSError) as error:
            failure = error if isinstance(error, AdvisorError) else FileError(str(error))
            outcome = {"failure": str(error).splitlines()[0]}
    outcome = peers.broadcast(outcome)
    if failure is not None:
        raise failure
    if "failure" in outcome:
        raise FileError(f"rank {peers.ranks[0]}: {outcome['failure']}")
    return outcome["result"]


@contextmanager
def all_peers_succeed(peers: Peers, doing: str) -> Iterator[None]:
    """Around work without messages: where it fails on one rank, all raise.

    Raises:
        FileError: names the ranks that failed, with the first one's error.
    """
    failure: Exception | None = None
    try:
        yield
    except (AdvisorError, OSError) as error:
        failure = error if isinstance(error, AdvisorError) else FileError(f"{doing}: {error}")
    every = peers.gather("" if failure is None else str(failure).splitlines()[0])
    failed = {}
    if every is not None:
        failed = {str(r): text for r, text in zip(peers.ranks, every, strict=True) if text}
    failed = peers.broadcast(failed)
    if failure is not None:
        raise failure
    if failed:
        rank, text = next(iter(failed.items()))
        raise FileError(f"{doing}: rank {rank}: {text}")


class Results:
    """Results of ranks that work on by themselves, in threads too: over the rendezvous store.

    By a connection of its own: who waits for a rank that died must not keep the training from
    the store, where it looks for the name of that rank.
    """

    def __init__(self, peers: Peers, name: str) -> None:
        self._peers, self._key = peers, f"advisor/checkpoint/{name}/"
        self._own: Any = None
        if not isinstance(peers, Alone):
            # A wait of a thread would keep the training from the store.
            self._store = second_line(default_store())

    def publish(self, value: Any) -> None:
        """Let the first rank collect `value`, or all ranks where the first one announces it."""
        if isinstance(self._peers, Alone):
            self._own = value
            return
        self._store.set(f"{self._key}{self._peers.rank}", json.dumps(value))

    def collect(self, *, timeout_s: float) -> list[Any]:
        """The values of all ranks, in their order.

        Raises:
            RankError: names the rank that did not publish in time.
        """
        if isinstance(self._peers, Alone):
            return [self._own]
        return [self._wait(str(rank), rank, timeout_s) for rank in self._peers.ranks]

    def announce(self, value: Any) -> None:
        """Let all ranks `hear` it."""
        if not isinstance(self._peers, Alone):
            self._store.set(f"{self._key}end", json.dumps(value))

    def hear(self, *, timeout_s: float) -> Any:
        """Return what the first rank announced."""
        return self._wait("end", self._peers.ranks[0], timeout_s)

    def _wait(self, key: str, rank: int, timeout_s: float) -> Any:
        key = f"{self._key}{key}"
        text = wait_for_text(self._store, key, rank=rank, timeout_s=timeout_s)
        if text is None:
            raise RankError(
                why_absent(rank, self._store)
                or f"rank {rank} did not finish its part of a checkpoint within {timeout_s:.0f} s",
                where=f"rank {self._peers.rank}, saving",
                hints=[f"look at the output of rank {rank}"],
            )
        return json.loads(text)
