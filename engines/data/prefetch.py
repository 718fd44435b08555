"""Copies of the next batch to the device, on a stream of their own, while a step computes.

A loader that pins its batches says that copies may run beside computation. The batch after the one
that is trained on is then copied ahead, one batch, on a side stream; the step waits for that copy
alone. Batches stay where they were: ranks count their targets and compare their rows on the host,
and take the copies where they would have made them.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

from profiles.capture.batch.call import Batch
from profiles.capture.batch.tree import batch_tensors, map_batch
from profiles.torch_compat import version_of


class CopyStream(Protocol):
    """A queue of copies; `mark` is done when those before it are."""

    def copy(self, tensors: Sequence[Tensor]) -> list[Tensor]: ...

    def mark(self) -> Any: ...

    def wait(self, mark: Any, copies: Sequence[Tensor]) -> None:
        """Let what is computed next wait for `mark`, and keep `copies` until it is over."""


class CudaCopyStream:
    """A CUDA stream beside the one that computes."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream = torch.cuda.Stream(device)

    def copy(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        with torch.cuda.stream(self._stream):
            return [tensor.to(self._device, non_blocking=True) for tensor in tensors]

    def mark(self) -> torch.cuda.Event:
        event = torch.cuda.Event()
        event.record(self._stream)
        return event

    def wait(self, mark: torch.cuda.Event, copies: Sequence[Tensor]) -> None:
        computes = torch.cuda.current_stream(self._device)
        computes.wait_event(mark)
        for copy in copies:  # made on the side stream, whose next copy may not take its memory
            copy.record_stream(computes)


@dataclass(slots=True)
class _Copied:
    """A batch that was copied: its tensors as they were, by their ids."""

    tensors: dict[int, tuple[Tensor, int, Tensor]]
    mark: Any
    is_waited_for: bool = False


class CopiesAhead:
    """The batches of loaders that were copied before they are needed.

    Args:
        stream: None makes one where `device` is an accelerator of CUDA, else nothing is copied.
    """

    def __init__(self, device: torch.device, stream: CopyStream | None = None) -> None:
        self._device = device
        self._stream = stream
        self.is_on = stream is not None or device.type == "cuda"
        self._copied: deque[_Copied] = deque(maxlen=2)  # the one in work, and the next

    def ahead(self, batches: Iterable[Batch]) -> Iterator[Batch]:
        """`batches`; each is handed out when the copy of the one after it has begun."""
        waiting: list[Batch] = []
        for batch in batches:
            self._begin(batch)
            waiting.append(batch)
            if len(waiting) > 1:
                yield waiting.pop(0)
        yield from waiting

    def moved(self, tensor: Tensor) -> Tensor:
        """The tensor on the device: its copy, where it has not been written to since."""
        for copied in self._copied:
            own = copied.tensors.get(id(tensor))
            if own is not None and own[1] == version_of(tensor):
                if not copied.is_waited_for:
                    copied.is_waited_for = True
                    assert self._stream is not None
                    self._stream.wait(copied.mark, [copy for _, _, copy in copied.tensors.values()])
                return own[2]
        here = tensor.device == self._device
        return tensor if here else tensor.to(self._device, non_blocking=True)

    def here(self, values: Any) -> Any:
        """Values in containers with their tensors on the device; the same containers where all
        are there, for a model may write into them."""
        if all(tensor.device == self._device for tensor in batch_tensors(values)):
            return values
        return map_batch(self.moved, values)

    def _begin(self, batch: Batch) -> None:
        self._stream = self._stream or CudaCopyStream(self._device)
        tensors = [t for t in batch_tensors(batch) if t.device.type == "cpu" and not t.is_nested]
        copies = self._stream.copy(tensors)
        self._copied.append(
            _Copied(
                {
                    id(tensor): (tensor, version_of(tensor), copy)
                    for tensor, copy in zip(tensors, copies, strict=True)
                },
                self._stream.mark(),
            )
        )
