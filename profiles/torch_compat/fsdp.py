"""Backports of FSDP2's behaviour from torch 2.13 on; private names, each tested."""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable, Iterator
from typing import Any, cast
from weakref import WeakKeyDictionary

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule

_MODULES: WeakKeyDictionary[FSDPModule, list[weakref.ref[FSDPModule]]] = WeakKeyDictionary()


def fsdp_modules(root: FSDPModule) -> list[FSDPModule]:
    """The root and the modules below it that FSDP2 wraps. It wraps the root last: those of one are
    looked up once, for every step asks."""
    known = _MODULES.get(root)
    if known is None:
        every = cast(nn.Module, root).modules()
        known = [weakref.ref(module) for module in every if isinstance(module, FSDPModule)]
        _MODULES[root] = known
    return [module for each in known if (module := each()) is not None]


def reduce_unused_parameters(root: FSDPModule) -> None:
    """Reduce zeros for parameters without a gradient: else ranks that use different parameters
    would exchange lists of different tensors."""
    switch = getattr(root, "set_reduce_scatter_unused_params", None)
    if switch is not None:
        switch(True)
        return
    for _, group in _groups(root):
        group.post_backward = functools.partial(_with_zeros, group, group.post_backward)


def note_used(root: FSDPModule, used: Callable[[nn.Parameter], None]) -> None:
    """Call `used` with the shard of each parameter that has a gradient on this rank, before zeros
    are reduced for the others."""
    for _, group in _groups(root):
        group.post_backward = functools.partial(_noting, group, group.post_backward, used)


def reduce_now(root: FSDPModule) -> None:
    """Reduce the gradients that backwards without synchronisation left whole, and end the step as
    a backward does. (What `PipelineStage.perform_reduce_grad` does for a stage that is one.)

    The order of the forwards that are over is forgotten, which torch does after the last backward
    alone: in the next round the first unit's backward would fetch a unit that nobody runs.
    """
    for _, group in _groups(root):
        group.post_backward()
        group._post_forward_indices.clear()
    top = cast(Any, root)._get_fsdp_state()
    top._comm_ctx.post_forward_order.clear()
    # From torch 2.15 on: who ends the step, which no backward under way says.
    if getattr(top._state_ctx, "manual_backward_finalization_active", False) is None:
        top._state_ctx.manual_backward_finalization_active = False
    top._root_post_backward_final_callback()


def reduce_at_end(module: FSDPModule) -> None:
    """Reduce the gradients of `module` when the whole backward is over, as torch does where no
    input needs a gradient, and hand its inputs through as they are.

    To learn when the backward of a module is over torch passes its inputs through a function of its
    own, which makes views of them that nothing may write to.
    """
    for group in _groups_of(cast(Any, module)._get_fsdp_state()):
        group._register_post_backward_hook = lambda args, kwargs: (args, kwargs)


def watch_reductions(root: FSDPModule, hear: Callable[[torch.Tensor], None]) -> None:
    """Call `hear` with what goes into each reduce-scatter: this rank's gradients of a unit, flat,
    with zeros between them. (`set_custom_reduce_scatter` would replace how it is done.)"""
    for _, group in _groups(root):
        group._reduce_scatter_comm = _Watched(group._reduce_scatter_comm, hear)


class _Watched:
    """A reduce-scatter that is looked at."""

    def __init__(self, comm: Any, hear: Callable[[torch.Tensor], None]) -> None:
        self._comm, self._hear = comm, hear

    def allocate(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        made: torch.Tensor = self._comm.allocate(*args, **kwargs)
        return made

    def __call__(self, output_tensor: Any, input_tensor: Any, *args: Any, **kwargs: Any) -> object:
        self._hear(input_tensor)
        return self._comm(output_tensor, input_tensor, *args, **kwargs)


@torch.no_grad()
def move_shards(
    module: FSDPModule, home: Callable[[torch.Tensor], torch.Tensor]
) -> list[nn.Parameter]:
    """Let the parameters that FSDP2 has cut for `module` live in what `home` gives for the flat
    tensor of each, of equal content. The objects stay; FSDP2 copies from there, and knows the
    memory again where it looks at its parameters anew (`reset_sharded_param`).

    Args:
        module: cut with `CPUOffloadPolicy(pin_memory=False)`: memory that it takes for pinned it
            would read while it is written.

    Returns:
        The parameters.
    """
    moved = []
    for group in _groups_of(cast(Any, module)._get_fsdp_state()):
        for parameter in group.fsdp_params:
            local = parameter.sharded_param._local_tensor
            shape, strides = local.size(), local.stride()
            flat = home(parameter._sharded_param_data)
            parameter._sharded_param_data = flat
            # What the last rank lacks of an even part is at the end.
            local.data = flat.as_strided(shape, strides)
            moved.append(parameter.sharded_param)
    return moved


def forget_step_underway(root: FSDPModule) -> None:
    """Drop what FSDP2 keeps of a step that broke off: its place in the forward or backward, and
    gradients on their way, which torch's own reset leaves. Before its first forward it keeps none.
    """
    if cast(Any, root)._get_fsdp_state()._is_root is None:
        return
    if hasattr(root, "reset_iter_state"):
        root.reset_iter_state()
    else:
        _reset_iteration(root)
    for _, group in _groups(root):
        group._partial_reduce_output = None
        for parameter in group.fsdp_params:
            if "unsharded_accumulated_grad" in vars(parameter):  # torch < 2.15
                parameter.unsharded_accumulated_grad = None
            whole = getattr(parameter, "_unsharded_param", None)
            if whole is not None:
                whole.grad = None


def unreduced(root: FSDPModule) -> list[str]:
    """The parameters whose gradients are still whole: after the last backward of a step none is,
    unless the loss depends on tensors that FSDP2 did not find in what its modules returned."""
    return [
        str(parameter._param_fqn)
        for _, group in _groups(root)
        for parameter in group.fsdp_params
        if _has_whole_gradient(parameter)
    ]


def _groups(root: FSDPModule) -> Iterator[tuple[Any, Any]]:
    """Each state with each of its parameter groups (torch < 2.13: one or none)."""
    for module in fsdp_modules(root):
        state = cast(Any, module._get_fsdp_state())
        for group in _groups_of(state):
            yield state, group


def _groups_of(state: Any) -> list[Any]:
    groups = getattr(state, "_fsdp_param_groups", None)
    groups = [state._fsdp_param_group] if groups is None else groups
    return [group for group in groups if group is not None]


def _noting(
    group: Any,
    post_backward: Callable[..., None],
    used: Callable[[nn.Parameter], None],
    *args: object,
) -> None:
    for parameter in group.fsdp_params:
        if _has_whole_gradient(parameter):
            used(parameter.sharded_param)
    post_backward(*args)


def _has_whole_gradient(parameter: Any) -> bool:
    whole = getattr(parameter, "_unsharded_param", None)
    accumulated = getattr(parameter, "unsharded_accumulated_grad", None)  # torch < 2.15
    return accumulated is not None or getattr(whole, "grad", None) is not None


def _with_zeros(group: Any, post_backward: Callable[[], None], *_: object) -> None:
    if group.reduce_grads:
        for parameter in group.fsdp_params:
            whole = getattr(parameter, "_unsharded_param", None)
            if whole is None or not whole.requires_grad:
                continue
            if whole.grad is None and parameter.unsharded_accumulated_grad is None:
                whole.grad = torch.zeros_like(whole)
    post_backward()


def _reset_iteration(root: FSDPModule) -> None:
    """As `FSDPModule.reset_iter_state` of torch 2.13, by the names of 2.11."""
    top = cast(Any, root._get_fsdp_state())
    for state in top._state_ctx.all_states:
        state._modules_to_run_forward.clear()
        state._training_state = _idle(state)
    for _, group in _groups(root):
        group._wait_for_post_backward()
        group.finalize_backward()
        group._reshard_after_forward_event = None
        group._training_state = _idle(group)
        group._to_sharded()
    top._comm_ctx.all_gather_state = None
    top._comm_ctx.reduce_scatter_state = None
    top._comm_ctx.post_forward_order.clear()
    top._state_ctx.iter_forward_root = None
    top._state_ctx.post_backward_final_callback_queued = False


def _idle(holder: Any) -> object:
    return type(holder._training_state).IDLE
