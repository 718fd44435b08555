"""Several servers make each step of the same workers' gradients.

Each server hears from the workers in an order of its own. So the first server decides for all: for
the first workers whose gradients have come to every server. The others report to it what has come,
make the update that they are given, and no other; so a worker that is lost half way
counts nowhere, and no server hears of gradients that it lacks.

A worker's gradients are of one version on all servers or are left out: one server at least has gone
on from the older version, and takes them for late.
"""

from __future__ import annotations

import queue
import threading
from collections import Counter
from collections.abc import Callable, Mapping
from functools import partial

from engines.optional.async_updates.link import Link
from engines.optional.async_updates.server import ParameterServer
from profiles.errors import RankError

FIRST = 0
"""The rank of the server that decides."""
_LENGTH = 2  # of a report: the version, and the worker


class Agreement:
    """One server's side. What it changes it changes under the condition `changed`.

    Args:
        peers: links to the other servers on the first one, to the first one on the others.
        needed: workers of a step.
        failed: what to call with an error that ends the job.

    Attributes:
        gone: how the other end was lost; no step is made after it.
    """

    def __init__(
        self,
        core: ParameterServer,
        peers: Mapping[int, Link],
        *,
        needed: int,
        changed: threading.Condition,
        failed: Callable[[BaseException], None],
    ) -> None:
        self._core = core
        self._peers = dict(peers)
        self._decides = FIRST not in peers
        self._needed = needed
        self._changed = changed
        self._failed = failed
        self._came: Counter[int] = Counter()  # servers that have a worker's gradients
        self._complete: list[int] = []  # workers whose gradients all have, in this order
        # Nothing is sent while the condition is held: the other end may be about to send too.
        self._outgoing = {peer: queue.SimpleQueue[tuple[float, ...]]() for peer in peers}
        self.gone: RankError | None = None
        self._lacking = min(peers)
        self.threads = [
            threading.Thread(target=target, args=(peer,), daemon=True)
            for peer in peers
            for target in (self._hear, self._tell)
        ]
        for thread in self.threads:
            thread.start()

    def has(self, worker: int, version: int) -> None:
        """This server has the worker's gradients of `version`; the condition is held."""
        if self._decides:
            self._note(worker, version)
        else:
            self._outgoing[FIRST].put((version, worker))

    def lacking(self) -> int:
        """The server for which a step waits when all workers have come to this one."""
        return self._lacking

    def _note(self, worker: int, version: int) -> None:
        """On the first server: one more server has them."""
        core = self._core
        if version != core.version:
            return
        self._came[worker] += 1
        if self._came[worker] > len(self._peers):
            self._complete.append(worker)
        if len(self._complete) == self._needed:
            chosen, self._complete = self._complete, []
            self._came.clear()
            core.use(chosen)
            for outgoing in self._outgoing.values():
                outgoing.put((version, *chosen))

    def _hear(self, peer: int) -> None:
        length = _LENGTH if self._decides else 1 + self._needed
        try:
            while True:
                version, *workers = map(int, self._peers[peer].listen(length))
                with self._changed:
                    if self._decides:
                        self._note(workers[0], version)
                    else:
                        self._core.use(workers)
                    self._changed.notify_all()
        except RankError as error:
            self._lose(peer, error)
        except BaseException as error:  # of the optimizer, say
            self._failed(error)

    def _tell(self, peer: int) -> None:
        try:
            while message := self._outgoing[peer].get():
                self._peers[peer].send(message)
        except RankError as error:
            self._lose(peer, error)

    def _lose(self, peer: int, error: RankError) -> None:
        """At the end of a training that is no error, so steps tell what they lack."""
        with self._changed:
            self.gone, self._lacking = error, peer
            self._changed.notify_all()

    def endings(self) -> list[Callable[[], None]]:
        """Let the threads end; an empty message is the last one."""
        telling = [partial(outgoing.put, ()) for outgoing in self._outgoing.values()]
        return [*telling, *(link.hang_up for link in self._peers.values())]
