"""Signs of life: ranks that are stopped, gone, late in a step, or at their end.

Each rank publishes what it does under a key of the rendezvous store, from a thread, and watches the
next rank's key. Where that stands still, the rank is stopped or its node is gone. A rank that waits
in a step for longer than its bound says so, and the first rank looks which one is late. Either is
published as the job's failure; ranks that read of a failure close their connections, so that all
raise.

A rank that is late in code of the user's between two steps is named, and waited for up to the job's
own time limit: it may evaluate, or write a file.
"""

from __future__ import annotations

import atexit
import contextlib
import logging
import os
import sys
import threading
import time
from collections.abc import Iterator
from types import TracebackType

import torch.distributed as dist

from engines.runtime.activity import Activity, activity, late_ranks
from engines.runtime.data_place import DataPlace, earlier_end
from engines.runtime.failures import (
    ENDED,
    LAST_WORDS_S,
    LEFT,
    alive_key,
    close_all_connections,
    first_failure,
    name_ranks,
    publish_error,
    publish_failure,
)
from profiles.errors import RankError
from profiles.record import json_object
from profiles.torch_compat import default_store, is_tcp, second_line
from profiles.torch_compat.store import hang_up
from profiles.units import format_seconds

log = logging.getLogger(__name__)

EVERY_S = 2.0
SILENT_S = 45.0
"""Much longer than a thread waits for Python's lock, or a loaded machine for a core."""
LOOK_EVERY_S = 10.0
"""Between two looks at the ranks of a step that stands still."""
ENDED_AFTER_S = 5.0
"""In a step that a rank without data does not come to."""
_WAITING = "advisor/waiting"
_current: Heartbeat | None = None


class Heartbeat:
    """The thread of this rank; ends with its process group."""

    def __init__(self, store: dist.Store, *, rank: int, size: int) -> None:
        self._store, self._rank, self._size = store, rank, size
        self._next = (rank + 1) % size
        self._group = dist.group.WORLD
        self._looked = float("-inf")
        self._named: tuple[int | None, list[int]] = None, []
        self._ended = threading.Event()
        self._beats = 0
        self._has_hung_up = False
        store.set(alive_key(rank), "0")  # from now on the rank before watches this one
        self._thread = threading.Thread(target=self._run, name="heartbeat", daemon=True)
        self._thread.start()
        self._watch = threading.Thread(target=self._watch_store, name="store watch", daemon=True)
        self._watch.start()

    def belongs_to(self, group: object) -> bool:
        """True if it beats for this default group."""
        return self._group is group and self._thread.is_alive()

    def end(self, word: str = LEFT) -> None:
        """Tell the others that this rank is done, and stop."""
        self._ended.set()
        for thread in (self._thread, self._watch):  # a process that ends before they do aborts
            thread.join(timeout=EVERY_S)
        with contextlib.suppress(RuntimeError):
            self._store.set(alive_key(self._rank), word)

    def outlive(self) -> None:
        """Wait a moment for the other ranks to end, where they ask the store of this process."""
        if self._rank or os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True":
            return
        deadline = time.monotonic() + LAST_WORDS_S
        beating = [alive_key(rank) for rank in range(1, self._size)]
        with contextlib.suppress(RuntimeError):
            while beating and time.monotonic() < deadline:
                is_known = self._store.check(beating[-1:])
                if not is_known or self._store.get(beating[-1]).decode() in (LEFT, ENDED):
                    beating.pop()
                else:
                    time.sleep(0.05)

    def _watch_store(self) -> None:
        """Hang up where a beat does not end: the process of the store is stopped.

        Turns are counted, not seconds: the whole job may have been suspended.
        """
        seen, turns = -1, 0
        while self._thread.is_alive() and not self._ended.wait(EVERY_S):
            seen, turns = self._beats, turns + 1 if self._beats == seen else 0
            if turns * EVERY_S > SILENT_S:
                self._has_hung_up = True
                hang_up(self._store)
                close_all_connections()  # there is no store to ask who failed
                return

    def _run(self) -> None:
        beats, seen = 0, ""
        since = last = time.monotonic()
        while not self._ended.wait(EVERY_S) and dist.group.WORLD is self._group:
            beats += 1
            now, before = time.monotonic(), last
            last = now
            if now - before > SILENT_S / 2:
                # This rank stood still itself: all may have, in a job that was suspended.
                since = now
                activity.wait_anew()
            try:
                own = activity.now()
                self._store.set(alive_key(self._rank), f"{beats} {own.model_dump_json()}")
                self._look(own)
                self._look_for_an_end(own)
                latest = seen
                if self._store.check([alive_key(self._next)]):
                    latest = self._store.get(alive_key(self._next)).decode()
                problem = f"rank {self._next} shows no sign of life: it is stopped, or its node is"
                problem += " gone"
            except RuntimeError:
                if self._has_hung_up:
                    return
                latest, problem = seen, "the rendezvous store does not answer"
            if latest != seen or not seen:  # not seen: the next rank does not beat yet
                seen, since = latest, now
            elif seen not in (LEFT, ENDED) and now - since > SILENT_S:
                own = activity.now()
                waits = f"rank {self._rank} is {own}{_last_seen(_activity_of(seen))}"
                publish_failure(f"{problem} (for {SILENT_S:.0f} s); {waits}", self._store)
                close_all_connections()
                return
            self._beats = beats
            if first_failure(self._store):
                close_all_connections()  # this rank may wait for one that will never come
                return
        if not self._ended.is_set():  # the group was destroyed, and the process goes on
            with contextlib.suppress(RuntimeError):
                self._store.set(alive_key(self._rank), LEFT)

    def _look(self, own: Activity) -> None:
        """Say that this rank waits too long; on the first rank, look which one is late."""
        if own.is_waiting:
            self._store.set(_WAITING, "")
        now = time.monotonic()
        if self._rank or now - self._looked < LOOK_EVERY_S or not self._store.check([_WAITING]):
            return
        self._looked = now
        self._store.delete_key(_WAITING)
        ranks = dict(self._activities())
        late = late_ranks(ranks)
        others = {rank: each for rank, each in ranks.items() if rank not in late}
        # Those at the same place wait as well: their last beat may be older than their bound.
        places = {str(each) for each in others.values() if each.is_waiting}
        waiting = [rank for rank, each in others.items() if str(each) in places]
        if not late or not waiting:
            return
        text = _lateness(ranks, late, waiting)
        # Outside of a step too, a rank that exchanges something there waits for those in the step.
        if all(ranks[rank].step is not None or ranks[rank].doing for rank in late):
            publish_failure(text, self._store)
        elif self._named != (named := (ranks[waiting[0]].step, late)):
            self._named = named
            log.warning("%s", text)

    def _look_for_an_end(self, own: Activity) -> None:
        """Say that this rank waits for one without data: it is in no step and begins no pass."""
        if own.step is None or own.data is None or own.stood_s < ENDED_AFTER_S:
            return
        end = earlier_end(own.data, self._store)
        if end is None:
            return
        other = _activity_of(self._store.get(alive_key(end.rank)).decode())
        if other is not None and (other.step is not None or _is_further(other, own.data)):
            return
        waits = f"rank {self._rank} waits {own}, for {format_seconds(own.stood_s)}"
        publish_failure(f"{end}; {waits}", self._store)

    def _activities(self) -> Iterator[tuple[int, Activity]]:
        for rank in range(self._size):
            if self._store.check([alive_key(rank)]):
                known = _activity_of(self._store.get(alive_key(rank)).decode())
                if known is not None:
                    yield rank, known


def _is_further(other: Activity, own: DataPlace) -> bool:
    """True if a rank has begun another pass, and no exchange in it such as an evaluation."""
    place = other.data
    if place is None or (place.loader == own.loader and place.passes == own.passes):
        return False
    return place.loader == own.loader or not other.doing


def _activity_of(beat: str) -> Activity | None:
    """The activity in a beat; None in the first one and in last words."""
    _, _, text = beat.partition(" ")
    return Activity.build(json_object(text)) if text else None


def _last_seen(known: Activity | None) -> str:
    """Say where a rank was when it gave its last sign of life, up to a beat before it stopped."""
    if known is None:
        return ""
    return "\n".join((f"; it was last seen {known}", *(f"  {line}" for line in known.stack)))


def _lateness(ranks: dict[int, Activity], late: list[int], waiting: list[int]) -> str:
    """Say who waits for whom, since when, and where the late rank is."""
    first = ranks[late[0]]
    slowest = max((ranks[rank] for rank in waiting), key=lambda each: each.stood_s)
    lines = [
        f"{name_ranks(late)} {'is' if len(late) == 1 else 'are'} late:"
        f" {name_ranks(waiting)} {'waits' if len(waiting) == 1 else 'wait'} {slowest}, for"
        f" {format_seconds(slowest.stood_s)} of at most {format_seconds(slowest.bound_s)}; rank"
        f" {late[0]} is {first}",
        *(f"  {line}" for line in first.stack),
    ]
    return "\n".join(lines)


def start_heartbeat() -> None:
    """Beat for the default process group until it is destroyed; once for each group.

    Nothing to do for one rank, or for ranks that met over a file.
    """
    global _current
    if not dist.is_initialized() or dist.get_world_size() == 1:
        return
    if _current is not None and _current.belongs_to(dist.group.WORLD):
        return
    end_heartbeat()  # of a group that was destroyed before
    store = default_store()
    if is_tcp(store):
        _current = Heartbeat(second_line(store), rank=dist.get_rank(), size=dist.get_world_size())
        if sys.excepthook is not _with_last_words:
            global _hook_before
            _hook_before, sys.excepthook = sys.excepthook, _with_last_words


def is_beating() -> bool:
    """True if this rank beats: then all ranks end with one that is lost, so that messages of the
    group may be broken off."""
    return _current is not None and _current.belongs_to(dist.group.WORLD)


def end_heartbeat(word: str = LEFT) -> None:
    """Stop beating: the rank leaves the job."""
    global _current
    heartbeat, _current = _current, None
    if heartbeat is not None:
        heartbeat.end(word)


def _end_with_process() -> None:
    heartbeat = _current
    end_heartbeat(ENDED)
    if heartbeat is not None:
        heartbeat.outlive()


def _with_last_words(
    kind: type[BaseException], error: BaseException, trace: TracebackType | None
) -> None:
    """Print the error that ends this process, then tell it to the other ranks."""
    _hook_before(kind, error, trace)
    if _current is not None and not isinstance(error, RankError):
        sys.stderr.flush()
        publish_error(error)
        close_all_connections()


_hook_before = sys.excepthook
atexit.register(_end_with_process)
