"""The buckets of DistributedDataParallel; private names, each tested."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, cast

import torch
from torch.nn.parallel import DistributedDataParallel

_LAYOUT = "rebuilt_per_bucket_param_indices"


def bucket_order(runner: DistributedDataParallel) -> list[int]:
    """The parameters that `runner` reduces, by number, in the order of their gradients' buckets.

    DDP takes one bucket for its first backward, and fills others afterwards in the order in which
    gradients came: what the next forward would do is done here, so all ranks call it. Empty where
    there was no backward yet, or where buckets stay as they are.
    """
    reducer, logger = cast(Any, runner).reducer, cast(Any, runner).logger
    reducer._rebuild_buckets()
    if not cast(Any, runner)._get_ddp_logging_data().get(_LAYOUT):
        logger.set_runtime_stats_and_log()
    layout = cast(Any, runner)._get_ddp_logging_data().get(_LAYOUT) or ""
    return [int(number) for number in layout.replace(",", " ").split()]


def hook_state(runner: DistributedDataParallel) -> object | None:
    """The state that `register_comm_hook` was given; None without a hook."""
    hooks = cast(Any, runner)._comm_hooks
    return hooks[-1][1] if hooks else None


def forget_backward_underway(runner: DistributedDataParallel) -> None:
    """Let `runner` begin anew after a backward that broke off, which it refuses otherwise. Its
    buckets are filled in a new order after the next one: all ranks call it."""
    cast(Any, runner)._update_process_group(cast(Any, runner).process_group)


def rebuild_buckets(runner: DistributedDataParallel, order: Sequence[int]) -> None:
    """Give a `runner` without a backward the buckets that one with this `bucket_order` has.

    By a backward of zeros in that order; all ranks call it. One that had a backward stays as it is,
    and so does one that looks for unused parameters: its buckets are those of its construction.
    """
    private = cast(Any, runner)
    parameters, _ = private._build_params_for_reducer()
    if private.find_unused_parameters or private.static_graph:
        return
    if sorted(order) != list(range(len(parameters))) or bucket_order(runner):
        return
    private.logger.set_runtime_stats_and_log()
    private.reducer.prepare_for_forward()
    private.reducer.prepare_for_backward([])
    for number in order:
        parameter = parameters[number]
        torch.autograd.backward([parameter], [torch.zeros_like(parameter)])
    for parameter in parameters:
        parameter.grad = None
    bucket_order(runner)
