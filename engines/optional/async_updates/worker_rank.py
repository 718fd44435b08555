"""A rank that computes gradients for servers, and fetches parameters from them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager

import torch
import torch.distributed as dist
from torch import Tensor, nn

from engines.optional.async_updates.exchange import UpdateExchange
from engines.optional.async_updates.link import WorkerLink
from engines.optional.async_updates.messages import Request, ServerMessage, WorkerMessage
from engines.optional.async_updates.report import Tally, UpdateReport
from engines.runtime.failures import first_failure
from engines.runtime.world import World
from profiles.errors import RankError


class WorkerExchange(UpdateExchange):
    """A worker's side. Before its optimizer steps, gradients are pushed and parameters pulled; the
    optimizer then has nothing to step.

    Args:
        links, parts: by rank of a server, the link to it and the parameters that it holds.
        skips: steps that finished without this rank are skipped (backup workers).
        shares_loss: an update is made of several workers' gradients, whose mean loss then goes to
            all of them.
    """

    keeps_states = False

    def __init__(
        self,
        links: Mapping[int, WorkerLink],
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
        self._reductions = 0
        self._tally = Tally()
        optimizer.register_step_pre_hook(self._push_gradients)

    def replace_step(self) -> bool:
        """True if the step was over before this rank began it."""
        self._steps += 1
        is_over = self._skips and min(self._versions.values()) >= self._steps
        self._tally.skipped += is_over
        return is_over

    def take_loss(self) -> Tensor:
        """The loss; that of the step before where the step was over when this rank came to it."""
        return self.loss

    def average(self, loss: Tensor, count: float) -> Tensor:
        self._reduce(Request.REDUCE, float(loss), count)
        return self.loss.to(loss.dtype)

    def synchronise(self) -> None:
        self._reduce(Request.PULL, 0.0, 0.0)

    @contextmanager
    def saving(self) -> Iterator[dist.ProcessGroup | None]:
        yield None
        self._reduce(Request.REDUCE, 0.0, 0.0)

    @property
    def report(self) -> UpdateReport:
        return self._tally.report(
            sent_bytes=sum(link.sent_bytes for link in self._links.values()),
            received_bytes=sum(link.received_bytes for link in self._links.values()),
        )

    def _push_gradients(self, *_: object) -> None:
        """Push gradients to all servers at once, then pull all parameters at once, so that no link
        waits for another."""
        sendings = []
        # Where steps finish without this rank, one server's answer may be of a later step than
        # another's: gradients of both are late for the later one, not early for its next.
        oldest = min(self._versions.values())
        for server, link in self._links.items():
            gradients = [parameter.grad for parameter in self._parts[server]]
            request = WorkerMessage(
                Request.PUSH,
                oldest if self._skips else self._versions[server],
                self._count,
                float(self.loss),
                tuple(gradient is not None for gradient in gradients),
            )
            present = [gradient for gradient in gradients if gradient is not None]
            sendings.append(link.begin_to_send(request.numbers(), present))
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
            self._take_loss(answers[0])

    def _reduce(self, kind: Request, loss: float, count: float) -> None:
        """Reduce a loss over all workers, with the same request to every server."""
        self._reductions += 1
        for server, link in self._links.items():
            flags = (False,) * len(self._parts[server])
            link.send(WorkerMessage(kind, self._reductions, count, loss, flags).numbers())
        answers = self._take()
        if kind is Request.PULL:
            self._take_parameters()
        else:
            self._take_loss(answers[-1])

    def _take_loss(self, answer: ServerMessage) -> None:
        self.loss = torch.tensor(answer.loss, device=self._world.device)

    def _take(self) -> list[ServerMessage]:
        """The servers' answers.

        Raises:
            RankError: names the server that is gone, or the rank that a step needs.
        """
        answers = []
        for server, link in self._links.items():
            answer = ServerMessage.read(link.receive_numbers(ServerMessage.LENGTH))
            self._versions[server] = answer.version
            self._require_none_missing(server, answer)
            answers.append(answer)
        return answers

    @torch.no_grad()
    def _take_parameters(self) -> None:
        """Copy the servers' parameters into those of this rank, after a complete answer."""
        parts = [(self._parts[server], link) for server, link in self._links.items()]
        receivings = [link.begin_to_receive([p.detach() for p in part]) for part, link in parts]
        for (part, _), received in zip(parts, receivings, strict=True):
            for parameter, new in zip(part, received(), strict=True):
                parameter.copy_(new)

    def _require_none_missing(self, server: int, answer: ServerMessage) -> None:
        where = f"rank {self._world.rank} of {self._world.size}, at step {answer.version + 1} of"
        where += f" the server on rank {server}"
        if answer.missing == self._world.rank:
            raise RankError(
                "this rank was dropped: its gradient arrived after the step finished",
                where=where,
                hints=["give a longer `timeout_s`, or see what delayed this rank"],
            )
        if answer.missing is not None:
            lost = self._links.get(answer.missing)  # a server that the other one has to agree with
            who = lost.who if lost is not None else f"rank {answer.missing}"
            # A worker that left because a server is gone is not the cause.
            cause = first_failure() or f"{who} is gone or does not answer, and a step needs it"
            name = " ".join(cause.split()[:2])
            hints = [f"look at the output of {name}"]
            if name not in [f"rank {server}" for server in self._links]:
                hints += ["`backup_workers` replace slow and lost ones"]
            raise RankError(cause, where=where, hints=hints)
