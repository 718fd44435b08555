"""Collectives and sends of ranks that share one device, carried through main memory.

gloo sends CUDA pointers for whatever is neither an all-reduce nor a broadcast, and dies of it
("writev: Bad address"); NCCL refuses two ranks on one device. Here tensors are copied to the CPU on
the current stream, gloo sends the copies, and results are copied back on the current stream. All of
it is done when a call returns; a send or a receive is done when it was waited for.

Lives here: kernels of torch's operators `c10d::*`, which every caller meets below its group, be it
DDP's reducer, FSDP2 or a functional collective. (Of a `ProcessGroup` that is a class of Python C++
calls a part only, and it has no backend, which torch asks for.) Must not: a group; they are gloo's.
"""

from __future__ import annotations

import functools
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

import torch
from torch import ScriptObject, Tensor
from torch._C import _distributed_c10d as c10d
from torch.distributed import ProcessGroup, ReduceOp
from torch.library import Library


@contextmanager
def staged(device: torch.device) -> Iterator[None]:
    """Within, gloo groups take tensors of this type of device by copies in main memory; receives
    from any source are as before. No message is under way at either end."""
    library = Library("c10d", "IMPL")
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # torch's own kernels are replaced on purpose
            for name in vars(_Kernels):
                if not name.startswith("__"):
                    library.impl(name, functools.partial(_call, name), device.type.upper())
        yield
    finally:
        library._destroy()


def _call(name: str, *arguments: Any) -> Any:
    """Call the kernel `name`; the first script object is the group, another the reduction."""
    place = next(i for i, given in enumerate(arguments) if isinstance(given, ScriptObject))
    plain = [
        ReduceOp.RedOpType(given.op()) if isinstance(given, ScriptObject) else given  # type: ignore[attr-defined]
        for given in (*arguments[:place], *arguments[place + 1 :])
    ]
    return getattr(_Kernels(ProcessGroup.unbox(arguments[place])), name)(*plain)


def _copied(tensor: Tensor) -> Tensor:
    """A copy in main memory, flat; it blocks until the stream's work before it is done."""
    return tensor.data.to("cpu", copy=True).contiguous().flatten()


def _sent(tensor: Tensor) -> Tensor:
    """A copy as bytes: gloo does not know every dtype."""
    return _copied(tensor).view(torch.uint8)


def _room(tensor: Tensor) -> Tensor:
    return torch.empty(tensor.nbytes, dtype=torch.uint8)


def _put(tensors: Sequence[Tensor], contents: Sequence[Tensor]) -> Any:
    """Copy back on the current stream. The work has ended; who waits for it waits for the copies.

    `contents`: flat, in bytes or in numbers; those beyond `tensors` are of another rank.
    """
    for tensor, content in zip(tensors, contents, strict=False):
        if content.dtype == torch.uint8:
            content = content.clone().view(tensor.dtype)  # at an address that any dtype may have
        # By `data`: for autograd, what a backend writes is no change in place.
        tensor.data.copy_(content.view(tensor.shape))
    devices = dict.fromkeys(tensor.device for tensor in tensors if tensor.is_cuda)
    future: torch.futures.Future[list[Tensor]] = torch.futures.Future(devices=[*devices])
    future.set_result(list(tensors))
    return c10d._create_work_from_future(future).boxed()  # type: ignore[attr-defined]


def _reduced(gloo: Any, tensor: Tensor, kind: Any) -> Tensor:
    """The reduction over all ranks, flat in main memory. Not every gloo has means."""
    result = _copied(tensor)
    if result.dtype in (torch.bool, torch.int16):
        result = result.to(torch.int32)
    gloo.allreduce([result], ReduceOp.SUM if kind == ReduceOp.AVG else kind).wait()
    return result / gloo.size() if kind == ReduceOp.AVG else result


def _gathered(gloo: Any, part: Tensor) -> list[Tensor]:
    content = _sent(part)
    contents = [torch.empty_like(content) for _ in range(gloo.size())]
    gloo.allgather([contents], [content]).wait()
    return contents


class _Kernels:
    """The operators of one group, by their names in torch.

    `_`: options that change no result: the group has a timeout of its own.
    """

    def __init__(self, group: ProcessGroup) -> None:
        # Called itself, not by torch's operators: on a CPU those would come back here.
        self.gloo: Any = group._get_backend(torch.device("cpu"))

    def allreduce_(self, tensors: list[Tensor], kind: Any, *_: Any) -> Any:
        return tensors, self.allreduce_coalesced_(tensors, kind)

    def allreduce_coalesced_(self, tensors: list[Tensor], kind: Any, *_: Any) -> Any:
        return _put(tensors, [_reduced(self.gloo, tensor, kind) for tensor in tensors])

    def reduce_(self, tensors: list[Tensor], kind: Any, root: int, *_: Any) -> Any:
        results = [_reduced(self.gloo, tensor, kind) for tensor in tensors]
        return _put(tensors if self.gloo.rank() == root else [], results)

    def _reduce_scatter_base_(self, output: Tensor, whole: Tensor, kind: Any, *_: Any) -> Any:
        return output, self.reduce_scatter_tensor_coalesced_([output], [whole], kind)

    def reduce_scatter_tensor_coalesced_(
        self, outputs: list[Tensor], wholes: list[Tensor], kind: Any, *_: Any
    ) -> Any:
        results = [_reduced(self.gloo, whole, kind) for whole in wholes]
        size, rank = self.gloo.size(), self.gloo.rank()
        return _put(outputs, [result.tensor_split(size)[rank] for result in results])

    def reduce_scatter_(
        self, outputs: list[Tensor], parts: list[list[Tensor]], kind: Any, *_: Any
    ) -> Any:
        results = [[_reduced(self.gloo, part, kind) for part in of_one] for of_one in parts]
        return outputs, _put(outputs, [of_one[self.gloo.rank()] for of_one in results])

    def _allgather_base_(self, output: Tensor, part: Tensor, *_: Any) -> Any:
        return output, self.allgather_into_tensor_coalesced_([output], [part])

    def allgather_into_tensor_coalesced_(
        self, outputs: list[Tensor], parts: list[Tensor], *_: Any
    ) -> Any:
        return _put(outputs, [torch.cat(_gathered(self.gloo, part)) for part in parts])

    def allgather_(self, outputs: list[list[Tensor]], parts: list[Tensor], *_: Any) -> Any:
        return outputs, self.gather_(outputs, parts)

    def gather_(self, outputs: list[list[Tensor]], parts: list[Tensor], *_: Any) -> Any:
        contents = [content for part in parts for content in _gathered(self.gloo, part)]
        return _put([tensor for of_one in outputs for tensor in of_one], contents)

    allgather_coalesced_ = gather_

    def scatter_(self, outputs: list[Tensor], parts: list[list[Tensor]], root: int, *_: Any) -> Any:
        options = c10d.ScatterOptions()
        options.rootRank = root
        room = _room(outputs[0])
        self.gloo.scatter([room], [list(map(_sent, of_one)) for of_one in parts], options).wait()
        return outputs, _put(outputs, [room])

    def broadcast_(self, tensors: list[Tensor], root: int, *_: Any) -> Any:
        contents = [_sent(tensor) for tensor in tensors]
        for content in contents:
            self.gloo.broadcast(content, root).wait()
        return tensors, _put(tensors, contents)

    def alltoall_(self, outputs: list[Tensor], parts: list[Tensor], *_: Any) -> Any:
        receives, sends = ([t.nbytes for t in tensors] for tensors in (outputs, parts))
        room = torch.empty(sum(receives), dtype=torch.uint8)
        self.gloo.alltoall_base(room, torch.cat([*map(_sent, parts)]), receives, sends).wait()
        return outputs, _put(outputs, room.split(receives))

    def alltoall_base_(
        self, output: Tensor, whole: Tensor, receives: list[int], sends: list[int], *_: Any
    ) -> Any:
        def in_bytes(rows: list[int], tensor: Tensor) -> list[int]:
            return [count * tensor.nbytes // max(len(tensor), 1) for count in rows]

        room, sizes = _room(output), (in_bytes(receives, output), in_bytes(sends, whole))
        self.gloo.alltoall_base(room, _sent(whole), *sizes).wait()
        return _put([output], [room])

    def barrier(self, tensor: Tensor, *_: Any) -> Any:
        self.gloo.barrier().wait()
        return _put([], [])

    def send(self, tensors: list[Tensor], target: int, tag: int) -> Any:
        return self.gloo.send([_sent(tensors[0])], target, tag).boxed()  # it keeps the copy

    def recv_(self, tensors: list[Tensor], source: int, tag: int) -> Any:
        room = _room(tensors[0])
        pending = [self.gloo.recv([room], source, tag)]

        def wait(timeout: timedelta) -> bool:
            while pending:  # waited for again, it leaves what was written since
                pending.pop().wait(timeout)
                _put(tensors, [room])
            return True

        return c10d.PythonCallbackWork(wait).boxed()
