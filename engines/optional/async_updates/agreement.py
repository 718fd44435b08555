"""Agreement of several servers on the workers of each step.

Gradients reach each server in another order. So the first server decides for all: it takes the
first workers whose gradients have reached every server. The others report arrivals to it, and make
the updates that it announces, no others; so a worker that is lost half way counts nowhere, and no
server has to update by gradients that it lacks.

A worker's gradients are of one version on all servers or are left out: at least one server has
finished the older version, and takes them for late.
"""

from __future__ import annotations

import queue
import threading
from collections import Counter
from collections.abc import Callable, Mapping
from functools import partial

from engines.optional.async_updates.link import WorkerLink
from engines.optional.async_updates.server import ParameterServer
from profiles.errors import RankError

FIRST = 0
"""The rank of the server that decides."""
_LENGTH = 2  # of a report: the version, and the worker


class Agreement:
    """One server's side; it changes state under the condition `changed` only.

    Args:
        peers: links to the other servers on the first one, to the first one on the others.
        needed: workers of a step.
        failed: called with an error that ends the job.

    Attributes:
        gone: the error of a lost peer; no step is made after it.
    """

    def __init__(
        self,
        core: ParameterServer,
        peers: Mapping[int, WorkerLink],
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
        # Nothing is sent under the condition: the other end may be about to send too.
        self._outgoing = {peer: queue.SimpleQueue[tuple[float, ...]]() for peer in peers}
        self.gone: RankError | None = None
        self._lacking = min(peers)
        self.threads = [
            threading.Thread(target=target, args=(peer,), daemon=True)
            for peer in peers
            for target in (self._receive, self._send)
        ]
        for thread in self.threads:
            thread.start()

    def report(self, worker: int, version: int) -> None:
        """Report that this server has the worker's gradients of `version`, under the condition."""
        if self._decides:
            self._note(worker, version)
        else:
            self._outgoing[FIRST].put((version, worker))

    def lacking(self) -> int:
        """The server that a step waits for when this one has all gradients."""
        return self._lacking

    def _note(self, worker: int, version: int) -> None:
        """Count one more server that has the gradients, on the first server."""
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

    def _receive(self, peer: int) -> None:
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
            self._drop(peer, error)
        except BaseException as error:  # of the optimizer, say
            self._failed(error)

    def _send(self, peer: int) -> None:
        try:
            while message := self._outgoing[peer].get():
                self._peers[peer].send(message)
        except RankError as error:
            self._drop(peer, error)

    def _drop(self, peer: int, error: RankError) -> None:
        """Note a lost peer. At the end of a training that is no error: steps raise it."""
        with self._changed:
            self.gone, self._lacking = error, peer
            self._changed.notify_all()

    def endings(self) -> list[Callable[[], None]]:
        """Let the threads end; an empty message is the last one."""
        telling = [partial(outgoing.put, ()) for outgoing in self._outgoing.values()]
        return [*telling, *(link.hang_up for link in self._peers.values())]
