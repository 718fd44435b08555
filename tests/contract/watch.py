"""Traffic and memory of one real training step, beside their estimates.

Both watchers sit below autograd and below DTensor. Collectives that C++ starts itself (the buckets
of DistributedDataParallel) go through the dispatcher too, so they are seen.
"""

from __future__ import annotations

import weakref
from collections import Counter
from collections.abc import Iterable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from advisor.cost import Estimate, estimate
from advisor.inputs.facts import Facts
from engines.parallel import ParallelModel
from engines.plan import Plan
from profiles.machine.cluster import Collective
from profiles.model.profile import ModelProfile
from profiles.provenance import Quantity, Source
from profiles.workload.workload import Workload
from tests.engines.cases import cpu_ranks

Calls = Counter[tuple[Collective, int]]
"""How often a collective of so many payload bytes was called."""

# The argument that is the payload as `Collective.bus_factor` counts it: what is reduced whole, what
# is gathered whole, what is scattered whole.
_PAYLOADS = {
    "allreduce_": (Collective.ALL_REDUCE, 0),
    "all_reduce": (Collective.ALL_REDUCE, 0),
    "_allgather_base_": (Collective.ALL_GATHER, 0),
    "_reduce_scatter_base_": (Collective.REDUCE_SCATTER, 1),
    "alltoall_base_": (Collective.ALL_TO_ALL, 1),
}
_SILENT = ("wait_tensor", "_wrap_tensor_autograd")
# A broadcast is charged as a send; what is received was charged to its sender.
_SENDS = ("broadcast_", "send")
_RECEIVES = ("recv_", "recv_any_source_")


class _Below(TorchDispatchMode):
    """A dispatch mode that sees what tensor subclasses run on the tensors inside them."""

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        if any(issubclass(kind, DTensor) for kind in types):
            return NotImplemented
        result = func(*args, **(kwargs or {}))
        self.after(func, (*args, *(kwargs or {}).values()), result)
        return result

    def after(self, func: Any, args: tuple[Any, ...], result: object) -> None:
        """Look at an operation that has run."""
        raise NotImplementedError


class Collectives(_Below):
    """Counts collectives by kind and payload. One that is not known is an error."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: Calls = Counter()

    def after(self, func: Any, args: tuple[Any, ...], result: object) -> None:
        name = func.overloadpacket.__name__
        if func.namespace not in ("c10d", "_c10d_functional") or name in _SILENT:
            return
        kind, position = _PAYLOADS[name]
        tensors = [leaf for leaf in tree_leaves(args[position]) if isinstance(leaf, Tensor)]
        self.calls[kind, sum(tensor.nbytes for tensor in tensors)] += 1


Sent = Counter[tuple[Collective, int, int, int]]
"""The same with the size of the group, and how far apart its ranks are."""


class Messages(_Below):
    """Counts what a rank sends: collectives and messages, with the ranks that they go to."""

    def __init__(self) -> None:
        super().__init__()
        self.sent: Sent = Counter()

    def after(self, func: Any, args: tuple[Any, ...], result: object) -> None:
        name = func.overloadpacket.__name__
        if func.namespace != "c10d" or name in _RECEIVES:
            return
        kind, position = (Collective.SEND_RECV, 0) if name in _SENDS else _PAYLOADS[name]
        tensors = [leaf for leaf in tree_leaves(args[position]) if isinstance(leaf, Tensor)]
        group = next(arg for arg in args if isinstance(arg, torch.ScriptObject))
        ranks = dist.get_process_group_ranks(dist.ProcessGroup.unbox(group))
        if name == "send":
            ranks = [dist.get_rank(), ranks[args[2]]]
        payload = sum(tensor.nbytes for tensor in tensors)
        self.sent[kind, payload, len(ranks), abs(ranks[1] - ranks[0])] += 1


class LiveBytes(_Below):
    """The most bytes that tensors held at once, each storage once.

    `before` is what is there already. FSDP2 empties and refills storages without an operation: they
    are met in its own operations, which write into them, and sizes are read anew every time. What
    kernels, gloo and the allocator take for themselves is not seen.
    """

    def __init__(self, before: Iterable[Tensor]) -> None:
        super().__init__()
        self.peak_bytes = 0
        self._live: dict[int, weakref.ref[torch.UntypedStorage]] = {}
        self.enrol(before)

    def now(self) -> int:
        """Bytes held at this moment."""
        storages = [reference() for reference in list(self._live.values())]
        return sum(storage.nbytes() for storage in storages if storage is not None)

    def after(self, func: Any, args: tuple[Any, ...], result: object) -> None:
        refills = func.namespace == "fsdp"
        met = tree_leaves((args, result)) if refills else tree_leaves(result)
        if self.enrol(leaf for leaf in met if isinstance(leaf, Tensor)) or refills:
            self.peak_bytes = max(self.peak_bytes, self.now())

    def enrol(self, tensors: Iterable[Tensor]) -> bool:
        """Note storages; whether one is new."""
        known = len(self._live)
        for tensor in tensors:
            storage = tensor.untyped_storage()
            if storage.device.type == "meta" or storage.filename is not None:
                continue  # takes no memory: the kernel may write files back at any time
            key = storage._cdata
            if key not in self._live:
                release = weakref.finalize(storage, self._live.pop, key, None)
                release.atexit = False
                self._live[key] = weakref.ref(storage)
        return len(self._live) > known


def local(tensor: Tensor) -> Tensor:
    """The part of a tensor that this rank holds."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def gradients(parallel: ParallelModel) -> list[Tensor]:
    """The gradients that are there now, the part of this rank."""
    return [local(p.grad) for p in parallel.parameters() if p.grad is not None]


def optimizer_states(parallel: ParallelModel) -> list[Tensor]:
    """Optimizer states of this rank: moments, and a step counter for each parameter."""
    values = [value for state in parallel.optimizer.state.values() for value in state.values()]
    return [local(value) for value in values if isinstance(value, Tensor)]


def prediction(plan: Plan, profile: ModelProfile) -> Estimate:
    """The estimate for AdamW on CPU ranks that take no memory but for tensors."""
    return estimate(plan, facts_of(plan, profile))


def facts_of(plan: Plan, profile: ModelProfile, *, nodes: int = 1) -> Facts:
    """AdamW on CPU ranks that take no memory but for tensors."""
    cluster = cpu_ranks(plan.world_size, nodes=nodes)
    nothing = Quantity(value=0.0, source=Source.ASSUMED)
    speeds = dict.fromkeys(("float32", "bfloat16"), cluster.device.flop_per_s["float32"])
    device = cluster.device.model_copy(update={"context_bytes": nothing, "flop_per_s": speeds})
    assert plan.global_batch_size is not None
    workload = Workload(global_batch_size=plan.global_batch_size, precision=plan.precision.value)
    cluster = cluster.model_copy(update={"device": device})
    return Facts(model=profile, cluster=cluster, workload=workload)
