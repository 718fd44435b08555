"""Matrix products and attention inside a step: their share of the time that it computes."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from types import TracebackType
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import flop_registry

_Mark = float | torch.cuda.Event


class ProductTime(TorchDispatchMode):
    """While it is entered: every operation whose FLOP torch counts, forward and backward.

    On a CPU by the processor time of the thread, on CUDA by events.
    """

    def __init__(self, device: torch.device) -> None:
        super().__init__()
        self._is_cuda = device.type == "cuda"
        self._whole: list[_Mark] = []
        self._products: list[_Mark] = []

    def __enter__(self) -> ProductTime:
        self._whole.append(self._mark())
        super().__enter__()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        super().__exit__(kind, error, trace)
        self._whole.append(self._mark())

    def __torch_dispatch__(
        self,
        func: Callable[..., Any],
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        if not _is_product(func):
            return func(*args, **(kwargs or {}))
        self._products.append(self._mark())
        result = func(*args, **(kwargs or {}))
        self._products.append(self._mark())
        return result

    @property
    def share(self) -> float:
        """Of the time that was spent inside, 0 to 1; on CUDA it waits for the device."""
        if self._is_cuda:
            torch.cuda.synchronize()
        return _between(self._products) / _between(self._whole)

    def _mark(self) -> _Mark:
        if not self._is_cuda:
            return time.thread_time()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event


def _between(marks: Sequence[_Mark]) -> float:
    """Between the first and the second, the third and the fourth, ...: in one unit."""
    spans = zip(marks[::2], marks[1::2], strict=True)
    return sum(
        last - first if isinstance(first, float) else first.elapsed_time(last)  # type: ignore[arg-type, operator]
        for first, last in spans
    )


def _is_product(func: Any) -> bool:
    packet = getattr(func, "overloadpacket", None)
    # Attention of processors is not in torch's table.
    return packet in flop_registry or "attention" in str(packet)
