"""Time the units of a model on a device, one at a time.

Every distinct unit (class, parameters, inputs) is copied to the device and run there by itself,
forward and backward, on random inputs of the shapes that it has in the model; equal ones once. The
model is followed on stand-ins and never run, so it may be on the meta device or too large for any,
and stays as it is: modes, gradients, buffers, hooks and random state.
"""

from __future__ import annotations

import copy
import logging
import platform
import statistics
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from pathlib import Path

import torch
from torch import Tensor, nn

from profiles.batch import Batch, LossFn, batch_size
from profiles.calls import Call, calls_of, inputs_of
from profiles.fakes import random_state_kept
from profiles.frames import summary
from profiles.kept import keep, kept_path, our_version, recall
from profiles.model import LOSS, ModelProfile, Numerics, UnitProfile
from profiles.modules import find_units
from profiles.provenance import Timing
from profiles.times import BlockTimes, UnitTiming
from profiles.torch_compat import tensors_in

log = logging.getLogger(__name__)

BUDGET_S = 10.0
# The first runs allocate, choose kernels and warm caches.
WARM_UP = 2
FEWEST, MOST = 5, 50
# Random weights: small, so that nothing overflows in a block's depth; GPT-2's own spread.
WEIGHT_STD = 0.02


def with_times(
    model: nn.Module,
    sample: Batch,
    profile: ModelProfile,
    *,
    device_name: str,
    loss_fn: LossFn | None = None,
    budget_s: float = BUDGET_S,
) -> ModelProfile:
    """`profile` with measured times for each of its numerics; see `recall_or_time`."""
    times = tuple(
        recall_or_time(
            model,
            sample,
            profile,
            device_name=device_name,
            loss_fn=loss_fn,
            numerics=kind,
            budget_s=budget_s / len(profile.numerics),
        )
        for kind in profile.numerics
    )
    return profile.model_copy(update={"times": times})


def recall_or_time(
    model: nn.Module,
    sample: Batch,
    profile: ModelProfile,
    *,
    device_name: str,
    loss_fn: LossFn | None = None,
    device: torch.device | None = None,
    numerics: Numerics = Numerics.AS_BUILT,
    budget_s: float = BUDGET_S,
) -> BlockTimes:
    """`time_blocks`, or what it found before for the same model, device and versions.

    Kept in the user's cache folder under a hash of the profile (shapes and costs of all units), the
    device, its processor and threads, the numerics, and the versions of torch and of this package.
    """
    device = device or default_device()
    plain = profile.model_copy(update={"times": ()})
    path = kept_path(
        "times",
        plain.model_dump(mode="json"),
        device_name,
        processor_name(device),
        _threads(device),
        numerics.value,
        torch.__version__,
        our_version(),
    )
    found = recall(path, BlockTimes)
    if found is None:
        found = time_blocks(
            model,
            sample,
            profile,
            device_name=device_name,
            loss_fn=loss_fn,
            device=device,
            numerics=numerics,
            budget_s=budget_s,
        )
        keep(path, found)
    return found


def time_blocks(
    model: nn.Module,
    sample: Batch,
    profile: ModelProfile,
    *,
    device_name: str,
    loss_fn: LossFn | None = None,
    device: torch.device | None = None,
    numerics: Numerics = Numerics.AS_BUILT,
    budget_s: float = BUDGET_S,
) -> BlockTimes:
    """Seconds of every unit on `device` at the sample's batch, forward and backward.

    Units that cannot be run by themselves are left out, with the reason; so is what the model does
    between its units.

    Args:
        sample, loss_fn: what `profile` was captured with.
        device_name: as the cluster's device is named.
        device: the current CUDA device, or the CPU, if None.
        numerics: one of those that were captured.
        budget_s: wall time to spend, about; every unit is run a few times in any case.

    Raises:
        ModelError: the model does not run on the sample.
    """
    device = device or default_device()
    calls, left_out = calls_of(model, sample, loss_fn)
    modules = {unit.name: unit.module for unit in find_units(model)}
    distinct: dict[object, list[str]] = {}
    units = {unit.name: unit for unit in profile.units}
    for name in calls:
        distinct.setdefault(_likeness(units[name], calls[name], numerics), []).append(name)
    timed: dict[str, UnitTiming] = {}
    samples = batch_size(sample)
    # What is soon done leaves its time to what takes long.
    groups = sorted(distinct.values(), key=lambda names: units[names[0]].flop(samples, numerics))
    end = time.perf_counter() + budget_s
    with random_state_kept([device.index or 0] if device.type == "cuda" else []):
        for number, names in enumerate(groups):
            first = names[0]
            share_s = (end - time.perf_counter()) / (len(groups) - number)
            subject = loss_fn if first == LOSS else modules[first]
            try:
                assert subject is not None
                forward, backward = _time_unit(
                    subject, calls[first], sample, device, numerics, share_s
                )
            except Exception as error:  # whatever a user's module raises by itself
                left_out |= dict.fromkeys(names, summary(error))
                continue
            for name in names:
                cost = units[name].cost(numerics)
                timed[name] = UnitTiming(
                    forward=forward,
                    backward=backward,
                    forward_flop=cost.forward_flop.at(samples),
                    backward_flop=cost.backward_flop.at(samples),
                )
    for name, reason in left_out.items():
        log.info("`%s` is not timed: %s", name, reason)
    return BlockTimes(
        device=device_name,
        processor=processor_name(device),
        threads=_threads(device),
        numerics=numerics.value,
        samples=samples,
        torch=torch.__version__,
        units=timed,
        left_out=left_out,
    )


def default_device() -> torch.device:
    """The current CUDA device where there is one, else the CPU."""
    if torch.cuda.is_available():
        return torch.device("cuda", torch.cuda.current_device())
    return torch.device("cpu")


def processor_name(device: torch.device) -> str:
    """What the device calls itself."""
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    try:
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    except OSError:
        pass
    return platform.processor() or platform.machine()


def _threads(device: torch.device) -> int:
    return torch.get_num_threads() if device.type == "cpu" else 1


def _likeness(unit: UnitProfile, calls: Sequence[Call], numerics: Numerics) -> object:
    """Units that are alike in this take the same time."""
    cost = unit.cost(numerics)
    work = (cost.forward_flop, cost.forward_moved_bytes, cost.forward_kernels, cost.backward_flop)
    return unit.kind, unit.parameters, unit.shapes, work, tuple(call.key() for call in calls)


def _time_unit(
    subject: nn.Module | LossFn,
    calls: Sequence[Call],
    sample: Batch,
    device: torch.device,
    numerics: Numerics,
    budget_s: float,
) -> tuple[Timing, Timing]:
    """All calls of one unit, forward and backward."""
    work = _on(subject, device, numerics) if isinstance(subject, nn.Module) else subject
    parameters = (
        [p for p in work.parameters() if p.requires_grad] if isinstance(work, nn.Module) else []
    )
    groups = Counter(call.key() for call in calls)
    by_key = {call.key(): call for call in calls}
    # A loss is computed in fp32 whatever the model ran in.
    inner = Numerics.AS_BUILT if not isinstance(work, nn.Module) else numerics
    timings = []
    with torch.inference_mode(False), torch.enable_grad():
        for key, count in groups.items():
            args, kwargs = inputs_of(by_key[key], sample, device, inner)
            wanted = [*(t for t in tensors_in((args, kwargs)) if t.requires_grad), *parameters]
            timing = _time_call(
                lambda args=args, kwargs=kwargs: work(*args, **kwargs),  # type: ignore[misc]
                wanted,
                device,
                inner,
                budget_s / len(groups),
            )
            timings.append((*timing, count))
    return (
        _sum([(forward, count) for forward, _, count in timings]),
        _sum([(backward, count) for _, backward, count in timings]),
    )


def _on(module: nn.Module, device: torch.device, numerics: Numerics) -> nn.Module:
    """A copy of its own on the device; parameters without values get small random ones."""
    is_meta = any(t.is_meta for t in (*module.parameters(), *module.buffers()))
    made = copy.deepcopy(module)
    made = made.to_empty(device=device) if is_meta else made.to(device)
    with torch.no_grad():
        for tensor in (*made.parameters(), *made.buffers()) if is_meta else ():
            if tensor.is_floating_point():
                tensor.normal_(0, WEIGHT_STD)
            else:
                tensor.zero_()
        for parameter in made.parameters():
            if numerics is Numerics.BF16 and parameter.dtype == torch.float32:
                parameter.data = parameter.data.to(torch.bfloat16)
            parameter.grad = None
    for part in made.modules():
        _drop_hooks(part)
    return made


def _drop_hooks(module: nn.Module) -> None:
    """A user's hooks are not to see these runs; torch's own make weights (weight_norm)."""
    for name, hooks in vars(module).items():
        if name.endswith("_hooks") and isinstance(hooks, dict):
            for key, hook in list(hooks.items()):
                origin = getattr(hook, "__module__", None) or type(hook).__module__
                if callable(hook) and not str(origin).startswith("torch."):
                    del hooks[key]


def _time_call(
    run: Callable[[], object],
    wanted: list[Tensor],
    device: torch.device,
    numerics: Numerics,
    budget_s: float,
) -> tuple[Timing, Timing]:
    """Forward and backward, in turns, for about `budget_s`."""
    forward_s: list[float] = []
    backward_s: list[float] = []
    begin = time.perf_counter()
    while len(forward_s) < FEWEST + WARM_UP or (
        len(forward_s) < MOST and time.perf_counter() < begin + budget_s
    ):
        with _autocast(device, numerics), _clock(device, forward_s):
            output = run()
        roots = [t for t in tensors_in(output) if t.requires_grad]
        ones = [torch.ones_like(root) for root in roots]
        with _clock(device, backward_s):
            # Not `backward`: nothing is added to any gradient.
            if roots and wanted:
                torch.autograd.grad(roots, wanted, ones, allow_unused=True)
        del output, roots, ones
    return _timing(forward_s[WARM_UP:]), _timing(backward_s[WARM_UP:])


@contextmanager
def _autocast(device: torch.device, numerics: Numerics) -> Iterator[None]:
    is_on = numerics is Numerics.BF16_AUTOCAST
    with torch.autocast(device.type, torch.bfloat16) if is_on else nullcontext():
        yield


@contextmanager
def _clock(device: torch.device, seconds: list[float]) -> Iterator[None]:
    """Appends the seconds of what runs inside; by the device's own events on CUDA."""
    if device.type == "cuda":
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        torch.cuda.synchronize(device)
        start.record()
        yield
        end.record()
        torch.cuda.synchronize(device)
        seconds.append(start.elapsed_time(end) * 1e-3)  # milliseconds
        return
    begin = time.perf_counter()
    yield
    seconds.append(time.perf_counter() - begin)


def _timing(seconds: Sequence[float]) -> Timing:
    """The range is the 10th to the 90th percentile."""
    ordered = sorted(seconds)
    tenth = len(ordered) // 10
    return Timing(
        median_s=statistics.median(ordered),
        low_s=ordered[tenth],
        high_s=ordered[-1 - tenth],
        repeats=len(ordered),
    )


def _sum(timings: Sequence[tuple[Timing, int]]) -> Timing:
    return Timing(
        median_s=sum(count * timing.median_s for timing, count in timings),
        low_s=sum(count * timing.low_s for timing, count in timings),
        high_s=sum(count * timing.high_s for timing, count in timings),
        repeats=min(timing.repeats for timing, _ in timings),
    )
