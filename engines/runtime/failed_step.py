"""Steps that a rank left by an error of its own, which its script may catch: all ranks leave them.

The rank reports its error on the rendezvous store. Where all ranks do so at once, at the same place
(a batch that all refuse), nothing is in flight between them, and nothing happens. Else it closes
its connections, so that ranks which wait for it lose contact at once, see the report and do the
same. With the reports of all ranks the groups can be connected again, and the training can go on
without that batch. Decisions are those of the first rank that writes one. A step that succeeds asks
the store nothing.
"""

from __future__ import annotations

import time
from collections.abc import Collection, Mapping
from contextlib import suppress
from dataclasses import dataclass

import torch.distributed as dist
from pydantic import Field

from engines.runtime.failures import (
    STORE_GONE,
    close_all_connections,
    error_line,
    first_failure,
    has_store,
    is_lost_contact,
    name_ranks,
    publish_failure,
    reconnect,
    reconnections,
)
from profiles.errors import RankError
from profiles.record import Record, json_object
from profiles.torch_compat import default_store, every_group, messages_of

ALIKE_S = 3.0
"""For ranks that fail alike to report it, before connections are closed."""
REPORTS_S = 20.0
"""For all ranks to report; one that computes for longer before its next message ends the job."""
MOST_RECONNECTIONS = 100
"""Of a job: each takes a number of a kind of backend, and torch has 156 that it does not use."""
_POLL_S = 0.02
_FAILED_STEP = "advisor/failed step/"


class StepReport(Record):
    """The end of a step on one rank.

    Attributes:
        step: its number.
        is_own: the rank failed; else it lost contact with one that did.
        messages: begun so far, by group.
        why_not: the reason why this rank cannot go on; empty if it can.
    """

    step: int
    is_own: bool
    messages: dict[str, int] = Field(default_factory=dict)
    why_not: str = ""


@dataclass(frozen=True, slots=True)
class BrokenStep:
    """A step that all ranks have left.

    Attributes:
        step: its number on this rank.
        line: the first error: "rank 1 failed: ValueError: ...".
        why_ended: the reason why the ranks have no connections any more; empty if they have.
        is_reconnected: connections were closed, and made anew.
        is_named: errors of lost contact name the failure already.
    """

    step: int
    line: str
    why_ended: str = ""
    is_reconnected: bool = False
    is_named: bool = False

    def error(self) -> RankError:
        """Return the error of a rank that did not fail itself, or that calls again at the end."""
        hints = ["no rank made the step: the next `train_step` goes on, without this batch"]
        if self.why_ended:
            hints = [
                "the connections of this job are closed: start it again, from the last checkpoint"
                " if there is one",
                "let the loader drop what a rank cannot use, so that no step fails",
            ]
        place = f"rank {dist.get_rank()} of {dist.get_world_size()}, in step {self.step}"
        return RankError(self.line, where=f"{place}\n{self.why_ended}".rstrip(), hints=hints)


def is_of_others(error: BaseException) -> bool:
    """True if a rank raised `error` for another rank, not by itself."""
    return isinstance(error, RankError) or is_lost_contact(error)


def leave_step(
    error: Exception,
    *,
    step: int,
    why_not: str,
    timeout_s: float,
    uneven: Collection[dist.ProcessGroup] = (),
) -> BrokenStep | None:
    """Leave a step that raised `error`, together with all ranks; each calls it.

    Args:
        step: its number.
        why_not: the reason why this rank could not go on with connections that are made anew.
        timeout_s: of collectives of those connections.
        uneven: groups whose ranks rightly send different numbers of messages, as stages do.

    Returns None where no rank reported a failure of its own: the error itself says more.
    """
    is_own, rank = not is_of_others(error), dist.get_rank()
    line = f"rank {rank} failed: {error_line(error)}" if is_own else _lost_contact(error)
    try:
        store = default_store()
        key = _key(store)
        if not store.check([f"{key}first"]):
            if failure := first_failure():  # a pipeline has closed its connections
                because = "the connections of the ranks were closed in the step"
                return BrokenStep(step, failure, because, is_named=True)
            if not is_own:
                return None
            store.compare_set(f"{key}first", "", line)
        line = store.get(f"{key}first").decode()
        if isinstance(error, RankError) and not is_lost_contact(error.__cause__ or error):
            # It waited in the store for a text, whose number the others have not reached.
            why_not = why_not or f"rank {rank} waited for another one outside of collectives"
        if reconnections() >= MOST_RECONNECTIONS:
            why_not = why_not or f"connections were made anew {MOST_RECONNECTIONS} times before"
        messages = _messages(uneven)
        own = StepReport(step=step, is_own=is_own, messages=messages, why_not=why_not)
        store.set(f"{key}{rank}", own.model_dump_json())
        broken = _settle(store, key, own, line)
        if broken.is_reconnected:
            reconnect(timeout_s=timeout_s)
        if not broken.why_ended:
            _key(store, more=1)
    except (RuntimeError, RankError) as lost:  # the store is gone, or a rank has ended meanwhile
        close_all_connections()
        return BrokenStep(step, line, error_line(lost) if has_store() else STORE_GONE)
    return broken


def _lost_contact(error: Exception) -> str:
    """The line of a rank that did not fail itself, where no other one can be asked for its own."""
    if isinstance(error, RankError):
        return error.what
    return f"lost contact with another rank ({error_line(error)})"


def reported_failure() -> str:
    """The first error of the step that ranks are about to leave; empty without one."""
    with suppress(RuntimeError):
        store = default_store()
        first = f"{_key(store)}first"
        if store.check([first]):
            return store.get(first).decode()
    return ""


def _key(store: dist.Store, *, more: int = 0) -> str:
    """The beginning of the keys of the next failed step, after `more` were left by this rank."""
    return f"{_FAILED_STEP}{store.add(f'{_FAILED_STEP}left by {dist.get_rank()}', more)}/"


def _settle(store: dist.Store, key: str, own: StepReport, line: str) -> BrokenStep:
    """Decide with the other ranks how the step ends."""
    size, closing, end = dist.get_world_size(), f"{key}closes", f"{key}end"
    reports = _reports(store, key, ALIKE_S, until=closing) if own.is_own else {}
    is_alike = len(reports) == size and _are_alike(reports.values())
    if not _decide(store, closing, "" if is_alike else "closes"):
        return BrokenStep(own.step, line)
    close_all_connections()
    why_ended = own.why_not or _why_ended(_reports(store, key, REPORTS_S, until=end))
    why_ended = _decide(store, end, why_ended)
    if why_ended:
        publish_failure(line, store)
    return BrokenStep(own.step, line, why_ended, is_reconnected=not why_ended)


def _decide(store: dist.Store, key: str, proposal: str) -> str:
    """The proposal of the first rank that makes one; all ranks go by it."""
    return store.compare_set(key, "", f"={proposal}").decode().removeprefix("=")


def _reports(store: dist.Store, key: str, timeout_s: float, *, until: str) -> dict[int, StepReport]:
    """Reports by rank: all, or those that came in time, or until there is a key `until`."""
    keys = [f"{key}{rank}" for rank in range(dist.get_world_size())]
    deadline = time.monotonic() + timeout_s
    # A wait of the store that times out would be logged by torch.
    while not store.check(keys) and not store.check([until]) and time.monotonic() < deadline:
        time.sleep(_POLL_S)
    texts = {rank: store.get(each) for rank, each in enumerate(keys) if store.check([each])}
    return {
        rank: StepReport.build(json_object(text.decode()), where=f"rank {rank}")
        for rank, text in texts.items()
    }


def _are_alike(reports: Collection[StepReport]) -> bool:
    """True if all ranks failed at the same place, so that no message waits for its other side."""
    counts: dict[str, set[int]] = {}
    for report in reports:
        for name, count in report.messages.items():
            counts.setdefault(name, set()).add(count)
    is_even = all(len(each) == 1 for each in counts.values())
    return is_even and all(r.is_own for r in reports) and len({r.step for r in reports}) == 1


def _why_ended(reports: Mapping[int, StepReport]) -> str:
    """The reason why ranks with these reports cannot go on; empty if they can."""
    missing = [rank for rank in range(dist.get_world_size()) if rank not in reports]
    if missing:
        return f"{name_ranks(missing)} did not leave the step within {REPORTS_S:.0f} s"
    last = max(reports, key=lambda rank: reports[rank].step)
    if len({report.step for report in reports.values()}) > 1:
        return f"rank {last} was in step {reports[last].step} by then"
    return next((report.why_not for report in reports.values() if report.why_not), "")


def _messages(uneven: Collection[dist.ProcessGroup]) -> dict[str, int]:
    """Counts of this rank's groups; those of one mesh axis may have one name."""
    return {
        f"{group.group_name} of {dist.get_process_group_ranks(group)[0]}": messages_of(group)
        for group in every_group()
        if group not in uneven
    }
