"""A rank that works: gradients go to the servers, parameters come back."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager

import torch
import torch.distributed as dist
from torch import Tensor, nn

from engines.optional.async_updates.exchange import Exchange
from engines.optional.async_updates.link import Link
from engines.optional.async_updates.messages import Answer, Kind, Question
from engines.optional.async_updates.report import Tally, UpdateReport
from engines.runtime.failures import first_failure
from engines.runtime.world import World
from profiles.errors import RankError


class Working(Exchange):
    """A worker's side. Before its optimizer steps, gradients are handed over and parameters taken;
    the optimizer then finds nothing to step.

    Args:
        links, parts: by rank of a server, the link to it and the parameters that it holds.
        skips: whether steps that went on without this rank are skipped (backup workers).
        shares_loss: whether an update is made of several workers' gradients, whose mean loss is
            then known to all.
    """

    keeps_states = False

    def __init__(
        self,
        links: Mapping[int, Link],
        parts: Mapping[int, list[nn.Parameter]],
        optimizer: torch.optim.Optimizer,
        *,
        replica: int,
        replicas: int,
        skips: bool,
        shares_loss: bool,
        world: World,
    ) -> None:
        super().__init__(world.device, replica=replica, replicas=replicas)
        self._links = links
        self._parts = parts
        self._skips = skips
        self._shares_loss = shares_loss
        self._world = world
        self._versions = dict.fromkeys(links, 0)
        self._steps = 0
        self._meetings = 0
        self._tally = Tally()
        optimizer.register_step_pre_hook(self._hand_over)

    def instead(self) -> bool:
        """True if the step was over before this rank began it."""
        self._steps += 1
        is_over = self._skips and min(self._versions.values()) >= self._steps
        self._tally.skipped += is_over
        return is_over

    def taken(self) -> Tensor:
        """The loss; that of the step before where the step was over when this rank came to it."""
        return self.loss

    def average(self, loss: Tensor, count: float) -> Tensor:
        self._meet(Kind.MEET, float(loss), count)
        return self.loss.to(loss.dtype)

    def synchronise(self) -> None:
        self._meet(Kind.PULL, 0.0, 0.0)

    @contextmanager
    def saving(self) -> Iterator[dist.ProcessGroup | None]:
        yield None
        self._meet(Kind.MEET, 0.0, 0.0)

    @property
    def report(self) -> UpdateReport:
        return self._tally.report(
            sent_bytes=sum(link.sent_bytes for link in self._links.values()),
            received_bytes=sum(link.received_bytes for link in self._links.values()),
        )

    def _hand_over(self, *_: object) -> None:
        """One step: all servers are given theirs at once, and give theirs at once, so that a link
        waits for no other."""
        sendings = []
        # Where steps go on without this rank, one server's answer may be of a later step than
        # another's: gradients of both are late for the later one, and not early for its next.
        oldest = min(self._versions.values())
        for server, link in self._links.items():
            gradients = [parameter.grad for parameter in self._parts[server]]
            question = Question(
                Kind.PUSH,
                oldest if self._skips else self._versions[server],
                self._count,
                float(self.loss),
                tuple(gradient is not None for gradient in gradients),
            )
            there = [gradient for gradient in gradients if gradient is not None]
            sendings.append(link.begin_to_send(question.numbers(), there))
            for parameter in self._parts[server]:
                parameter.grad = None
        for sent in sendings:
            sent()
        answers = self._take()
        self._take_parameters()
        staleness = [answer.staleness for answer in answers]
        known = [each for each in staleness if each is not None]
        if len(known) < len(staleness):
            self._tally.dropped += 1
        else:
            self._tally.staleness[max(known)] += 1
        if self._shares_loss:
            self._hear(answers[0])

    def _meet(self, kind: Kind, loss: float, count: float) -> None:
        """A meeting of all workers, where every server gets the same request."""
        self._meetings += 1
        for server, link in self._links.items():
            flags = (False,) * len(self._parts[server])
            link.send(Question(kind, self._meetings, count, loss, flags).numbers())
        answers = self._take()
        if kind is Kind.PULL:
            self._take_parameters()
        else:
            self._hear(answers[-1])

    def _hear(self, answer: Answer) -> None:
        self.loss = torch.tensor(answer.loss, device=self._world.device)

    def _take(self) -> list[Answer]:
        """The servers' answers.

        Raises:
            RankError: names the server that is gone, or the rank that a step lacks.
        """
        answers = []
        for server, link in self._links.items():
            answer = Answer.read(link.receive_numbers(Answer.LENGTH))
            self._versions[server] = answer.version
            self._require_none_missing(server, answer)
            answers.append(answer)
        return answers

    @torch.no_grad()
    def _take_parameters(self) -> None:
        """The servers' parameters into those of this rank, after an answer that lacks nobody."""
        parts = [(self._parts[server], link) for server, link in self._links.items()]
        receivings = [link.begin_to_receive([p.detach() for p in part]) for part, link in parts]
        for (part, _), received in zip(parts, receivings, strict=True):
            for parameter, new in zip(part, received(), strict=True):
                parameter.copy_(new)

    def _require_none_missing(self, server: int, answer: Answer) -> None:
        where = f"rank {self._world.rank} of {self._world.size}, at step {answer.version + 1} of"
        where += f" the server on rank {server}"
        if answer.missing == self._world.rank:
            raise RankError(
                "the others went on without this rank: it came too late",
                where=where,
                hints=["give a longer `timeout_s`, or find out what this rank was waiting for"],
            )
        if answer.missing is not None:
            # A worker that left because a server is gone is not the cause.
            cause = (
                first_failure()
                or f"rank {answer.missing} is gone or does not answer, and a step needs it"
            )
            raise RankError(
                cause,
                where=where,
                hints=[
                    f"look at the output of {' '.join(cause.split()[:2])}",
                    "`backup_workers` stand in for slow and lost ones",
                ],
            )
