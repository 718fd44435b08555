"""Sum a tensor over ranks by messages, all of them at once or a round at a time.

    for messages in stepped(tensor, kind=Aggregation.RING):
        print(*messages, sep="\\n")  # what has just been sent, and `tensor` after it

Only `isend` and `irecv` are used, so that it runs on gloo as on NCCL.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
import torch.distributed as dist
from torch import Tensor

from engines.optional.aggregation.rounds import Message, Round, parts, rounds
from engines.plan import Aggregation


@torch.no_grad()
def aggregate(
    tensor: Tensor,
    group: dist.ProcessGroup | None = None,
    *,
    kind: Aggregation = Aggregation.BACKEND,
    per_node: int = 1,
    devices: int = 1,
) -> Tensor:
    """The sum of `tensor` over the ranks of `group`, in its place; all ranks call it.

    All ranks end with the same bits. They are those of `dist.all_reduce` where the order of adding
    up does not matter (two ranks, or whole numbers), else its last digits differ.

    Args:
        tensor: of any shape and dtype that can be added.
        group: None for all ranks.
        kind: how; BACKEND is `dist.all_reduce`.
        per_node, devices: see `engines.optional.aggregation.rounds.rounds`.

    Raises:
        InputError: nodes that do not divide the ranks, or more parameter devices than ranks.
    """
    if kind is Aggregation.BACKEND:
        dist.all_reduce(tensor, group=group)
        return tensor
    for _ in stepped(tensor, group, kind=kind, per_node=per_node, devices=devices):
        pass
    return tensor


def stepped(
    tensor: Tensor,
    group: dist.ProcessGroup | None = None,
    *,
    kind: Aggregation,
    per_node: int = 1,
    devices: int = 1,
) -> Iterator[Round]:
    """`aggregate` round by round: each one is yielded when this rank is done with it.

    All ranks go through all of it.
    """
    ranks = dist.get_world_size(group)
    script = rounds(kind, ranks, per_node=per_node, devices=devices)
    flat = tensor.detach().contiguous().view(-1)
    cut = list(flat.tensor_split(parts(kind, ranks, devices=devices)))
    starts = [0]
    for part in cut:
        starts.append(starts[-1] + part.numel())
    for messages in script:
        _exchange(flat, starts, messages, group)
        yield messages
    if flat.data_ptr() != tensor.data_ptr():
        tensor.detach().copy_(flat.view(tensor.shape))


def _exchange(
    flat: Tensor, starts: list[int], messages: Round, group: dist.ProcessGroup | None
) -> None:
    """Send and receive this rank's messages of a round, and add up what came."""
    rank = dist.get_rank(group)
    arrived: list[tuple[Tensor, Message, Tensor]] = []
    sends, receives = [], []
    for message in messages:
        span = flat[starts[message.parts[0]] : starts[message.parts[-1] + 1]]
        if not span.numel():  # more parts than elements
            continue
        if message.source == rank:
            sends.append(dist.P2POp(dist.isend, span, group=group, group_peer=message.target))
        elif message.target == rank:
            buffer = torch.empty_like(span) if message.adds else span
            receives.append(dist.P2POp(dist.irecv, buffer, group=group, group_peer=message.source))
            if message.adds:
                arrived.append((span, message, buffer))
    if not sends and not receives:
        return
    # gloo tells a sender that its receiver is ready over the connection on which it sends itself:
    # said first, it does not wait behind a message of its own, and both directions go at once.
    for work in dist.batch_isend_irecv([*receives, *sends]):
        work.wait()
    spans = {message.parts[0]: span for span, message, _ in arrived}
    for first, span in spans.items():
        by_source = {m.source: buffer for _, m, buffer in arrived if m.parts[0] == first}
        _add_in_order(span, rank, by_source)


def _add_in_order(own: Tensor, rank: int, others: dict[int, Tensor]) -> None:
    """Sum up in the order of ranks, so that ranks which sum up the same get the same bits."""
    first, *rest = sorted({rank: own, **others}.items())
    if first[0] == rank:
        for _, other in rest:
            own += other
        return
    total = first[1]
    for _, other in rest:
        total += other
    own.copy_(total)
