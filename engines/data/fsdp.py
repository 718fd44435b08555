"""Shards: ZeRO-1, ZeRO-2, ZeRO-3 and HSDP on FSDP2, one mechanism with two switches.

Between steps a rank has its shard of parameters, gradients and optimizer states under every kind.
The kinds differ in *when* whole tensors exist:

    kind           whole parameters                whole gradients
    zero1          first forward to last backward  until the step, reduce-scattered once
    zero2          first forward to last backward  one unit at a time, every microbatch
    full_shard     one unit at a time              one unit at a time, every microbatch
    hybrid_shard   as full_shard in a shard group; between groups one all-reduce of shards a step

In a pipeline the backwards of a round's microbatches come between forwards of others. Gradients
stay whole until the round is over and are reduce-scattered once, under zero1 after the step's last
round only; zero1 and zero2 keep parameters whole from the first forward of the step to the end of
its last round. FSDP2 ignores parameters of other ranks' stages.

Every rank keeps whole what cannot be cut (`profiles.capture.module.whole_parameters`), and its
gradients are averaged when a step is over. Gradients of embeddings are dense.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Container, Iterable, Iterator
from contextlib import contextmanager
from itertools import chain
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import (
    CPUOffloadPolicy,
    FSDPModule,
    MixedPrecisionPolicy,
    OffloadPolicy,
    fully_shard,
)
from torch.distributed.tensor import DTensor

from engines.data.given_containers import GivenContainers
from engines.data.hidden_outputs import close_output, open_output
from engines.data.replicas import has_gradient
from engines.plan import DataParallel, OffloadTo, Plan
from profiles.capture.module.whole_parameters import whole_parameters
from profiles.errors import ModelError, PlanError
from profiles.model.profile import ModelProfile
from profiles.torch_compat import is_view, map_tensors
from profiles.torch_compat.fsdp import (
    forget_step_underway,
    fsdp_modules,
    note_used,
    reduce_at_end,
    reduce_now,
    reduce_unused_parameters,
    unreduced,
)


def shard(
    model: nn.Module,
    plan: Plan,
    *,
    profile: ModelProfile,
    mesh: DeviceMesh,
    mixed: torch.dtype | None,
    local: Container[str] | None = None,
    read_later: str | None = None,
    ignored: Iterable[nn.Parameter] = (),
    allocate: Callable[[Iterable[Tensor]], None] = lambda _: None,
    offload: Callable[[FSDPModule], None] | None = None,
) -> FSDPModule:
    """Turn the parameters of `model` into shards over `mesh`, in place.

    Units are the profile's `shard_units`: each is gathered and released on its own. The remaining
    parameters (small ones, and ones that are used in several places) form the root group.
    `mixed`: the dtype to compute in on fp32 shards, None: theirs. Gradients are reduced, and
    outputs returned, in fp32.
    `local`: first names of the parameters of this rank's stages, in a pipeline.
    `read_later`: the unit whose parameters are read after its forward, for a chunked loss: they
    stay gathered until its backward.
    `ignored`: parameters that FSDP2 leaves alone; they are moved to the device.
    `allocate` replaces tensors of the model without memory by those that have some, a unit just
    before it is cut: one at a time is whole.
    `offload` moves the shards of a unit off the device as soon as it is cut.
    """
    allocate(whole_parameters(model, profile))
    uncut = whole_parameters(model, profile)
    others = {p for name, p in model.named_parameters() if local is not None and name not in local}
    if mixed is not None:
        _require_cast(model, uncut, mixed)
    whole = _whole({*uncut, *ignored}, device_type=mesh.device_type)

    def cut(
        module: nn.Module,
        name: str,
        *,
        keeps: bool,
        ignored: set[nn.Parameter],
        output_dtype: torch.dtype | None = None,
    ) -> None:
        allocate(chain(module.parameters(), module.buffers()))
        _make_contiguous(p for p in module.parameters() if p not in ignored)
        module.register_forward_hook(_own_storage)
        module.register_forward_hook(open_output)
        containers = GivenContainers(module)
        with _refused(name):
            sharded = fully_shard(
                module,
                mesh=mesh,
                reshard_after_forward=not keeps,
                mp_policy=_precision(mixed, output_dtype=output_dtype),
                offload_policy=_offload(plan, mesh),
                ignored_params=ignored,
            )
        containers.begin(module)
        module.register_forward_hook(close_output)
        if name in profile.flow.changing_others:
            reduce_at_end(sharded)
        if offload is not None:
            offload(sharded)

    for unit in profile.shard_units():
        module = model.get_submodule(unit.name)
        is_own = not isinstance(module, torch.jit.ScriptModule)  # else it takes no hooks
        if unit.name and is_own and others.isdisjoint(module.parameters()):
            keeps = plan.data_parallel in _KEEP_PARAMETERS or unit.name == read_later
            cut(module, unit.name, keeps=keeps, ignored=whole)
    output_dtype = None if mixed is None else torch.float32
    cut(model, profile.name, keeps=True, ignored=others | whole, output_dtype=output_dtype)
    assert isinstance(model, FSDPModule)
    reduce_unused_parameters(model)
    if profile.path_varies:
        _USED[model] = set()
        note_used(model, _USED[model].add)
    return model


def shard_experts(
    containers: Iterable[nn.Module],
    plan: Plan,
    *,
    mesh: DeviceMesh,
    replicas: int,
    mixed: torch.dtype | None,
) -> None:
    """Turn a rank's slices of experts into shards over `mesh`, the ranks with the same slices;
    called before `shard`, which ignores them.

    Their gradients are sums over all tokens that came, of `replicas` ranks. Tokens come in the
    dtype that their block computes in.
    """
    for module in containers:
        module.register_forward_hook(_own_storage)
        with _refused(type(module).__name__):
            sharded = fully_shard(
                module,
                mesh=mesh,
                reshard_after_forward=plan.data_parallel not in _KEEP_PARAMETERS,
                mp_policy=_precision(mixed, casts_inputs=False),
            )
        assert isinstance(sharded, FSDPModule)
        sharded.set_gradient_divide_factor(replicas)
        sharded.set_force_sum_reduction_for_comms(True)  # gloo has no sums of products


def _require_cast(model: nn.Module, uncut: Collection[nn.Parameter], mixed: torch.dtype) -> None:
    """Raises PlanError: a parameter would stay whole in fp32, beside a computation in `mixed`."""
    for name, parameter in model.named_parameters():
        if parameter in uncut and parameter.dim() and parameter.numel():
            raise PlanError(
                f"`{name}` cannot be sharded (the forward changes it, its gradient has hooks, it is"
                " of TorchScript, or it learns in another dtype than most of its unit), and its"
                f" unit is computed in {str(mixed).removeprefix('torch.')}",
                hints=["set precision=fp32, or replicate it: dp_replicate without zero"],
            )


def _whole(parameters: set[nn.Parameter], *, device_type: str) -> set[nn.Parameter]:
    """The parameters that are not sharded, moved to the device like the others."""
    for parameter in parameters:
        if not parameter.is_meta:
            parameter.data = parameter.data.to(device_type)
    return parameters


def _make_contiguous(parameters: Iterable[nn.Parameter]) -> None:
    """Lay out in rows what lies otherwise in memory (transposed by its initialization, channels
    last): FSDP2 cuts nothing else."""
    for parameter in parameters:
        if not parameter.is_contiguous():
            parameter.data = parameter.data.contiguous()


def prepare_backward(root: FSDPModule, plan: Plan, *, last: bool) -> None:
    """Set what the next backward exchanges; `last` marks the step's last microbatch.

    ZeRO-1 and ZeRO-2 keep parameters gathered between microbatches, they do not change before the
    step. HSDP adds up the shards of all microbatches before the slow all-reduce between groups.
    """
    kind = plan.data_parallel
    for module in fsdp_modules(root):
        module.set_requires_gradient_sync(last or kind is not DataParallel.ZERO1, recurse=False)
        module.set_reshard_after_backward(last or kind not in _KEEP_PARAMETERS, recurse=False)
        if kind is DataParallel.HYBRID_SHARD:
            module.set_requires_all_reduce(last, recurse=False)
    root.set_is_last_backward(last)


@contextmanager
def whole_gradients(root: FSDPModule, plan: Plan, *, last: bool) -> Iterator[None]:
    """Around a round of a pipeline: keep gradients whole inside, and reduce them at its end.

    So are the parameters of the root group. For a backward FSDP2 gathers them again where the
    model's forward ended, which most stages do not reach: the backward of the next microbatch would
    read freed memory.
    """
    root.set_requires_gradient_sync(False)
    root.set_reshard_after_backward(plan.data_parallel not in _KEEP_PARAMETERS)
    root.set_reshard_after_backward(False, recurse=False)
    root.set_is_last_backward(False)
    yield
    if last or plan.data_parallel is not DataParallel.ZERO1:
        prepare_backward(root, plan, last=last)
        reduce_now(root)


def require_reduced(root: FSDPModule) -> None:
    """Require after the last backward of a step that no gradient stayed on the rank that made it.

    Raises:
        ModelError: the loss depends on tensors that no module returned: FSDP2 did not notice their
            backward, and each rank would learn from its own rows.
    """
    for name in unreduced(root):
        raise ModelError(
            f"the gradient of `{name}` was not exchanged: the loss depends on tensors that the"
            " forward did not return, but kept elsewhere",
            hints=[
                "return them too: in a tuple, a dict or an object",
                "or replicate: dp_replicate without zero",
            ],
        )


@torch.no_grad()
def drop_unused(root: FSDPModule, profile: ModelProfile) -> None:
    """After the last backward of a step, set the gradients of parameters that no rank used to None:
    zeros were exchanged for them, and optimizers skip None, not 0. Where a step's path varies,
    ranks compare what they used.

    Raises:
        ModelError: see `require_reduced`.
    """
    require_reduced(root)
    assert isinstance(root, nn.Module)
    if not profile.unused and root not in _USED:
        return
    trained = {name: p for name, p in root.named_parameters() if p.requires_grad}
    unused = [p for p in map(trained.__getitem__, profile.unused) if not has_gradient(p)]
    if root in _USED:
        noted, parameters = _USED[root], list(trained.values())
        used = torch.tensor(
            [p in noted or (not isinstance(p, DTensor) and has_gradient(p)) for p in parameters]
        ).int()
        if dist.get_world_size() > 1:
            used = used.to(parameters[0].device)
            dist.all_reduce(used, op=dist.ReduceOp.MAX)
        unused = [p for p, is_used in zip(parameters, used.tolist(), strict=True) if not is_used]
        noted.clear()
    for parameter in unused:
        parameter.grad = None


_USED: WeakKeyDictionary[nn.Module, set[nn.Parameter]] = WeakKeyDictionary()
"""Shards with a gradient in the step under way, of models whose path varies."""


def start_over(model: nn.Module, plan: Plan) -> None:
    """Reset after a failed step, so that the next one starts clean."""
    if isinstance(model, FSDPModule):
        _USED.get(model, set()).clear()
        forget_step_underway(model)
        prepare_backward(model, plan, last=True)
        release(model)


def release(model: nn.Module) -> None:
    """Reshard after a forward without a backward."""
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.reshard()


_KEEP_PARAMETERS = (DataParallel.ZERO1, DataParallel.ZERO2)


@contextmanager
def _refused(name: str) -> Iterator[None]:
    """Raise FSDP2's errors (parameters without dimensions ...) as a `PlanError`."""
    try:
        yield
    except (ValueError, RuntimeError, AssertionError, NotImplementedError) as error:
        raise PlanError(
            f"`{name}` cannot be sharded: {str(error).strip().splitlines()[0]}",
            hints=["replicate it: dp_replicate without zero"],
        ) from error


def _own_storage(module: nn.Module, args: object, output: object) -> object:
    """Copy outputs that are views, before FSDP2 hooks its gather for the backward to them.

    An in-place operation on a view drops that hook silently and the gradients come out wrong.
    """
    return map_tensors(lambda tensor: tensor.clone() if is_view(tensor) else tensor, output)


def _precision(
    mixed: torch.dtype | None,
    *,
    output_dtype: torch.dtype | None = None,
    casts_inputs: bool = True,
) -> MixedPrecisionPolicy:
    if mixed is None:
        return MixedPrecisionPolicy()
    return MixedPrecisionPolicy(
        param_dtype=mixed,
        reduce_dtype=torch.float32,
        output_dtype=output_dtype,
        cast_forward_inputs=casts_inputs,
    )


def _offload(plan: Plan, mesh: DeviceMesh) -> OffloadPolicy:
    if not plan.offload.states:
        return OffloadPolicy()
    # Pinned memory makes copies to an accelerator asynchronous; files cannot be pinned.
    in_memory = plan.offload_to is OffloadTo.HOST
    return CPUOffloadPolicy(pin_memory=in_memory and mesh.device_type != "cpu")
