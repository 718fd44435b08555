"""Replicas: every rank holds everything, gradients are averaged (DistributedDataParallel)."""

from __future__ import annotations

import functools
import weakref
from collections.abc import Collection, Iterable, Iterator
from contextlib import contextmanager

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from engines.data.hidden_outputs import close_output, opened
from engines.plan import Plan
from engines.runtime.world import World
from profiles.errors import ModelError
from profiles.model.profile import ModelProfile
from profiles.torch_compat import leave_to_others, without_buffer_sync
from profiles.torch_compat.checkpoint import within_one_backward


def replicate(
    model: nn.Module,
    *,
    profile: ModelProfile,
    device: torch.device | None,
    group: dist.ProcessGroup | None,
    ignored: Collection[str] = (),
    bucket_mib: int | None = None,
) -> DistributedDataParallel:
    """Wrap `model` so that its backward averages gradients over the ranks of `group`.

    Gradients live in the communication buckets (no second copy). The graph is searched for unused
    parameters only where a step may have some: the search costs time in every step. The parameters
    named in `ignored` are left alone. Sparse gradients are copied: DDP divides them in place, and
    their values are the memory of the gradient that goes on to other layers. `device` is None for
    a model whose parts sit on several: DDP then moves nothing, and reduces every bucket where it
    is.

    Raises:
        ModelError: nothing in the model is trainable.
    """
    if not any(parameter.requires_grad for parameter in model.parameters()):
        raise ModelError(
            f"`{profile.name}` has no trainable parameter: there is nothing to train",
            hints=["set requires_grad on the parameters that should learn"],
        )
    leave_to_others(model, ignored)
    runner = DistributedDataParallel(
        model,
        device_ids=[device] if device is not None and device.type == "cuda" else None,
        process_group=group,
        # Named, it is the size of the first bucket too, which is 1 MiB otherwise.
        bucket_cap_mb=bucket_mib,
        init_sync=False,  # apply/prepare.py sends rank 0's parameters to every kind of plan
        # Running statistics are sent once a step by ParallelModel, not once a forward by DDP.
        **without_buffer_sync(),  # type: ignore[arg-type]
        gradient_as_bucket_view=True,
        find_unused_parameters=profile.may_skip_parameters,
    )
    if dist.get_backend(group) == "fake":
        # DDP waits for a result that fake groups do not have; a hook in Python does the same.
        runner.register_comm_hook(group, all_reduced)
    _require_calls_through(runner, opens=profile.may_skip_parameters)
    waited_for = [p for n, p in model.named_parameters() if p.requires_grad and n not in ignored]
    # Where a step uses all of them, one speaks for all.
    _require_one_backward(runner, waited_for if profile.may_skip_parameters else waited_for[:1])
    for name, parameter in model.named_parameters():
        if parameter.requires_grad and parameter.ndim > 2 and 1 in parameter.shape:
            parameter.register_hook(functools.partial(_with_strides_of, parameter.stride()))
        elif name in profile.sparse_gradients:
            parameter.register_hook(torch.clone)
    return runner


def exchanges_gradients_alone(runner: object, plan: Plan, world: World) -> bool:
    """True if the ranks of a step are replicas under DDP and nothing else: forwards exchange
    nothing, and after the backward all have the same gradients."""
    is_wrapped = isinstance(runner, DistributedDataParallel)
    return is_wrapped and plan.is_ddp_alone and not world.is_fake


def all_reduced(
    group: dist.ProcessGroup | None, bucket: dist.GradBucket
) -> torch.futures.Future[Tensor]:
    """A communication hook that waits for nothing: the sum of a bucket, as it is now."""
    buffer = bucket.buffer()
    dist.all_reduce(buffer, group=group)
    is_cuda = buffer.device.type == "cuda"
    future: torch.futures.Future[Tensor] = torch.futures.Future(
        devices=[buffer.device] if is_cuda else []
    )
    future.set_result(buffer)
    return future


all_reduced.__annotations__.clear()  # torch would compare these strings with types


def _with_strides_of(strides: tuple[int, ...], gradient: Tensor) -> Tensor:
    """The stride of a dimension of size 1 is arbitrary. Backwards of depthwise convolutions give it
    another one than the parameter has, and DDP warns of a slow copy that it makes anyway."""
    steps = zip(gradient.shape, gradient.stride(), strides, strict=True)
    is_alike = all(size == 1 or own == wanted for size, own, wanted in steps)
    return gradient.as_strided(gradient.shape, strides) if is_alike else gradient


def _require_calls_through(runner: DistributedDataParallel, *, opens: bool) -> None:
    """Refuse a training forward of the user's own module: it would exchange nothing, and each rank
    would silently learn from its own data alone. `opens`: show the runner what lies in objects of
    an output, where it looks for unused parameters from there."""
    under_way = is_runners = False

    def begin(module: nn.Module, args: object) -> None:
        nonlocal under_way
        under_way = True

    def check(module: nn.Module, args: object) -> None:
        nonlocal under_way, is_runners
        is_copy = module is not runner.module  # a deep copy has this hook too
        if not under_way and not is_copy and torch.is_grad_enabled() and module.training:
            raise ModelError(
                "the model itself was called: its backward would not exchange gradients",
                hints=["call what `auto_parallelize` returned: `output = parallel(inputs)`"],
            )
        is_runners = under_way and not is_copy
        under_way = False

    def show(module: nn.Module, args: object, output: object) -> object:
        return opened(output) if is_runners and module is runner.module else output

    runner.register_forward_pre_hook(begin)
    runner.module.register_forward_pre_hook(check)
    if opens:
        runner.module.register_forward_hook(show)
        runner.register_forward_hook(close_output)


def _require_one_backward(
    runner: DistributedDataParallel, parameters: Iterable[nn.Parameter]
) -> None:
    """Refuse a second backward without a forward before it: DDP exchanges gradients once a forward,
    and each rank would silently add those of its own data alone."""
    # Nothing that a hook of a tensor leads to may lead to the tensor: nobody would free either.
    reached: set[int] = set()
    its_runner = weakref.ref(runner)

    def begin(module: nn.Module, args: object) -> None:
        if torch.is_grad_enabled():
            reached.clear()

    def check(parameter: Tensor) -> None:
        if id(parameter) in reached:
            raise ModelError(
                "a second backward since the last forward: DDP has exchanged gradients in the"
                " first, and would not exchange what this one adds",
                hints=[
                    "run one backward of their sum: `(first + second).backward()`",
                    "or the backwards but the last, with their forwards, in `parallel.no_sync()`",
                    "or shard: `dp_shard` or `zero=1` allow both",
                ],
            )
        if (alive := its_runner()) is not None and alive.require_backward_grad_sync:
            reached.add(id(parameter))

    runner.register_forward_pre_hook(begin)
    for parameter in parameters:
        parameter.register_post_accumulate_grad_hook(check)


def require_all_reduced(
    parameters: Iterable[tuple[str, nn.Parameter]], profile: ModelProfile
) -> None:
    """Require after a backward that every parameter which DDP waits for has a gradient.

    Raises:
        ModelError: one was not used. Its bucket was not exchanged, so gradients are wrong, and
            DDP itself says so only in the next step.
    """
    if profile.may_skip_parameters:
        return  # DDP then looks for unused parameters itself
    for name, parameter in parameters:
        if parameter.grad is None and parameter.requires_grad:
            raise ModelError(
                f"`{name}` got no gradient in this step, it had one from the sample: DDP cannot"
                " tell which parameters a step uses",
                hints=[
                    "give a sample that leaves it unused too",
                    "or shard: `dp_shard` or `zero=1` exchange zeros for what a rank did not use",
                ],
            )


@contextmanager
def reducible_forward() -> Iterator[None]:
    """Around a forward: let its backward reduce each gradient once, whatever is checkpointed, and
    explain DDP's error about the backward before it.

    Raises:
        ModelError: that backward did not reach every parameter, so that gradients were not
            exchanged.
    """
    try:
        with within_one_backward():
            yield
    except RuntimeError as error:
        if "Expected to have finished reduction" not in str(error):
            raise
        raise ModelError(
            "the backward before this forward did not reach every parameter: it broke off, or the"
            " outputs that had a loss do not depend on all of them",
            hints=[
                "after an exception in a backward build the model anew: DDP cannot go on",
                "give a sample that leaves the same parameters unused",
                "or shard: `dp_shard` or `zero=1` allow both",
            ],
        ) from error
