"""`PipelineStage`, the same on every torch, and its split backward; private names, each tested."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from copy import copy
from dataclasses import dataclass, field
from functools import partial
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.autograd.graph import GradientEdge, Node
from torch.distributed.pipelining import PipelineStage
from torch.distributed.pipelining import _backward as halves
from torch.distributed.pipelining import stage as stages

from profiles.torch_compat.sent_messages import SentMessages

_Base: Any = PipelineStage


class _Stage(_Base):  # type: ignore[misc]
    """A stage whose split backward gives every weight its gradient, however often it is used, and
    whose buffers last from a message to the end of its microbatch's backward.

    torch groups the weights by the nodes where they meet what depends on the inputs. In torch 2.13
    two groups that a weight joins both have it: twice the gradient, or an error about a graph that
    is freed. Earlier ones count a weight once more for each node that leads to another. Weights
    that meet nothing of the inputs are left out by all.

    torch's stages have a buffer for each message of every microbatch of a round for as long as they
    live. Here they are not used again but made anew: a gradient may be a view of one.
    """

    stage_index: int
    sent: SentMessages | None = None
    """Where set, this sends its messages itself: torch would hold them until the step ends."""
    _arriving: Sequence[Tensor | None] = ()
    _returning: Sequence[Tensor | None] = ()

    def _prepare_forward_infra(
        self, num_microbatches: int, *args: Any, **kwargs: Any
    ) -> tuple[Any, ...]:
        made: tuple[Any, ...] = super()._prepare_forward_infra(1, *args, **kwargs)
        messages = self.args_recv_info[0]
        self._arriving = _layouts(messages)
        _drop(messages)
        for microbatch in range(num_microbatches):
            self.args_recv_info[microbatch] = tuple(map(copy, messages))
        return made

    def _create_grad_recv_info(self, act_send_info: dict[int, list[int]]) -> tuple[Any, ...]:
        messages: tuple[Any, ...] = super()._create_grad_recv_info(act_send_info)
        self._returning = _layouts(messages)
        _drop(messages)
        return messages

    def get_fwd_recv_ops(self, fwd_chunk_id: int) -> list[dist.P2POp]:
        _make_buffers(self.args_recv_info[fwd_chunk_id], self._arriving, self.device)
        messages: list[dist.P2POp] = super().get_fwd_recv_ops(fwd_chunk_id)
        return messages

    def get_bwd_recv_ops(self, bwd_chunk_id: int) -> list[dist.P2POp]:
        _make_buffers(self.grad_recv_info.get(bwd_chunk_id, ()), self._returning, self.device)
        messages: list[dist.P2POp] = super().get_bwd_recv_ops(bwd_chunk_id)
        return messages

    def get_fwd_send_ops(self, fwd_chunk_id: int) -> list[dist.P2POp]:
        messages: list[dist.P2POp] = super().get_fwd_send_ops(fwd_chunk_id)
        return self._unsent(messages, fwd_chunk_id, is_forward=True)

    def get_bwd_send_ops(self, bwd_chunk_id: int) -> list[dist.P2POp]:
        messages: list[dist.P2POp] = super().get_bwd_send_ops(bwd_chunk_id)
        return self._unsent(messages, bwd_chunk_id, is_forward=False)

    def _unsent(
        self, messages: list[dist.P2POp], microbatch: int, *, is_forward: bool
    ) -> list[dist.P2POp]:
        if self.sent is None:
            return messages
        self.sent.send(messages, self.stage_index, microbatch, is_forward=is_forward)
        return []

    def forward_one_chunk(self, fwd_chunk_id: int, *args: Any, **kwargs: Any) -> Any:
        if self.sent is not None:
            self.sent.arrived(self.stage_index, fwd_chunk_id, is_forward=True)
        return super().forward_one_chunk(fwd_chunk_id, *args, **kwargs)

    def set_local_bwd_input(
        self, next_stage_bwd_outputs: tuple[Tensor | None, ...], mb_index: int
    ) -> None:
        self._make_room(next_stage_bwd_outputs, mb_index)
        super().set_local_bwd_input(next_stage_bwd_outputs, mb_index)

    def _make_room(self, gradients: Sequence[Tensor | None], microbatch: int) -> None:
        """Make buffers for the zeros that stand for gradients which a stage of this rank has not
        found; arguments by name come last, and have none."""
        missing = [
            message if gradient is None else None
            for message, gradient in zip(self.grad_recv_info[microbatch], gradients, strict=False)
        ]
        _make_buffers(missing, self._returning, self.device)

    def backward_one_chunk(
        self,
        bwd_chunk_id: int,
        loss: Tensor | None = None,
        full_backward: bool = True,
        last_backward: bool = False,
    ) -> None:
        if self.sent is not None:
            self.sent.arrived(self.stage_index, bwd_chunk_id, is_forward=False)
        super().backward_one_chunk(bwd_chunk_id, loss, full_backward, last_backward)
        if full_backward:
            self._drop_buffers(bwd_chunk_id)

    def backward_weight_one_chunk(self, bwd_chunk_id: int, last_backward: bool = False) -> None:
        super().backward_weight_one_chunk(bwd_chunk_id, last_backward)
        self._drop_buffers(bwd_chunk_id)

    def clear_runtime_states(self) -> None:
        for microbatch in self.args_recv_info:
            self._drop_buffers(microbatch)
        super().clear_runtime_states()

    def _drop_buffers(self, microbatch: int) -> None:
        _drop(self.args_recv_info[microbatch])
        _drop(self.grad_recv_info.get(microbatch, ()))

    def backward_maybe_with_nosync(
        self, backward_type: str, bwd_kwargs: dict[str, Any], last_backward: bool = False
    ) -> tuple[tuple[Tensor | None, ...], list[_Group] | None]:
        if backward_type == "input":
            return _backward_of_inputs(
                bwd_kwargs["stage_output"],
                bwd_kwargs["output_grads"],
                bwd_kwargs["input_values"],
                self.submod.parameters(),
            )
        if backward_type == "weight":
            _backward_of_weights(self.submod.parameters(), bwd_kwargs["param_groups"])
            return (), None
        made: tuple[tuple[Tensor | None, ...], list[_Group] | None] = (
            super().backward_maybe_with_nosync(backward_type, bwd_kwargs, last_backward)
        )
        return made


class _EarlierStage(_Stage):
    """A stage of torch < 2.13, with what later ones do by themselves.

    There every received tensor is made to need a gradient, whole numbers too, and each has to get
    one; and two stages of a rank meet by messages of it to itself, which gloo does not have.
    """

    has_backward: bool

    def clear_runtime_states(self) -> None:
        for microbatch in self.args_recv_info:
            self._drop_buffers(microbatch)
        self.fwd_cache.clear()
        self.output_chunks.clear()

    def _get_init_p2p_neighbors_ops(self) -> list[dist.P2POp]:
        return [
            message
            for message in super()._get_init_p2p_neighbors_ops()
            if message.group_peer != self.group_rank
        ]

    def _prepare_forward_infra(self, *args: Any, **kwargs: Any) -> tuple[Any, ...]:
        # With a backward it would mark all buffers.
        trains: bool = self.has_backward
        self.has_backward = False
        try:
            made: tuple[Any, ...] = super()._prepare_forward_infra(*args, **kwargs)
        finally:
            self.has_backward = trains
        for like, meta in zip(self._arriving, self.inputs_meta, strict=not self.is_first):
            if like is not None:
                like.requires_grad_(trains and meta.requires_grad)
        return made

    def set_local_fwd_input(self, prev_stage_outputs: Any, mb_index: int) -> None:
        sent = (
            (prev_stage_outputs,) if isinstance(prev_stage_outputs, Tensor) else prev_stage_outputs
        )
        places = zip(self.args_recv_info[mb_index], self.inputs_meta, sent, strict=True)
        for info, meta, tensor in places:
            info.buffer = tensor.detach().requires_grad_(meta.requires_grad)

    def _create_grad_recv_info(self, act_send_info: dict[int, list[int]]) -> tuple[Any, ...]:
        made = super()._create_grad_recv_info(act_send_info)
        needed = (meta.requires_grad for meta in self.get_outputs_meta())
        return tuple(info if need else None for info, need in zip(made, needed, strict=False))

    def _create_grad_send_info(self, args_recv_info: tuple[Any, ...]) -> list[int | None]:
        return [
            info.source if isinstance(info, stages._RecvInfo) and meta.requires_grad else None
            for info, meta in zip(args_recv_info, self.inputs_meta, strict=True)
        ]

    def _retrieve_recv_grads(self, bwd_chunk_id: int) -> tuple[Tensor | None, ...]:
        received = self.grad_recv_info[bwd_chunk_id]
        return tuple(None if info is None else info.buffer for info in received)

    def get_bwd_send_ops(self, bwd_chunk_id: int) -> list[dist.P2POp]:
        if self.has_backward and not self.is_first:
            # Of the arguments by name, which come last, nobody waits for a gradient.
            own = self.bwd_cache[bwd_chunk_id][: len(self.inputs_meta)]
            self.bwd_cache[bwd_chunk_id] = tuple(
                torch.zeros_like(meta, requires_grad=False)
                if gradient is None and meta.requires_grad
                else gradient
                for gradient, meta in zip(own, self.inputs_meta, strict=True)
            )
        sent: list[dist.P2POp] = super().get_bwd_send_ops(bwd_chunk_id)
        return sent

    def set_local_bwd_input(
        self, next_stage_bwd_outputs: tuple[Tensor | None, ...], mb_index: int
    ) -> None:
        self._make_room(next_stage_bwd_outputs, mb_index)
        for info, gradient in zip(
            self.grad_recv_info[mb_index], next_stage_bwd_outputs, strict=False
        ):
            if info is not None:
                info.buffer = torch.zeros_like(info.buffer) if gradient is None else gradient


def _layouts(messages: Iterable[Any]) -> list[Tensor | None]:
    """Buffers like those of messages, without memory; None for what is no message."""
    buffers = [getattr(message, "buffer", None) for message in messages]
    return [
        None
        if buffer is None
        else torch.empty_like(buffer, device="meta", requires_grad=buffer.requires_grad)
        for buffer in buffers
    ]


def _drop(messages: Iterable[Any]) -> None:
    for message in messages:
        if getattr(message, "buffer", None) is not None:
            message.buffer = None


def _make_buffers(
    messages: Sequence[Any], layouts: Sequence[Tensor | None], device: torch.device
) -> None:
    """Give messages that have none a buffer each, without values."""
    for message, like in zip(messages, layouts, strict=bool(messages)):
        if like is not None and message is not None and message.buffer is None:
            made = torch.empty_like(like, device=device, requires_grad=like.requires_grad)
            message.buffer = made


STAGE: type[PipelineStage] = _Stage if hasattr(_Base, "_recv_meta") else _EarlierStage
"""`PipelineStage` as torch 2.13 and later have it, with a split backward of our own: received
values need a gradient where the metadata says so, and zeros are sent for one that a backward does
not find."""


@dataclass(eq=False, slots=True)
class _Group:
    """Weights, and the nodes where they meet what depends on the inputs, with what the first half
    of the backward sent into each."""

    weights: list[Node]
    nodes: list[Node]
    sent: dict[Node, tuple[Tensor | None, ...]] = field(default_factory=dict)


def _backward_of_inputs(
    outputs: Sequence[Tensor],
    gradients: Sequence[Tensor | None] | None,
    inputs: Sequence[object],
    parameters: Iterable[nn.Parameter],
) -> tuple[tuple[Tensor | None, ...], list[_Group]]:
    """Differentiate by the inputs; None for one that needs no gradient, or that nothing depends on.

    Returns their gradients, and the groups from which the weights' are found. Weights that lead to
    an output beside the inputs get theirs now.
    """
    # A loss has no gradients from a next stage.
    given = [torch.ones_like(o) for o in outputs] if gradients is None else gradients
    ends = [(o, g) for o, g in zip(outputs, given, strict=True) if o.requires_grad]
    needing = {
        number: value
        for number, value in enumerate(inputs)
        if isinstance(value, Tensor) and value.requires_grad
    }
    owners = {_node(parameter): parameter for parameter in parameters if parameter.requires_grad}
    groups, others = _grouped(
        [_node(output) for output, _ in ends], [_node(value) for value in needing.values()], owners
    )
    hooks = [
        node.register_prehook(partial(group.sent.__setitem__, node))
        for group in groups
        for node in group.nodes
    ]
    wanted = [*needing.values(), *(owners[node] for node in others)]
    computed: Sequence[Tensor | None] = [None] * len(wanted)
    try:
        if ends and wanted:
            computed = torch.autograd.grad(
                [output for output, _ in ends],
                wanted,
                [gradient for _, gradient in ends],
                retain_graph=True,
                allow_unused=True,
            )
    finally:
        for hook in hooks:
            hook.remove()
    for output in outputs:
        output.detach_()  # what led there is not needed again
    for node, gradient in zip(others, computed[len(needing) :], strict=True):
        _accumulate(owners[node], gradient)
    by_number = dict(zip(needing, computed, strict=False))
    return tuple(by_number.get(number) for number in range(len(inputs))), groups


def _grouped(
    ends: list[Node], inputs: list[Node], weights: Iterable[Node]
) -> tuple[list[_Group], list[Node]]:
    """Weights that meet the inputs' ways to the `ends` in common nodes, a group of each; and those
    that lead to an end on a way of their own."""
    back = halves.construct_reverse_graph(ends)
    ways, _ = halves.reverse_closure(inputs, set(), back)
    groups: list[_Group] = []
    others = []
    for weight in weights:
        own, met = halves.reverse_closure([weight], ways, back)
        if not own.isdisjoint(ends):
            others.append(weight)
        elif met:
            joined = [group for group in groups if not met.isdisjoint(group.nodes)]
            nodes = dict.fromkeys([n for group in joined for n in group.nodes] + list(met))
            known = [w for group in joined for w in group.weights]
            groups = [group for group in groups if group not in joined]
            groups.append(_Group([*known, weight], list(nodes)))
    return groups, others


def _backward_of_weights(parameters: Iterable[nn.Parameter], groups: list[_Group]) -> None:
    """Add the weights' gradients, from the nodes where they meet what depends on the inputs.

    A node that is reached from another of its group is given what the first half sent into it: what
    comes from the other is in that already. Ways between two nodes lead through those of
    other groups, so that the graph is kept until all are done.
    """
    owners = {_node(parameter): parameter for parameter in parameters if parameter.requires_grad}
    crossing = any(len(group.nodes) > 1 for group in groups)
    for group in groups:
        edges = [
            (GradientEdge(node, place), gradient)
            for node, gradients in group.sent.items()
            for place, gradient in enumerate(gradients)
            if gradient is not None
        ]
        if not edges:
            continue
        hooks = [node.register_prehook(_giver(sent)) for node, sent in group.sent.items()]
        try:
            computed = torch.autograd.grad(
                [edge for edge, _ in edges],
                [GradientEdge(node, 0) for node in group.weights],
                [gradient for _, gradient in edges],
                retain_graph=crossing,
                allow_unused=True,
            )
        finally:
            for hook in hooks:
                hook.remove()
        group.sent.clear()
        for node, gradient in zip(group.weights, computed, strict=True):
            _accumulate(owners[node], gradient)


def _accumulate(owner: nn.Parameter, gradient: Tensor | None) -> None:
    if gradient is None:
        return
    if owner.grad is None:
        # Sums hand one tensor to all their terms: the next microbatch would be added to each.
        owner.grad = gradient.clone()
    else:
        owner.grad += gradient


def _node(tensor: Tensor) -> Node:
    """The node that a gradient of `tensor` flows into."""
    return cast(Node, halves._get_grad_fn_or_grad_acc(tensor))


def _giver(
    gradients: tuple[Tensor | None, ...],
) -> Callable[[tuple[Tensor | None, ...]], tuple[Tensor | None, ...]]:
    return lambda _: gradients
