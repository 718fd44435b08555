"""Messages between a worker and a server: numbers, then tensors, in a group of these two ranks.

Gloo's sends and receives, so no code and no pickles travel. A pair has connections of its own:
where one rank is lost, the others' stay.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import Tensor

from engines.world import World
from profiles.errors import RankError

_NUMBERS, _TENSORS, _NO_MESSAGE = 1, 2, 3  # tags
# A server's wait for a worker to begin a message is bounded by the steps that it serves, which know
# the other workers; this one only has to outlast any pause between two steps.
_LISTENING_S = 7 * 24 * 3600.0


class Link:
    """One end of it; bytes are counted as they are handed to gloo, or were taken from it."""

    def __init__(self, group: dist.ProcessGroup, *, peer: int, world: World) -> None:
        self.peer = peer
        self.sent_bytes = 0
        self.received_bytes = 0
        self._group = group
        self._place = dist.get_group_rank(group, peer)
        self._world = world

    def send(self, numbers: Sequence[float], tensors: Sequence[Tensor] = ()) -> None:
        """Numbers, and tensors that the other end knows the shapes of.

        Raises:
            RankError: the other rank is gone, or does not take them in time.
        """
        self._send(torch.tensor(numbers, dtype=torch.float64), _NUMBERS)
        if tensors:
            self._send(torch.cat([_as_bytes(tensor) for tensor in tensors]), _TENSORS)

    def listen(self, count: int) -> list[float]:
        """The next `count` numbers, whenever they come; `RankError` if the other rank is gone."""
        return self._receive_numbers(count, _LISTENING_S)

    def receive_numbers(self, count: int) -> list[float]:
        """`count` numbers that are due.

        Raises:
            RankError: the other rank is gone, or did not answer in time.
        """
        return self._receive_numbers(count, self._world.timeout_s)

    def receive_tensors(self, like: Sequence[Tensor]) -> list[Tensor]:
        """Tensors of the shapes and dtypes of `like`, on their devices; errors as for numbers."""
        sizes = [tensor.nbytes for tensor in like]
        if not sum(sizes):
            return [torch.empty_like(tensor) for tensor in like]
        flat = torch.empty(sum(sizes), dtype=torch.uint8)
        self._receive(flat, _TENSORS, self._world.timeout_s)
        return [
            _from_bytes(part, tensor) for part, tensor in zip(flat.split(sizes), like, strict=True)
        ]

    def hang_up(self) -> None:
        """Close the connection, so that a wait on it ends: gloo has no abort, but a receive that
        runs out of time closes it. Nobody sends what is waited for here."""
        with suppress(RuntimeError):
            nothing = self._group.recv([torch.empty(1)], self._place, _NO_MESSAGE)
            nothing.wait(timedelta(milliseconds=1))

    def _receive_numbers(self, count: int, patience_s: float) -> list[float]:
        numbers = torch.empty(count, dtype=torch.float64)
        self._receive(numbers, _NUMBERS, patience_s)
        return [float(number) for number in numbers.tolist()]

    def _send(self, message: Tensor, tag: int) -> None:
        with self._named("did not take a message"):
            work = dist.isend(message, group=self._group, group_dst=self._place, tag=tag)
            assert work is not None
            work.wait(timedelta(seconds=self._world.timeout_s))
        self.sent_bytes += message.nbytes

    def _receive(self, message: Tensor, tag: int, patience_s: float) -> None:
        with self._named("did not answer"):
            work = dist.irecv(message, group=self._group, group_src=self._place, tag=tag)
            assert work is not None
            work.wait(timedelta(seconds=patience_s))
        self.received_bytes += message.nbytes

    @contextmanager
    def _named(self, what: str) -> Iterator[None]:
        """A wait that ends in vain names the rank that was waited for."""
        try:
            yield
        except RuntimeError as error:  # gloo's: nothing else is done in there
            late = "timed out" in str(error).lower()
            why = f"{what} within {self._world.timeout_s:.0f} s" if late else "is gone"
            raise RankError(
                f"rank {self.peer} {why}",
                where=f"rank {self._world.rank} of {self._world.size}, exchanging parameters",
                hints=[f"look at the output of rank {self.peer}"],
            ) from error


def links(servers: int, world: World) -> dict[int, Link]:
    """This rank's links by the rank at their other end; all ranks call it."""
    found = {}
    for server in range(servers):
        for worker in range(servers, world.size):
            timeout = timedelta(seconds=world.timeout_s)
            group = dist.new_group([server, worker], backend="gloo", timeout=timeout)
            if world.rank in (server, worker):
                peer = worker if world.rank == server else server
                found[peer] = Link(group, peer=peer, world=world)
    return found


def _as_bytes(tensor: Tensor) -> Tensor:
    return tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8)


def _from_bytes(part: Tensor, like: Tensor) -> Tensor:
    aligned = part.clone()  # a part of a message need not lie on the dtype's boundary
    return aligned.view(like.dtype).reshape(like.shape).to(like.device)
