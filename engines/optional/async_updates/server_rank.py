"""A rank that serves parameters: a thread for each worker, and the main one, which counts steps."""

from __future__ import annotations

import logging
import threading
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager

import torch
import torch.distributed as dist
from torch import Tensor, nn

from engines.optional.async_updates.agreement import Agreement
from engines.optional.async_updates.exchange import UpdateExchange
from engines.optional.async_updates.link import WorkerLink
from engines.optional.async_updates.messages import Request, ServerMessage, WorkerMessage
from engines.optional.async_updates.report import UpdateReport
from engines.optional.async_updates.server import ParameterServer
from engines.runtime.broadcast import send_from_first
from engines.runtime.failures import publish_failure
from engines.runtime.world import World, rank_error_context
from profiles.errors import RankError

log = logging.getLogger(__name__)

# A server drops a late worker before that worker's peers time out on the server: so their error
# names the worker.
_PATIENCE = 0.9
_LEAVING_S = 5.0  # for a thread that is sending an answer


class ServerExchange(UpdateExchange):
    """A server's side. `train_step` on it returns when every remaining worker has had its step.

    Workers are served in the meantime as they come, so that a slow one does not delay the others
    unless the plan says so. A lost rank is left out; where a step needs it, all ranks raise.

    Args:
        in_step: the server's steps are those of the workers (a synchronous plan without backup
            workers): an update waits for `train_step` to be called, so that learning rates change
            between the same updates as in one process.
        peers: links between servers that have to agree on the workers of a step; else empty.
        parts: the parameters of every server, in the order of their ranks.
        servers: the group of all servers.
    """

    serves = True

    def __init__(
        self,
        core: ParameterServer,
        links: Mapping[int, WorkerLink],
        *,
        peers: Mapping[int, WorkerLink],
        in_step: bool,
        parts: list[list[nn.Parameter]],
        servers: dist.ProcessGroup,
        world: World,
    ) -> None:
        # It trains on no part of the batch; the part of replica 0 is not used.
        super().__init__(world.device, replica=0, replicas=len(links))
        self._core = core
        self._links = links
        self._in_step = in_step
        self._parts = parts
        self._servers = servers
        self._world = world
        self._patience_s = _PATIENCE * world.timeout_s
        self._changed = threading.Condition()
        self._steps = 0  # of this rank: how often `train_step` was called
        self._answered = dict.fromkeys(links, 0)  # the last answered step of each worker
        self._reductions = 0
        self._reduced = dict.fromkeys(links, 0)  # the meeting that each worker was answered last
        self._reported: dict[int, dict[int, tuple[float, float]]] = {}
        self._failure: BaseException | None = None
        self._agreement: Agreement | None = None
        if peers:
            self._agreement = Agreement(
                core,
                peers,
                needed=core.needed,
                changed=self._changed,
                failed=self._fail,
            )
        threads = [
            threading.Thread(target=self._serve, args=(worker,), daemon=True) for worker in links
        ]
        for thread in threads:
            thread.start()
        threads += self._agreement.threads if self._agreement is not None else []
        # At the end of the process too: a thread that wakes up after Python has ended aborts it.
        endings = [link.hang_up for link in links.values()]
        endings += self._agreement.endings() if self._agreement is not None else []
        weakref.finalize(self, _leave, endings, threads)

    def replace_step(self) -> bool:
        """Serve one step.

        Raises:
            RankError: names the rank without which there is no step.
        """
        with self._changed:
            self._steps += 1
            self._changed.notify_all()
            self._until_answered(self._answered, self._steps)
            if max(self._answered.values()) < self._steps:
                self._raise_missing()
            self.loss = torch.tensor(self._core.loss, device=self._world.device)
        return True

    def average(self, loss: Tensor, count: float) -> Tensor:
        with self._changed:
            return torch.tensor(self._reduce(), dtype=loss.dtype, device=self._world.device)

    def synchronise(self) -> None:
        """Fetch the other servers' parts, and wait until all workers have fetched this one's."""
        with rank_error_context("putting the servers' parts together"):
            for server, part in enumerate(self._parts):
                tensors = [parameter.detach() for parameter in part]
                cpu = torch.device("cpu")
                send_from_first(tensors, cpu, group=self._servers, source=server)
        with self._changed:
            self._reduce()

    @contextmanager
    def saving(self) -> Iterator[dist.ProcessGroup | None]:
        """The servers write; the workers wait for them."""
        yield self._servers
        with self._changed:
            self._reduce()

    @property
    def report(self) -> UpdateReport:
        with self._changed:
            return self._core.tally.report(
                sent_bytes=sum(link.sent_bytes for link in self._links.values()),
                received_bytes=sum(link.received_bytes for link in self._links.values()),
            )

    def _reduce(self) -> float:
        """Reduce a loss over all remaining workers; returns the mean."""
        self._reductions += 1
        self._changed.notify_all()
        self._until_answered(self._reduced, self._reductions)
        return self._mean(self._reductions)

    def _until_answered(self, answered: dict[int, int], number: int) -> None:
        """Wait until every remaining worker was answered `number` times; drop late ones."""
        core = self._core

        def late() -> list[int]:
            return [worker for worker in core.clocks if answered[worker] < number]

        def is_over() -> bool:
            is_hopeless = self._lacks_others and core.version < self._steps
            return self._failure is not None or is_hopeless or not late()

        if not self._changed.wait_for(is_over, self._world.timeout_s):
            for worker in late():
                self._drop(worker, f"did not come within {self._world.timeout_s:.0f} s")
        if self._failure is not None:
            raise self._failure

    def _serve(self, worker: int) -> None:
        """Serve one worker from a thread, until it is gone."""
        link = self._links[worker]
        length = WorkerMessage.LENGTH + len(self._core.parameters)
        try:
            while True:
                request = WorkerMessage.read(link.listen(length))
                if request.kind is Request.PUSH:
                    self._take_gradients(worker, link, request)
                else:
                    self._serve_reduction(worker, link, request)
        except RankError as error:
            with self._changed:
                self._drop(worker, error.what)
        except BaseException as error:  # of the optimizer, say: the main thread raises it
            self._fail(error)

    def _fail(self, error: BaseException) -> None:
        with self._changed:
            self._failure = error
            self._changed.notify_all()

    def _take_gradients(self, worker: int, link: WorkerLink, request: WorkerMessage) -> None:
        core = self._core
        pairs = list(zip(core.parameters, request.flags, strict=True))
        received = iter(link.receive_tensors([p.detach() for p, present in pairs if present]))
        gradients = [next(received) if present else None for _, present in pairs]
        with self._changed:
            is_open = self._wait(lambda: not self._in_step or core.version < self._steps)
            lacking = None if is_open else self._world.rank  # its main thread is late
            lacking = lacking if worker in core.clocks else worker  # was dropped meanwhile
            if lacking is not None:
                answer = ServerMessage(core.version, None, 0.0, missing=lacking)
                return self._answer(worker, link, answer, self._answered, 0)
            staleness = core.push(
                worker, request.turn, gradients, count=request.count, loss=request.loss
            )
            step = core.clocks[worker]
            if self._agreement is not None and staleness is not None:
                self._agreement.report(worker, request.turn)
            self._changed.notify_all()
            missing = self._wait_to_go_on(worker)
            staleness = staleness if core.is_used(worker, request.turn) else None
            step = max(step, core.catch_up(worker))
            answer = ServerMessage(core.version, staleness, core.loss, missing)
            self._answer(worker, link, answer, self._answered, step)

    def _wait_to_go_on(self, worker: int) -> int | None:
        """Wait until a worker may go on; the missing rank if it never may."""
        core = self._core
        while not core.may_go_on(worker):
            if not self._wait(lambda: core.may_go_on(worker) or self._lacks_others):
                behind = core.behind(worker)
                for other in behind:
                    self._drop(other, f"made the others wait for {self._patience_s:.0f} s")
                if not behind:
                    return self._lacking()
            elif not core.may_go_on(worker):
                return self._lacking()
        return None

    @property
    def _lacks_others(self) -> bool:
        """True if no update can be made any more."""
        is_alone = self._agreement is not None and self._agreement.gone is not None
        return self._core.lacks_workers or is_alone

    def _lacking(self) -> int:
        """The missing rank that makes an update impossible."""
        if self._core.lacks_workers:
            return self._core.tally.gone[0]
        return self._agreement.lacking() if self._agreement is not None else self._world.rank

    def _serve_reduction(self, worker: int, link: WorkerLink, request: WorkerMessage) -> None:
        with self._changed:
            reported = self._reported.setdefault(request.turn, {})
            reported[worker] = (request.loss, request.count)
            self._changed.notify_all()
            clocks, turn = self._core.clocks, request.turn
            if not self._wait(
                lambda: self._reductions >= turn and reported.keys() >= clocks.keys()
            ):
                for other in clocks.keys() - reported.keys():
                    self._drop(other, f"made the others wait for {self._patience_s:.0f} s")
            missing = None if self._reductions >= turn else self._world.rank
            answer = ServerMessage(self._core.version, None, self._mean(turn), missing)
            pulls = request.kind is Request.PULL
            self._answer(worker, link, answer, self._reduced, turn, parameters=pulls)

    def _answer(
        self,
        worker: int,
        link: WorkerLink,
        answer: ServerMessage,
        answered: dict[int, int],
        number: int,
        *,
        parameters: bool = True,
    ) -> None:
        """Send an answer; a copy, so that others may be served meanwhile."""
        tensors = [p.detach().clone() for p in self._core.parameters if parameters]
        self._changed.release()
        try:
            link.send(answer.numbers(), tensors if answer.missing is None else ())
        finally:
            self._changed.acquire()
        if answer.missing is None:
            answered[worker] = number
        self._changed.notify_all()

    def _mean(self, meeting: int) -> float:
        reported = self._reported.get(meeting, {}).values()
        total = sum(count for _, count in reported)
        return sum(loss * count for loss, count in reported) / max(total, 1.0)

    def _wait(self, over: Callable[[], bool]) -> bool:
        return self._changed.wait_for(over, self._patience_s)

    def _drop(self, worker: int, why: str) -> None:
        if worker in self._core.clocks:
            log.info("rank %d was dropped: %s", worker, why)
        self._core.lose(worker)
        self._changed.notify_all()

    def _raise_missing(self) -> None:
        if not self._core.lacks_workers and self._agreement is not None and self._agreement.gone:
            raise self._agreement.gone
        gone = self._core.tally.gone
        publish_failure(f"rank {gone[0]} is gone")  # the workers lose this rank as well
        raise RankError(
            f"rank {gone[0]} is gone: {len(self._core.clocks)} of {self.replicas} workers are"
            " left, too few for a step",
            where=f"rank {self._world.rank} of {self._world.size}, which serves parameters",
            hints=[f"look at the output of rank {gone[0]}"],
        )


def _leave(endings: Sequence[Callable[[], None]], threads: Sequence[threading.Thread]) -> None:
    """End the threads that still listen."""
    for end in endings:
        end()
    for thread in threads:
        if thread is not threading.current_thread():  # the last one releases the server
            thread.join(_LEAVING_S)
