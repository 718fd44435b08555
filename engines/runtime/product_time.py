"""Matrix products and attention inside a step: their share of the time that it computes."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch.utils.flop_counter import flop_registry

from profiles.torch_compat import TorchDispatchMode

_Mark = float | torch.cuda.Event


class ProductTime(TorchDispatchMode):
    """While it is entered, times every operation whose FLOP torch counts, forward and backward.

    It is asked about every operation, which takes time of its own; so the whole of a step is that
    of another one, run in `whole`. On a CPU by the processor time of the thread, on CUDA by events.
    """

    def __init__(self, device: torch.device) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._is_cuda = device.type == "cuda"
        self._whole: list[tuple[_Mark, _Mark]] = []
        self._products: list[tuple[_Mark, _Mark]] = []

    @contextmanager
    def whole(self) -> Iterator[None]:
        """Around a step as those that products were timed in."""
        first = self._mark()
        yield
        self._whole.append((first, self._mark()))

    def __torch_dispatch__(
        self,
        operation: Any,
        types: tuple[type, ...],
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        if not _is_product(operation):
            return operation(*args, **(kwargs or {}))
        first = self._mark()
        result = operation(*args, **(kwargs or {}))
        self._products.append((first, self._mark()))
        return result

    @property
    def share(self) -> float:
        """Of the steps in `whole`, as many as others; on CUDA it waits for the device."""
        if self._is_cuda:
            torch.cuda.synchronize()
        return sum(map(_seconds, self._products)) / sum(map(_seconds, self._whole))

    def _mark(self) -> _Mark:
        if not self._is_cuda:
            return time.thread_time()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event


def _seconds(marks: tuple[_Mark, _Mark]) -> float:
    first, last = marks
    if isinstance(first, float) or isinstance(last, float):
        assert isinstance(first, float)
        assert isinstance(last, float)
        return last - first
    return float(first.elapsed_time(last)) * 1e-3  # milliseconds


def _is_product(operation: Callable[..., object]) -> bool:
    packet = getattr(operation, "overloadpacket", None)
    # Attention of processors is not in torch's table.
    return packet in flop_registry or "attention" in str(packet)
