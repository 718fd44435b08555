"""Failures of one rank, reported by name on all ranks at once and not after a timeout.

The failed rank publishes a line on the rendezvous store and closes its connections
(`abort_groups`). Ranks that wait for it lose contact, read the line (`first_failure`) and close
theirs in turn.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from datetime import timedelta

import torch
import torch.distributed as dist

from engines.runtime.shortage import is_shortage
from profiles.errors import RankError
from profiles.torch_compat import default_store, every_group
from profiles.torch_compat.gloo import reconnect_groups

LOOK_EVERY_S = 5.0
LAST_WORDS_S = 5.0
"""For other ranks to read them, where this process runs the store that they ask."""
STORE_GONE = (
    "the rendezvous store does not answer: its process ended or is stopped, as a rule rank 0"
)
LEFT, ENDED = "left", "ended"
"""Last words of a rank under its `alive_key`: it left the group, or its process ends."""
_FAILED = "advisor/failed"
_LOST = "advisor/lost/"
_SHORT = "advisor/short of memory/"
_RECONNECTED = "advisor/reconnected/"
ROLL_CALL_S = 1.0
"""Time for the others to notice, and to reach the store. A rank on another mesh axis that began its
wait later than this is named too, though it only waits longer."""


def is_lost_contact(error: BaseException) -> bool:
    """True if a collective failed for its connection: torch's own types, or gloo's bare text."""
    if not isinstance(error, RuntimeError):
        return False
    # The second is what a collective says whose connections this process closed itself.
    texts = ("gloo/transport/", "pair closure")
    return isinstance(error, dist.DistError) or any(text in str(error) for text in texts)


def first_failure(store: dist.Store | None = None) -> str:
    """The line of the rank that failed first: "rank 1 failed: ValueError: ..."; else empty.

    Args:
        store: the connection to use, the default group's unless said.
    """
    with suppress(RuntimeError):  # the process that runs the store may be gone
        store = store or default_store()
        if store.check([_FAILED]):
            return store.get(_FAILED).decode()
    return ""


def has_store() -> bool:
    """True if the rendezvous store answers."""
    return answers(default_store())


def roll_call() -> list[int]:
    """The ranks that did not notice the lost contact: those that the others waited for.

    Every rank that loses contact calls it, all of them at about the same time: each has closed its
    connections, which the others notice at once. Empty where all ranks called it: then this
    rank was the late one, or the process that runs the store is gone.
    """
    size, rank = dist.get_world_size(), dist.get_rank()
    with suppress(RuntimeError):
        store = default_store()
        store.set(f"{_LOST}{rank}", "")
        deadline = time.monotonic() + ROLL_CALL_S
        for other in range(size):
            left = max(0.001, deadline - time.monotonic())
            with suppress(RuntimeError):
                store.wait([f"{_LOST}{other}"], timedelta(seconds=left))
        return [other for other in range(size) if not store.check([f"{_LOST}{other}"])]
    return []


def abort_groups(error: BaseException) -> None:
    """Publish `error` and close the connections of all groups, after a failure inside collectives.

    The process groups of this job cannot be used any more, unless `reconnect` repairs them.
    """
    if not dist.is_initialized() or dist.get_world_size() == 1:
        return
    if is_shortage(error):
        announce_shortage()  # all ranks may agree to go on
    elif not is_lost_contact(error):
        publish_error(error)
    close_all_connections()


def publish_error(error: BaseException) -> None:
    """Publish `error` as the failure of this rank."""
    publish_failure(f"rank {dist.get_rank()} failed: {error_line(error)}")


def publish_failure(line: str, store: dist.Store | None = None) -> None:
    """Make `line` the answer of `first_failure`, unless another rank published one before.

    Args:
        store: the connection to use, the default group's unless said.
    """
    with suppress(RuntimeError):
        (store or default_store()).compare_set(_FAILED, "", line)


def announce_shortage() -> None:
    """Tell ranks that lose contact with this one that it ran out of memory; before connections are
    closed."""
    with suppress(RuntimeError):
        default_store().set(f"{_SHORT}{reconnections()}", "")


def is_shortage_announced() -> bool:
    """True if a rank ran out of memory since the groups were connected."""
    with suppress(RuntimeError):
        return default_store().check([f"{_SHORT}{reconnections()}"])
    return False


def reconnections() -> int:
    """Number of times that this rank reconnected its groups in this job."""
    return default_store().add(f"{_RECONNECTED}{dist.get_rank()}", 0)


def reconnect(*, timeout_s: float) -> None:
    """Connect the groups of this job anew, after `close_all_connections`; all ranks call it.

    Raises:
        RankError: a rank did not come in time.
    """
    number = default_store().add(f"{_RECONNECTED}{dist.get_rank()}", 1)
    try:
        reconnect_groups(number, timeout_s=timeout_s)
    except RuntimeError as error:
        raise RankError(
            f"the groups of this job could not be connected again: {error_line(error)}",
            where=f"rank {dist.get_rank()} of {dist.get_world_size()}",
            hints=["look at the output of the other ranks"],
        ) from error


def close_all_connections() -> None:
    """End the messages of all groups: whoever waits for one on this rank, or for this rank, raises.

    The process groups of this job cannot be used any more, unless `reconnect` repairs them.
    """
    for group in every_group():
        _close_connections(group)


def alive_key(rank: int) -> str:
    """The key under which a rank gives signs of life."""
    return f"advisor/alive/{rank}"


def wait_for_text(store: dist.Store, key: str, *, rank: int, timeout_s: float) -> str | None:
    """The text that `rank` sets under `key`; None when the time is up, when its process has ended
    without, when a rank's failure was published, or when the process that runs the store ended."""
    deadline = time.monotonic() + timeout_s
    while (left := deadline - time.monotonic()) > 0:
        with suppress(RuntimeError):
            store.wait([key], timedelta(seconds=min(left, LOOK_EVERY_S)))
            return store.get(key).decode()
        # A store without its process fails at once, and would in every turn.
        if not answers(store) or (left > LOOK_EVERY_S and why_absent(rank, store)):
            with suppress(RuntimeError):
                return store.get(key).decode() if store.check([key]) else None
            return None
    return None


def answers(store: dist.Store) -> bool:
    """True if the process that runs the store is there."""
    try:
        store.check([_FAILED])
    except RuntimeError:
        return False
    return True


def outlive_readers(store: dist.Store, keys: Iterable[str]) -> None:
    """Wait a moment until other ranks have set these keys, where this process may run the store:
    it is about to end with what they are to read."""
    if dist.get_rank() or os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True":
        return
    with suppress(RuntimeError):
        store.wait(list(keys), timedelta(seconds=LAST_WORDS_S))


def has_ended(rank: int, store: dist.Store) -> bool:
    """True if the process of `rank` ended in order, and said so."""
    with suppress(RuntimeError):
        return store.check([alive_key(rank)]) and store.get(alive_key(rank)).decode() == ENDED
    return False


def why_absent(rank: int, store: dist.Store | None = None) -> str:
    """The reason why `rank` does not come any more; empty where it may only be late.

    Args:
        store: the connection to use, the default group's unless said.
    """
    if failure := first_failure(store):
        return failure
    store = store or default_store()
    if not answers(store):
        return STORE_GONE
    return f"rank {rank} has ended" if has_ended(rank, store) else ""


def _close_connections(group: dist.ProcessGroup) -> None:
    """Close the connections of a gloo group, by a receive that times out.

    gloo has no abort, and a group lives while a message of it is pending. But a receive that times
    out closes all connections of its group, so that the peers' calls fail at once. NCCL groups are
    left to their watchdog, which ends the job at their timeout.
    """
    size, rank = group.size(), group.rank()
    if size == 1 or "gloo" not in str(dist.get_backend_config(group)):
        return
    for distance in range(1, size):
        other = (rank + distance) % size
        with suppress(RuntimeError):  # its connection is closed already: the next one
            message = dist.irecv(torch.empty(1), group=group, group_src=other, tag=_NO_TAG)
            if message is not None:
                with suppress(RuntimeError):
                    message.wait(timedelta(milliseconds=1))
            return


_NO_TAG = 2**15 + 77
"""Of a message that nobody sends. Pipelines number theirs from 0, gloo takes 32 bits."""


@contextmanager
def all_ranks_succeed(doing: str, *, timeout_s: float) -> Iterator[None]:
    """Around work without messages: where one rank fails in it, all raise. All ranks call it.

    The groups stay usable, so that the job can continue.

    Raises:
        RankError: names the rank that failed with its error, or that did not answer in time.
    """
    size = dist.get_world_size() if dist.is_initialized() else 1
    if size == 1:
        yield
        return
    rank, store = dist.get_rank(), default_store()
    key = f"advisor/{doing}/{store.add(f'advisor/{doing}/calls/{rank}', 1)}/"
    try:
        yield
    except BaseException as error:
        with suppress(RuntimeError):
            store.set(f"{key}{rank}", f"rank {rank} failed: {error_line(error)}")
            store.set(f"{key}{rank}/heard", "")  # it will not read what the others say
            outlive_readers(store, (f"{key}{other}/heard" for other in range(1, size)))
        raise
    with suppress(RuntimeError):  # without a store the wait says so
        store.set(f"{key}{rank}", "")
    for other in range(size):
        failure = wait_for_text(store, f"{key}{other}", rank=other, timeout_s=timeout_s)
        if failure is None:
            raise RankError(
                why_absent(other) or f"rank {other} did not answer within {timeout_s:.0f} s",
                where=f"rank {rank} of {size}, {doing}",
            )
        if failure:
            with suppress(RuntimeError):
                store.set(f"{key}{rank}/heard", "")
            raise RankError(
                f"{failure}",
                where=f"rank {rank} of {size}, {doing}",
                hints=[f"look at the output of rank {other}"],
            )


def error_line(error: BaseException) -> str:
    """Type and first line."""
    first = (str(error).splitlines() or [""])[0]
    return f"{type(error).__name__}: {first}" if first else type(error).__name__


def name_ranks(ranks: list[int]) -> str:
    """Name ascending ranks: "rank 1", "ranks 0-2", "ranks 0, 2"."""
    if len(ranks) == 1:
        return f"rank {ranks[0]}"
    if ranks == list(range(ranks[0], ranks[-1] + 1)):
        return f"ranks {ranks[0]}-{ranks[-1]}"
    return "ranks " + ", ".join(map(str, ranks))
