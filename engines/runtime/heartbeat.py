"""Signs of life: a rank that is stopped, or whose node is gone, ends the job within a minute.

A collective waits as long as its group's timeout, ten minutes by default, since a rank may have
good reasons to be late: it evaluates, or writes a file. A rank that is stopped has none. Each rank
counts up a key of the rendezvous store from a thread, and watches the next rank's. Where that
stands still, the rank publishes it as the job's failure; ranks that read of a failure close their
connections, so that all raise.
"""

from __future__ import annotations

import atexit
import contextlib
import threading
import time

import torch.distributed as dist

from engines.runtime.failures import close_all_connections, first_failure, publish_failure
from profiles.torch_compat import default_store, is_tcp, second_line

EVERY_S = 2.0
SILENT_S = 45.0
"""Much longer than a thread waits for Python's lock, or a loaded machine for a core."""
_ALIVE = "advisor/alive/"
_LEFT = "left"
_current: Heartbeat | None = None


class Heartbeat:
    """The thread of this rank; ends with its process group."""

    def __init__(self, store: dist.Store, *, rank: int, size: int) -> None:
        self._store, self._rank, self._next = store, rank, (rank + 1) % size
        self._group = dist.group.WORLD
        self._ended = threading.Event()
        store.set(f"{_ALIVE}{rank}", "0")  # from now on the rank before watches this one
        self._thread = threading.Thread(target=self._run, name="heartbeat", daemon=True)
        self._thread.start()

    def belongs_to(self, group: object) -> bool:
        """True if it beats for this default group."""
        return self._group is group and self._thread.is_alive()

    def end(self) -> None:
        """Tell the others that this rank is done, and stop."""
        self._ended.set()
        self._thread.join(timeout=EVERY_S)

    def _run(self) -> None:
        beats, seen = 0, ""
        since = last = time.monotonic()
        while not self._ended.wait(EVERY_S) and dist.group.WORLD is self._group:
            beats += 1
            now, before = time.monotonic(), last
            last = now
            if now - before > SILENT_S / 2:
                since = (
                    now  # this rank stood still itself: all may have, in a job that was suspended
                )
            try:
                self._store.set(f"{_ALIVE}{self._rank}", str(beats))
                latest = seen
                if self._store.check([f"{_ALIVE}{self._next}"]):
                    latest = self._store.get(f"{_ALIVE}{self._next}").decode()
                problem = f"rank {self._next} shows no sign of life: it is stopped, or its node is"
                problem += " gone"
            except RuntimeError:
                latest, problem = seen, "the rendezvous store does not answer"
            if latest != seen or not seen:  # not seen: the next rank does not beat yet
                seen, since = latest, now
            elif seen != _LEFT and now - since > SILENT_S:
                publish_failure(f"{problem} (for {SILENT_S:.0f} s)", self._store)
                close_all_connections()
                return
            if first_failure(self._store):
                close_all_connections()  # this rank may wait for one that will never come
                return
        with contextlib.suppress(RuntimeError):
            self._store.set(f"{_ALIVE}{self._rank}", _LEFT)


def start_heartbeat() -> None:
    """Beat for the default process group until it is destroyed; once for each group.

    Nothing to do for one rank, or for ranks that met over a file.
    """
    global _current
    if not dist.is_initialized() or dist.get_world_size() == 1:
        return
    if _current is not None and _current.belongs_to(dist.group.WORLD):
        return
    store = default_store()
    if is_tcp(store):
        _current = Heartbeat(second_line(store), rank=dist.get_rank(), size=dist.get_world_size())


def end_heartbeat() -> None:
    """Stop beating: the process ends, or leaves the job."""
    global _current
    heartbeat, _current = _current, None
    if heartbeat is not None:
        heartbeat.end()


atexit.register(end_heartbeat)
