"""Running statistics of batch norms: buffers that a forward of a training writes and none reads."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn

from engines.runtime.broadcast import start_broadcast
from engines.runtime.mesh import Axis
from profiles.torch_compat import is_batch_norm


def running_statistics(module: nn.Module) -> dict[str, Tensor]:
    """The buffers of batch norms, which a forward changes, by name."""
    norms = [(name, norm) for name, norm in module.named_modules() if is_batch_norm(norm)]
    return {f"{name}.{own}": buffer for name, norm in norms for own, buffer in norm.named_buffers()}


class StatisticsBroadcast:
    """Lets statistics follow those of the first replica, as they do under plain DDP.

    DDP sends them before a forward, and all ranks wait. No forward of a training reads them: they
    are sent beside the last backward of a step, after which all replicas have the same.

    Args:
        replicas: the ranks that have the same batch norms.

    Attributes:
        is_on: there is something to send.
    """

    def __init__(
        self, module: nn.Module, device: torch.device, replicas: Axis, *, is_on: bool
    ) -> None:
        self._norms = [norm for norm in module.modules() if is_batch_norm(norm)]
        self.is_on = is_on and replicas.size > 1 and bool(self._norms)
        self._device = device
        self._group = replicas.group
        self._write: Callable[[], None] | None = None

    def begin(self) -> None:
        """Send them as the last forward of a step left them. All ranks call it, or none."""
        if self.is_on:
            buffers = [buffer for norm in self._norms for buffer in norm.buffers(recurse=False)]
            present = [buffer for buffer in buffers if not buffer.is_meta]
            self._write = start_broadcast(present, self._device, group=self._group)

    def finish(self) -> None:
        """Write what the first replica sent, after the backward: it may run forwards again. Sends
        them here where forwards and backwards alternate, as in pipelines."""
        if self._write is None:
            self.begin()
        if self._write is not None:
            self._write()
            self._write = None
