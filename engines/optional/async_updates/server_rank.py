"""A rank that serves parameters: a thread listens to each worker, the main one counts steps."""

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
from engines.optional.async_updates.exchange import Exchange
from engines.optional.async_updates.link import Link
from engines.optional.async_updates.messages import Answer, Kind, Question
from engines.optional.async_updates.report import UpdateReport
from engines.optional.async_updates.server import ParameterServer
from engines.runtime.failures import publish_failure
from engines.runtime.world import World, rank_error_context
from engines.state.optimizer import send_from_first
from profiles.errors import RankError

log = logging.getLogger(__name__)

# A server gives up a worker before that worker's peers give up the server: so they get to know whom
# they wait for in vain.
_PATIENCE = 0.9
_LEAVING_S = 5.0  # for a thread that is in the middle of an answer


class Serving(Exchange):
    """A server's side. `train_step` on it returns when every worker that is left has had its step.

    Workers are served in the meantime as they come, so that a slow one does not hold up the others
    unless the plan says so. A rank that is lost is left out; where a step needs it, all hear of it.

    Args:
        in_step: whether the server's steps are the workers' (a synchronous plan without backup
            workers): an update waits for `train_step` to be called, so that learning rates change
            between the same updates as in one process.
        peers: links between servers that have to agree on the workers of a step, if they have.
        parts: the parameters of every server, in the order of their ranks.
        servers: the group of all servers.
    """

    serves = True

    def __init__(
        self,
        core: ParameterServer,
        links: Mapping[int, Link],
        *,
        peers: Mapping[int, Link],
        in_step: bool,
        parts: list[list[nn.Parameter]],
        servers: dist.ProcessGroup,
        world: World,
    ) -> None:
        # It works on none of the parts; what it is given of the first is not looked at.
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
        self._answered = dict.fromkeys(links, 0)  # the step that each worker was answered last
        self._meetings = 0
        self._met = dict.fromkeys(links, 0)  # the meeting that each worker was answered last
        self._said: dict[int, dict[int, tuple[float, float]]] = {}
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

    def instead(self) -> bool:
        """Serve one step.

        Raises:
            RankError: names the rank without which there is no step.
        """
        with self._changed:
            self._steps += 1
            self._changed.notify_all()
            self._until_answered(self._answered, self._steps)
            if max(self._answered.values()) < self._steps:
                self._raise_lack()
            self.loss = torch.tensor(self._core.loss, device=self._world.device)
        return True

    def average(self, loss: Tensor, count: float) -> Tensor:
        with self._changed:
            return torch.tensor(self._meet(), dtype=loss.dtype, device=self._world.device)

    def synchronise(self) -> None:
        """Take the other servers' parts, and stay until all workers have taken this one's."""
        with rank_error_context("putting the servers' parts together"):
            for server, part in enumerate(self._parts):
                tensors = [parameter.detach() for parameter in part]
                cpu = torch.device("cpu")
                send_from_first(tensors, cpu, group=self._servers, source=server)
        with self._changed:
            self._meet()

    @contextmanager
    def saving(self) -> Iterator[dist.ProcessGroup | None]:
        """The servers write, the others wait until they have."""
        yield self._servers
        with self._changed:
            self._meet()

    @property
    def report(self) -> UpdateReport:
        with self._changed:
            return self._core.tally.report(
                sent_bytes=sum(link.sent_bytes for link in self._links.values()),
                received_bytes=sum(link.received_bytes for link in self._links.values()),
            )

    def _meet(self) -> float:
        """One meeting of all workers that are left; the mean of what they say."""
        self._meetings += 1
        self._changed.notify_all()
        self._until_answered(self._met, self._meetings)
        return self._mean(self._meetings)

    def _until_answered(self, answered: dict[int, int], number: int) -> None:
        """Wait until every worker that is left was answered so many times; give up those that let
        wait for too long."""
        core = self._core

        def late() -> list[int]:
            return [worker for worker in core.clocks if answered[worker] < number]

        def is_over() -> bool:
            is_hopeless = self._lacks_others and core.version < self._steps
            return self._failure is not None or is_hopeless or not late()

        if not self._changed.wait_for(is_over, self._world.timeout_s):
            for worker in late():
                self._lose(worker, f"did not come within {self._world.timeout_s:.0f} s")
        if self._failure is not None:
            raise self._failure

    def _serve(self, worker: int) -> None:
        """Serve one worker from a thread, until it is gone."""
        link = self._links[worker]
        length = Question.LENGTH + len(self._core.parameters)
        try:
            while True:
                question = Question.read(link.listen(length))
                if question.kind is Kind.PUSH:
                    self._take_gradients(worker, link, question)
                else:
                    self._take_word(worker, link, question)
        except RankError as error:
            with self._changed:
                self._lose(worker, error.what)
        except BaseException as error:  # of the optimizer, say: the main thread raises it
            self._fail(error)

    def _fail(self, error: BaseException) -> None:
        with self._changed:
            self._failure = error
            self._changed.notify_all()

    def _take_gradients(self, worker: int, link: Link, question: Question) -> None:
        core = self._core
        pairs = list(zip(core.parameters, question.flags, strict=True))
        received = iter(link.receive_tensors([p.detach() for p, there in pairs if there]))
        gradients = [next(received) if there else None for _, there in pairs]
        with self._changed:
            is_open = self._wait(lambda: not self._in_step or core.version < self._steps)
            lacking = None if is_open else self._world.rank  # its main thread does not come
            lacking = lacking if worker in core.clocks else worker  # was given up meanwhile
            if lacking is not None:
                answer = Answer(core.version, None, 0.0, missing=lacking)
                return self._answer(worker, link, answer, self._answered, 0)
            staleness = core.push(
                worker, question.turn, gradients, count=question.count, loss=question.loss
            )
            step = core.clocks[worker]
            if self._agreement is not None and staleness is not None:
                self._agreement.has(worker, question.turn)
            self._changed.notify_all()
            missing = self._wait_to_go_on(worker)
            staleness = staleness if core.is_used(worker, question.turn) else None
            step = max(step, core.caught_up(worker))
            answer = Answer(core.version, staleness, core.loss, missing)
            self._answer(worker, link, answer, self._answered, step)

    def _wait_to_go_on(self, worker: int) -> int | None:
        """The rank that a worker waits for in vain, if there is one."""
        core = self._core
        while not core.may_go_on(worker):
            if not self._wait(lambda: core.may_go_on(worker) or self._lacks_others):
                behind = core.behind(worker)
                for other in behind:
                    self._lose(other, f"let the others wait for {self._patience_s:.0f} s")
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
        """The rank without which there is no update."""
        if self._core.lacks_workers:
            return self._core.tally.gone[0]
        return self._agreement.lacking() if self._agreement is not None else self._world.rank

    def _take_word(self, worker: int, link: Link, question: Question) -> None:
        with self._changed:
            said = self._said.setdefault(question.turn, {})
            said[worker] = (question.loss, question.count)
            self._changed.notify_all()
            clocks, turn = self._core.clocks, question.turn
            if not self._wait(lambda: self._meetings >= turn and said.keys() >= clocks.keys()):
                for other in clocks.keys() - said.keys():
                    self._lose(other, f"let the others wait for {self._patience_s:.0f} s")
            missing = None if self._meetings >= turn else self._world.rank
            answer = Answer(self._core.version, None, self._mean(turn), missing)
            wants = question.kind is Kind.PULL
            self._answer(worker, link, answer, self._met, turn, parameters=wants)

    def _answer(
        self,
        worker: int,
        link: Link,
        answer: Answer,
        answered: dict[int, int],
        number: int,
        *,
        parameters: bool = True,
    ) -> None:
        """Send it, while others may be served: what is sent is a copy."""
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
        said = self._said.get(meeting, {}).values()
        total = sum(count for _, count in said)
        return sum(loss * count for loss, count in said) / max(total, 1.0)

    def _wait(self, over: Callable[[], bool]) -> bool:
        return self._changed.wait_for(over, self._patience_s)

    def _lose(self, worker: int, why: str) -> None:
        if worker in self._core.clocks:
            log.info("without rank %d from here on: %s", worker, why)
        self._core.lose(worker)
        self._changed.notify_all()

    def _raise_lack(self) -> None:
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
    """Let the threads end that still listen."""
    for end in endings:
        end()
    for thread in threads:
        if thread is not threading.current_thread():  # the last one lets go of the server
            thread.join(_LEAVING_S)
