"""New connections for gloo groups that exist; private names, each tested."""

from __future__ import annotations

from datetime import timedelta
from typing import Any, cast

import torch
import torch.distributed as dist

from profiles.torch_compat import default_store, every_group

_FIRST_KIND = 100
"""A group takes one backend of a kind and keeps it; torch's own kinds are numbered from 0 to 6."""


def is_reconnectable() -> bool:
    """True if every group of this rank sends by gloo alone."""
    configs = (str(dist.get_backend_config(group)).split(",") for group in every_group())
    return all(name.rpartition(":")[2] == "gloo" for config in configs for name in config)


def reconnect_groups(number: int, *, timeout_s: float) -> None:
    """Give every group of this rank new connections for CPU tensors, after the old were closed.

    The groups stay the same objects, so that whatever holds one (DDP, FSDP2, DTensor's meshes) can
    go on. All ranks call it; they meet in the store.

    Args:
        number: of the reconnection in this job, the same on all ranks.

    Raises:
        RuntimeError: a rank did not come in time.
    """
    for group in every_group():
        if group.size() == 1:
            continue
        store = dist.PrefixStore(f"reconnected/{number}/{group.group_name}", default_store())
        backend = dist.ProcessGroupGloo(
            store, group.rank(), group.size(), timedelta(seconds=timeout_s)
        )
        backend._set_sequence_number_for_group()
        kind = dist.ProcessGroup.BackendType(_FIRST_KIND + number)
        # For the CPU alone: groups for which other devices are registered too do not connect twice.
        cast(Any, group)._register_backend(torch.device("cpu"), kind, backend)
