"""Messages between a worker and a server: numbers, then tensors, in a group of these two ranks.

Gloo's sends and receives, so no code and no pickles are sent. A pair has its own connections: where
one rank is lost, those of the others stay.
"""

from __future__ import annotations

import socket
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import Tensor

from engines.runtime.failures import first_failure, publish_failure
from engines.runtime.world import World, texts_of_ranks
from profiles.errors import RankError

_NUMBERS, _TENSORS, _NO_MESSAGE = 1, 2, 3  # tags
# A server's wait for the beginning of a message is bounded by the steps that it serves, which know
# the other workers; this bound only has to exceed any pause between two steps.
_LISTENING_S = 7 * 24 * 3600.0


class WorkerLink:
    """One end of a connection; bytes are counted when gloo has sent or received them.

    Args:
        who: name of the other end in errors.
        is_needed: nobody can go on without it; ranks that end for its loss must not be named as
            the cause.
    """

    def __init__(
        self, group: dist.ProcessGroup, *, peer: int, who: str, is_needed: bool, world: World
    ) -> None:
        self.peer = peer
        self.who = who
        self._is_needed = is_needed
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
        self.begin_to_send(numbers, tensors)()

    def begin_to_send(
        self, numbers: Sequence[float], tensors: Sequence[Tensor] = ()
    ) -> Callable[[], None]:
        """`send` in the background: the returned function waits until it is done."""
        messages = [(torch.tensor(numbers, dtype=torch.float64), _NUMBERS)]
        if tensors:
            messages += [(torch.cat([_as_bytes(tensor) for tensor in tensors]), _TENSORS)]
        waits = [self._begin(message, tag, sends=True) for message, tag in messages]

        def sent() -> None:
            for wait in waits:
                wait()

        return sent

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
        return self.begin_to_receive(like)()

    def begin_to_receive(self, like: Sequence[Tensor]) -> Callable[[], list[Tensor]]:
        """`receive_tensors` in the background: the returned function waits for them."""
        sizes = [tensor.nbytes for tensor in like]
        if not sum(sizes):
            return lambda: [torch.empty_like(tensor) for tensor in like]
        flat = torch.empty(sum(sizes), dtype=torch.uint8)
        wait = self._begin(flat, _TENSORS, sends=False)

        def received() -> list[Tensor]:
            wait()
            parts = zip(flat.split(sizes), like, strict=True)
            return [_from_bytes(part, tensor) for part, tensor in parts]

        return received

    def hang_up(self) -> None:
        """Close the connection, so that a wait on it ends: gloo has no abort, but a receive that
        times out closes it. Nobody sends the message that is waited for here."""
        with suppress(RuntimeError):
            nothing = self._group.recv([torch.empty(1)], self._place, _NO_MESSAGE)
            nothing.wait(timedelta(milliseconds=1))

    def _receive_numbers(self, count: int, patience_s: float) -> list[float]:
        numbers = torch.empty(count, dtype=torch.float64)
        self._begin(numbers, _NUMBERS, sends=False, patience_s=patience_s)()
        return [float(number) for number in numbers.tolist()]

    def _begin(
        self, message: Tensor, tag: int, *, sends: bool, patience_s: float | None = None
    ) -> Callable[[], None]:
        """Begin to send or receive a message; gloo keeps it until it is waited for."""
        failure = "did not take a message" if sends else "did not answer"
        bound = timedelta(seconds=patience_s or self._world.timeout_s)
        with self._named(failure):
            if sends:
                work = dist.isend(message, group=self._group, group_dst=self._place, tag=tag)
            else:
                work = dist.irecv(message, group=self._group, group_src=self._place, tag=tag)
        assert work is not None

        def wait() -> None:
            with self._named(failure):
                work.wait(bound)
            if sends:
                self.sent_bytes += message.nbytes
            else:
                self.received_bytes += message.nbytes

        return wait

    @contextmanager
    def _named(self, what: str) -> Iterator[None]:
        """Name the rank that was waited for in the error of a failed wait."""
        try:
            yield
        except RuntimeError as error:  # gloo's: nothing else is done in there
            late = "timed out" in str(error).lower()
            why = f"{what} within {self._world.timeout_s:.0f} s" if late else "is gone"
            text = f"{self.who} {why}"
            if self._is_needed:
                publish_failure(text)
                cause = first_failure()
                text += f": {cause}" * (cause not in ("", text))
            raise RankError(
                text,
                where=f"rank {self._world.rank} of {self._world.size}, exchanging parameters",
                hints=[f"look at the output of rank {self.peer}"],
            ) from error


def links(pairs: Iterable[tuple[int, int]], world: World, *, servers: int) -> dict[int, WorkerLink]:
    """This rank's links by the rank at their other end; all ranks call it, for all pairs."""
    made = {}
    hosts = texts_of_ranks("hosts", socket.gethostname(), world)
    timeout = timedelta(seconds=world.timeout_s)
    for one, other in pairs:
        group = dist.new_group([one, other], backend="gloo", timeout=timeout)
        if world.rank in (one, other):
            peer = other if world.rank == one else one
            is_server = peer < servers
            who = f"rank {peer} ({'a server' if is_server else 'a worker'}, on {hosts[peer]})"
            is_needed = (
                is_server and world.rank >= servers
            )  # at the end servers disconnect from each other
            made[peer] = WorkerLink(group, peer=peer, who=who, is_needed=is_needed, world=world)
    return made


def _as_bytes(tensor: Tensor) -> Tensor:
    return tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8)


def _from_bytes(part: Tensor, like: Tensor) -> Tensor:
    aligned = part.clone()  # a part of a message need not lie on the dtype's boundary
    return aligned.view(like.dtype).reshape(like.shape).to(like.device)
