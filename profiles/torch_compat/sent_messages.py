"""Messages that stages have sent; private names of torch.distributed.pipelining, each tested."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import Any

import torch.distributed as dist
from torch.distributed.pipelining import schedules

_BACKWARDS = frozenset({schedules.FULL_BACKWARD, schedules.BACKWARD_INPUT})


class SentMessages:
    """Messages of a rank of a schedule of several stages in a step, until they have left.

    torch waits for all of it (since 2.15: for all gradients) when the step is over, and gloo holds
    the memory of a message until somebody waits for it. Here a rank waits as soon as it cannot take
    time: a peer that has sent something is through with all that came before that in its order.

    Args:
        orders: what each rank of the schedule does, in order.
        ranks: of each stage.
    """

    def __init__(self, orders: Mapping[int, Sequence[Any]], ranks: Mapping[int, int]) -> None:
        self._ranks = ranks
        self._used: dict[tuple[bool, int, int], int] = {}  # is forward, stage, microbatch
        self._sent: dict[tuple[bool, int, int], int] = {}
        for actions in orders.values():
            for position, action in enumerate(actions):
                kind, key = action.computation_type, (action.stage_index, action.microbatch_index)
                if kind == schedules.FORWARD or kind in _BACKWARDS:
                    self._used[(kind == schedules.FORWARD, *key)] = position
                elif kind in (schedules.SEND_F, schedules.SEND_B):
                    self._sent[(kind == schedules.SEND_F, *key)] = position
        self._pending: dict[int, list[tuple[int, list[dist.Work]]]] = defaultdict(list)

    def send(
        self, messages: list[dist.P2POp], stage: int, microbatch: int, *, is_forward: bool
    ) -> None:
        """Send what `stage` has made of a microbatch to the stage after it, or before it."""
        receiver = stage + (1 if is_forward else -1)
        if messages:
            used = self._used[is_forward, receiver, microbatch]
            works = schedules._batch_p2p(messages)
            self._pending[self._ranks[receiver]].append((used, works))

    def arrived(self, stage: int, microbatch: int, *, is_forward: bool) -> None:
        """Let go of what the sender of a message has used before: the one that `stage` is about to
        take, of a forward or of a backward."""
        sender = stage - (1 if is_forward else -1)
        sent = self._sent.get((is_forward, sender, microbatch))  # None from a stage of this rank
        if sent is None:
            return
        pending = self._pending[self._ranks[sender]]
        _wait([works for used, works in pending if used < sent])
        pending[:] = [(used, works) for used, works in pending if used >= sent]

    def finish(self) -> None:
        """Wait for all that is still on its way."""
        for pending in self._pending.values():
            _wait([works for _, works in pending])
        self._pending.clear()


def _wait(sent: Sequence[Sequence[dist.Work]]) -> None:
    for works in sent:
        for work in works:
            work.wait()


def let_go_of_sent(schedule: Any, stages: Sequence[Any]) -> SentMessages | None:
    """Have the stages of a schedule's rank send their messages themselves.

    None where ranks have a stage each: 1F1B waits for every message before the next, and GPipe has
    most memory taken before it has sent a gradient.
    """
    orders = getattr(schedule, "pipeline_order_with_comms", None)
    if orders is None:
        return None
    sent = SentMessages(orders, schedule.stage_index_to_group_rank)
    for stage in stages:
        stage.sent = sent
    return sent
