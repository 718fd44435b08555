"""Names that differ between torch versions, or are private: each used through here, each tested."""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from typing import Any, TypeAlias, TypeGuard, TypeVar, cast

import torch
import torch.distributed as dist
from torch import nn
from torch._ops import OpOverload, OpOverloadPacket
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel
from torch.utils._python_dispatch import TorchDispatchMode as TorchDispatchMode
from torch.utils._pytree import tree_flatten, tree_leaves, tree_map, tree_unflatten
from torch.utils._pytree import tree_map_only as tree_map_only

Tree = TypeVar("Tree")
Wrapper = TypeVar("Wrapper", bound=torch.Tensor)
SECOND_LINE = timedelta(seconds=30)
"""To reach a store that was reached before."""
Operator: TypeAlias = OpOverload
OperatorPacket: TypeAlias = OpOverloadPacket


def all_gather_single(
    output: torch.Tensor,
    part: torch.Tensor,
    *,
    group: dist.ProcessGroup | None = None,
    async_op: bool = False,
) -> dist.Work | None:
    """All ranks' `part`, one after another, in `output` (torch < 2.13: all_gather_into_tensor)."""
    name = "all_gather_single" if hasattr(dist, "all_gather_single") else "all_gather_into_tensor"
    work: dist.Work | None = getattr(dist, name)(output, part, group=group, async_op=async_op)
    return work


def reduce_scatter_single(
    output: torch.Tensor,
    whole: torch.Tensor,
    *,
    group: dist.ProcessGroup | None = None,
    async_op: bool = False,
) -> dist.Work | None:
    """This rank's part of the sum of `whole` (torch < 2.13: reduce_scatter_tensor)."""
    is_new = hasattr(dist, "reduce_scatter_single")
    send = getattr(dist, "reduce_scatter_single" if is_new else "reduce_scatter_tensor")
    work: dist.Work | None = send(output, whole, group=group, async_op=async_op)
    return work


def default_store() -> dist.Store:
    """The key-value store through which the ranks of the default group met."""
    from torch.distributed.distributed_c10d import _get_default_store

    return _get_default_store()


def is_tcp(store: dist.Store) -> bool:
    """True if the ranks met over TCP, as under a launcher: other stores are of tests."""
    return isinstance(getattr(store, "_underlying_non_prefix_store", store), dist.TCPStore)


def start_all_reduce(
    tensor: torch.Tensor,
    operation: Any = dist.ReduceOp.SUM,
    group: dist.ProcessGroup | None = None,
) -> Any:
    """`dist.all_reduce(async_op=True)` of a few numbers, without its checks of the arguments: they
    take as long as the sending. The work, or None of groups that have none."""
    options = dist.AllreduceOptions()
    options.reduceOp, options.asyncOp = operation, True
    group = dist.group.WORLD if group is None else group
    assert group is not None
    return group.allreduce([tensor], options)


def register_fake_groups() -> None:
    """Make torch's process groups without other ranks known to it, as the backend "fake"."""
    from torch.testing._internal.distributed import fake_pg

    assert fake_pg  # its import registers them


def forget_groups() -> None:
    """Clear what DTensor caches for equal inputs, meshes included.

    Meshes of the same ranks are equal in whatever job, so that the next job of a process would be
    given the groups of the last one.
    """
    if "torch.distributed.tensor" not in sys.modules:
        return
    from torch.distributed import _functional_collectives
    from torch.distributed.tensor import _redistribute

    assert _functional_collectives  # registers operators that the next import needs
    from torch.distributed.tensor.debug import _clear_sharding_prop_cache

    _clear_sharding_prop_cache()
    for function in vars(_redistribute).values():
        if hasattr(function, "cache_clear"):
            function.cache_clear()


def every_group() -> list[dist.ProcessGroup]:
    """The process groups that this rank is in, the default one first."""
    known = list(dist.distributed_c10d._world.pg_map)  # another thread may make one
    return [group for group in known if group.rank() >= 0]


def messages_of(group: dist.ProcessGroup) -> int:
    """Number of collectives, sends and receives that this rank began in a group."""
    return int(cast(Any, group)._get_sequence_number_for_group())


def recorded_messages() -> str:
    """The last messages of this process as torch's flight recorder has them, an object in JSON with
    `entries` that have a `profiling_name`; an empty one if torch keeps none."""
    recorded = getattr(torch._C._distributed_c10d, "_dump_fr_trace_json", None)
    return recorded().decode() if recorded is not None else "{}"


def second_line(store: dist.Store) -> dist.Store:
    """The same store over a connection of its own, for another thread: a wait on one blocks it.

    (`Store.clone`, which torch's stubs do not have.) Where the process that runs the store is gone,
    torch would try to reach it for as long as the store's own limit.

    Raises:
        DistError: it is gone.
    """
    patience: timedelta = cast(Any, store).timeout
    store.set_timeout(min(patience, SECOND_LINE))
    try:
        line: dist.Store = cast(Any, store).clone()
    finally:
        store.set_timeout(patience)
    line.set_timeout(patience)
    return line


def bound_waits(group: dist.ProcessGroup, timeout: timedelta) -> None:
    """Let the collectives of a group that exists fail after `timeout` (public since torch 2.15)."""
    name = "set_timeout" if hasattr(dist, "set_timeout") else "_set_pg_timeout"
    getattr(dist.distributed_c10d, name)(timeout, group)


def without_buffer_sync() -> dict[str, bool]:
    """DDP's switch against sending buffers at every forward (torch < 2.13: broadcast_buffers)."""
    known = inspect.signature(DistributedDataParallel.__init__).parameters
    name = "forward_sync_buffers" if "forward_sync_buffers" in known else "broadcast_buffers"
    return {name: False}


def leave_to_others(model: nn.Module, names: Iterable[str]) -> None:
    """Let DistributedDataParallel leave these parameters of `model` alone."""
    DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(model, list(names))


def wrapper_tensor(kind: type[Wrapper], shape: Iterable[int], like: torch.Tensor) -> Wrapper:
    """A tensor of `kind` that has no memory and says it is of `shape`, else as `like`."""
    made: Wrapper = torch.Tensor._make_wrapper_subclass(
        kind, tuple(shape), dtype=like.dtype, device=like.device
    )
    return made


def is_view(value: object) -> bool:
    """True if a tensor that gradients flow through shares the storage of another."""
    return isinstance(value, torch.Tensor) and value.requires_grad and value._base is not None


def scale_all(tensors: list[torch.Tensor], factor: float) -> None:
    """Multiply tensors in place, a list at a time: as torch's optimizers do."""
    torch._foreach_mul_(tensors, factor)


def version_of(tensor: torch.Tensor) -> int:
    """Number of in-place writes to a tensor."""
    return tensor._version


def alias_of(tensor: torch.Tensor) -> torch.Tensor:
    """The same memory without a gradient, below autograd too, that counts writes together with
    `tensor`: in a dispatch mode `detach` begins a count of its own."""
    counted = torch._C.DispatchKey.ADInplaceOrView
    with torch._C._SetExcludeDispatchKeyGuard(counted, False):
        return tensor.detach()


CALL = "_compiled_call_impl"
"""The attribute of a module that is run in place of its call, hooks and all, where it is set: what
`nn.Module.compile` sets."""


def whole_call(module: nn.Module) -> Callable[..., object]:
    """Return the call of `module` with its hooks, or its compiled form."""
    compiled: Callable[..., object] | None = getattr(module, CALL)
    return module._call_impl if compiled is None else compiled


def forward_hooks(module: nn.Module) -> list[Callable[..., object]]:
    """The forward hooks of a module, in order, as hook(module, args, kwargs, output)."""

    def with_kwargs(hook: Callable[..., object]) -> Callable[..., object]:
        return lambda module, args, kwargs, output: hook(module, args, output)

    return [
        hook if key in module._forward_hooks_with_kwargs else with_kwargs(hook)
        for key, hook in module._forward_hooks.items()
    ]


def with_hooks(optimizer: torch.optim.Optimizer) -> torch.optim.Optimizer:
    """The optimizer, with what its base class gives one that is unpickled: wrappers of another
    optimizer often leave the base's constructor out. It gets a class of its own, as torch wraps the
    step of a class, and others of the class have no hooks."""
    if "_optimizer_step_pre_hooks" not in vars(optimizer):
        kind = type(optimizer)
        names = {"__module__": kind.__module__, "__qualname__": kind.__qualname__}
        optimizer.__class__ = type(kind.__name__, (kind,), names)
        torch.optim.Optimizer.__setstate__(optimizer, {})
    return optimizer


def gradient_hooks(parameter: torch.Tensor) -> int:
    """The number of hooks that `register_hook` gave it."""
    return len(cast(Any, parameter)._backward_hooks or ())


def gradient_hooks_of(parameter: torch.Tensor) -> tuple[list[Any], list[Any]]:
    """The hooks that its gradient goes through, and those that run once it is accumulated."""
    hooked = cast(Any, parameter)
    before, after = hooked._backward_hooks, hooked._post_accumulate_grad_hooks
    return list((before or {}).values()), list((after or {}).values())


def has_gradient_hooks(parameter: torch.Tensor) -> bool:
    """True if its gradient goes through hooks: `register_hook`, or one after it is accumulated."""
    return any(gradient_hooks_of(parameter))


def is_batch_norm(module: nn.Module) -> TypeGuard[nn.BatchNorm2d]:
    """True if `module` is a batch normalisation of any dimension (typed as one of them)."""
    return isinstance(module, nn.modules.batchnorm._BatchNorm)


def map_tensors(function: Callable[[torch.Tensor], torch.Tensor], tree: Tree) -> Tree:
    """`tree` with every tensor in its tuples, lists and dicts replaced by `function` of it."""
    result: Tree = tree_map(
        lambda leaf: function(leaf) if isinstance(leaf, torch.Tensor) else leaf, tree
    )
    return result


def map_leaves(function: Callable[[object], object], tree: Tree) -> Tree:
    """`tree` with every leaf of its tuples, lists, dicts and registered classes replaced."""
    result: Tree = tree_map(function, tree)
    return result


def tensors_in(tree: object) -> list[torch.Tensor]:
    """The tensors in tuples, lists, dicts and registered data classes, in order."""
    return [leaf for leaf in tree_leaves(tree) if isinstance(leaf, torch.Tensor)]


def flattened(tensors: Sequence[torch.Tensor]) -> torch.Tensor:
    """A copy of the elements of dense tensors of one dtype, one after the other."""
    from torch._utils import _flatten_dense_tensors

    return cast(torch.Tensor, _flatten_dense_tensors(tensors))


def flatten(tree: object) -> tuple[list[object], object]:
    """The leaves of tuples, lists, dicts and registered data classes, and how they lay."""
    return tree_flatten(tree)


def unflatten(leaves: Iterable[object], structure: object) -> object:
    """The reverse of `flatten`."""
    return tree_unflatten(leaves, cast(Any, structure))


@contextmanager
def without_modes() -> Iterator[None]:
    """Inside, operations on real tensors are done for real, whatever follows those outside."""
    from torch.utils._python_dispatch import _disable_current_modes

    with _disable_current_modes():
        yield


def is_fake(tensor: torch.Tensor) -> bool:
    """True if a tensor was made inside `fake_tensors`."""
    from torch._subclasses.fake_tensor import FakeTensor

    return isinstance(tensor, FakeTensor)


def memory_format_of(tensor: torch.Tensor) -> torch.memory_format:
    """The format that operators see in a tensor's strides; row by row where several fit."""
    from torch._prims_common import suggest_memory_format

    return suggest_memory_format(tensor)


def data_dependent_errors() -> tuple[type[Exception], ...]:
    """Errors of fake tensors where code reads a tensor's values, or makes shapes of them."""
    from torch._subclasses.fake_tensor import (
        DataDependentOutputException,
        DynamicOutputShapeException,
    )

    return (DataDependentOutputException, DynamicOutputShapeException)


def reads_values(operator: Operator, args: Sequence[Any]) -> bool:
    """True if the shape of the result, or a number that code gets, follows from elements."""
    if torch.Tag.data_dependent_output in operator.tags:
        return True
    if operator is torch.ops.aten.index.Tensor:
        return any(t is not None and t.dtype in (torch.bool, torch.uint8) for t in args[1])
    return torch.Tag.dynamic_output_shape in operator.tags


def aten_operators(names: Iterable[str]) -> tuple[Operator, ...]:
    """The default overloads of `torch.ops.aten` operators; those that this torch does not have
    are left out."""
    aten = torch.ops.aten
    return tuple(getattr(aten, name).default for name in names if hasattr(aten, name))


def is_mutable(operator: Operator) -> bool:
    """True if a call writes into one of its arguments."""
    mutable: bool = operator._schema.is_mutable or _is_collective_in_place(operator)
    return mutable


def _is_collective_in_place(operator: Operator) -> bool:
    """True for those of torch.distributed that write into their first argument, which their schemas
    do not say."""
    name = operator._schema.name
    return name.startswith("c10d::") and name.endswith("_")


def tensors_written(
    operator: Operator, args: tuple[object, ...], kwargs: dict[str, object]
) -> list[torch.Tensor]:
    """The arguments that a call writes into."""
    if _is_collective_in_place(operator):
        return tensors_in(args[:1])
    named = {
        **dict(zip((a.name for a in operator._schema.arguments), args, strict=False)),
        **kwargs,
    }
    written = (
        named.get(argument.name)
        for argument in operator._schema.arguments
        if argument.alias_info is not None and argument.alias_info.is_write
    )
    return tensors_in(list(written))


def scalar_query() -> Operator:
    """The operator behind `tensor.item()`."""
    query: Operator = torch.ops.aten._local_scalar_dense.default
    return query


def device_query() -> Operator:
    """The operator behind `tensor.device`, which fake tensors answer like an operation."""
    query: Operator = torch.ops.prim.device.default
    return query


def device_of(tensor: object) -> torch.device:
    """The device a tensor claims; asking a fake tensor for `.device` is an operation of its own."""
    claimed: torch.device = getattr(tensor, "fake_device", None) or cast(Any, tensor).device
    return claimed


def node_notes(node: torch.autograd.graph.Node) -> dict[str, Any]:
    """A dict that lives as long as an autograd node (annotated in torch as a method)."""
    return cast("dict[str, Any]", node.metadata)


def is_leaf_node(node: torch.autograd.graph.Node) -> bool:
    """True if the node accumulates gradients into a leaf."""
    return node.name() == "torch::autograd::AccumulateGrad"


def next_sequence_number() -> int:
    """The number of the next autograd node that this thread makes."""
    return int(torch.autograd._get_sequence_nr())


def sequence_number(node: torch.autograd.graph.Node) -> int:
    """Nodes are numbered by thread in the order in which they are made."""
    return int(cast(Any, node)._sequence_nr())


def differentiates() -> bool:
    """True inside of a backward."""
    return torch._C._current_graph_task_id() >= 0


def saving_hook() -> object | None:
    """Return the hook that packs the tensors that autograd saves now; None if there is none."""
    hooks = torch._C._autograd._top_saved_tensors_default_hooks(False)
    return hooks[0] if hooks else None


def offsets_of_shard(shard: DTensor) -> tuple[int, ...]:
    """The place of this rank's part in the whole tensor, one offset a dimension."""
    from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

    _, offsets = compute_local_shape_and_global_offset(
        shard.shape, shard.device_mesh, shard.placements
    )
    return tuple(map(int, offsets))


def storage_of(tensor: torch.Tensor) -> torch.UntypedStorage | None:
    """A tensor's memory, the same object for all tensors that share it; None for sparse tensors."""
    return tensor.untyped_storage() if tensor.layout is torch.strided else None


@torch.no_grad()
def move_to(tensor: torch.Tensor, home: torch.Tensor) -> None:
    """Let `home`, of equal content, be the memory of `tensor`, or of the part of it that this rank
    holds; the object stays. (`DTensor.from_local` would move it to the device of the mesh.)"""
    local = tensor._local_tensor if isinstance(tensor, DTensor) else tensor
    local.data = home


@contextmanager
def without_onednn() -> Iterator[None]:
    """CPU kernels of torch itself only. (torch.backends.mkldnn.flags does it with a warning.)"""
    was_enabled = torch._C._get_mkldnn_enabled()
    torch._C._set_mkldnn_enabled(False)
    try:
        yield
    finally:
        torch._C._set_mkldnn_enabled(was_enabled)
