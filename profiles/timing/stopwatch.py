"""Time the units of a model on a device, one at a time.

Every distinct unit (class, parameters, inputs) is copied to the device and run there by itself,
forward and backward, on random inputs of the shapes that it has in the model; equal ones once. The
model is followed on stand-ins and never run, so it may be on the meta device or too large for any,
and stays as it is: modes, gradients, buffers, hooks and random state.
"""

from __future__ import annotations

import logging
import platform
import time
from collections.abc import Sequence
from pathlib import Path

import torch
from torch import nn

from profiles.cache import cache_path, keep, our_version, recall
from profiles.capture.batch.call import Batch, LossFn
from profiles.capture.calls import CallSpec, calls_of
from profiles.capture.fakes.tensors import preserved_random_state
from profiles.capture.frames import summary
from profiles.capture.module.units import find_units
from profiles.model.profile import LOSS, ModelProfile, Numerics, UnitProfile
from profiles.model.times import BlockTimes, UnitTiming
from profiles.timing.block_timer import time_unit

log = logging.getLogger(__name__)

BUDGET_S = 10.0


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
    path = cache_path(
        "times",
        plain.model_dump(mode="json"),
        device_name,
        processor_name(device),
        threads_of(device),
        numerics.value,
        torch.__version__,
        our_version(),
    )
    times = recall(path, BlockTimes)
    if times is None:
        times = time_blocks(
            model,
            sample,
            profile,
            device_name=device_name,
            loss_fn=loss_fn,
            device=device,
            numerics=numerics,
            budget_s=budget_s,
        )
        keep(path, times)
    return times


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
    samples = profile.samples
    # What is soon done leaves its time to what takes long.
    groups = sorted(distinct.values(), key=lambda names: units[names[0]].flop(samples, numerics))
    end = time.perf_counter() + budget_s
    with preserved_random_state([_number(device)] if device.type == "cuda" else []):
        for number, names in enumerate(groups):
            first = names[0]
            share_s = (end - time.perf_counter()) / (len(groups) - number)
            subject = loss_fn if first == LOSS else modules[first]
            try:
                assert subject is not None
                forward, backward = time_unit(
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
        threads=threads_of(device),
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


def _number(device: torch.device) -> int:
    """Of a CUDA device; the current one where it has none."""
    return torch.cuda.current_device() if device.index is None else device.index


def processor_name(device: torch.device) -> str:
    """Name that the device reports."""
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    try:
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    except OSError:
        pass
    return platform.processor() or platform.machine()


def threads_of(device: torch.device) -> int:
    """That a rank on this device computes with; 1 where the device is an accelerator."""
    return torch.get_num_threads() if device.type == "cpu" else 1


def _likeness(unit: UnitProfile, calls: Sequence[CallSpec], numerics: Numerics) -> object:
    """Units that are alike in this take the same time."""
    cost = unit.cost(numerics)
    work = (cost.forward_flop, cost.forward_moved_bytes, cost.forward_kernels, cost.backward_flop)
    return unit.kind, unit.parameters, unit.shapes, work, tuple(call.key() for call in calls)
