"""Compute time: a roofline for each unit, with size-dependent efficiency."""

from __future__ import annotations

import functools
from dataclasses import dataclass, replace
from math import hypot, log

from advisor.cost.calibration import CALIBRATION, Calibration
from advisor.cost.compute.rates import (
    LISTED_OPERATION,
    PLAIN_OPERATION,
    PYTHON_SHARE,
    SHARD_OPERATION,
    UPDATE_LAUNCHES,
    operation_s,
)
from advisor.cost.compute.rates import DeviceRates as Rates
from advisor.cost.compute.rates import matmul_fraction as matmul_fraction
from advisor.cost.compute.rates import new_memory_s as new_memory_s
from advisor.cost.compute.rates import peak_flop_per_s as peak_flop_per_s
from advisor.cost.compute.rates import product_efficiency as product_efficiency
from advisor.cost.compute.rates import size_efficiency as size_efficiency
from advisor.cost.compute.unit_passes import UnitPasses, in_sequence
from advisor.cost.compute.unit_passes import UnitTime as UnitTime
from advisor.cost.load.loads import Loads, ends_of
from engines.plan import Plan, Recompute
from profiles.machine.cluster import ClusterProfile, Device
from profiles.model.profile import ModelProfile, Numerics
from profiles.model.times import BlockTimes, UnitTiming
from profiles.workload.optimizers import STEPS_OWN_PARTS, Upkeep
from profiles.workload.stack import TORCH, Stack

# Error of a roofline over unfused operations, in addition to its inputs' errors. Assumed until our
# own runs bound it: the size of the error of published matmul rates.
COMPUTE_ERROR = 0.15
# Blocks timed alone differ from a step: their weights stay cached, and no gradients are passed on.
# Three small GPTs on a shared CPU, forward and backward alternating with their blocks: medians of
# 1.02, 1.07 and 1.13 of the sum.
MEASURED_ERROR = 0.15
# A time at another microbatch is the measured one, scaled by the roofline. Assumed error: half of
# the roofline's.
SCALED_ERROR = COMPUTE_ERROR / 2
# CPU Adam works through the node's memory channels, which its devices share. One socket with eight
# channels of DDR4-3200 (25.6 GB/s each) has 205 GB/s; streaming reaches about half when reading and
# writing are mixed. Assumed: no profile measures it.
HOST_BANDWIDTH_BYTES_PER_S = 100e9


@dataclass(frozen=True, slots=True)
class Busy:
    """Compute seconds of a rank in a step, by purpose."""

    compute_s: float
    recompute_s: float
    launch_s: float

    @property
    def total(self) -> float:
        return self.compute_s + self.recompute_s + self.launch_s

    @property
    def waiting(self) -> float:
        """Share of the seconds in which the device waits for its host."""
        return self.launch_s / self.total if self.total else 0.0

    def times(self, factor: float) -> Busy:
        """All of it as many times as long."""
        return Busy(self.compute_s * factor, self.recompute_s * factor, self.launch_s * factor)


@dataclass(frozen=True, slots=True)
class Computing:
    """Every unit's times, with their error.

    Attributes:
        error: half-width of the range of computing time, as a fraction.
        measured_share: fraction of the seconds that is based on measured times.
        added: further seconds of every microbatch after the first, see `added_s`.
    """

    times: tuple[UnitTime, ...]
    error: float
    measured_share: float = 0.0
    added: Busy = Busy(0.0, 0.0, 0.0)


def busy_s(computing: Computing, forwards: int) -> Busy:
    """Compute seconds of a rank in `forwards` microbatches."""
    times, added, further = computing.times, computing.added, forwards - 1
    return Busy(
        compute_s=forwards * sum(t.count * (t.forward_s + t.backward_s) for t in times)
        + further * added.compute_s,
        recompute_s=forwards * sum(t.count * t.recompute_s for t in times),
        launch_s=forwards
        * sum(
            t.count * (t.forward_launch_s + t.backward_launch_s + t.recompute_launch_s)
            for t in times
        )
        + further * added.launch_s,
    )


def added_s(
    loads: Loads, times: tuple[UnitTime, ...], *, share: float, device: Device, devices: int = 1
) -> Busy:
    """Seconds to accumulate gradients over microbatches: both are read and their sum is written,
    one tensor after the other (AccumulateGrad in torch/csrc/autograd).

    Args:
        times: the roofline's of `loads`.
        share: fraction of the gradients that this rank accumulates.
        devices: number of devices whose backwards the process launches; one accumulates gradients.
    """
    bandwidth, launch_s = CALIBRATION.bandwidth_bytes_per_s(device), device.launch_s.value
    adding_s = operation_s(device)  # the node of autograd runs in any case
    moving = launching = 0.0
    for unit, time in zip(loads.entries, times, strict=True):
        if not unit.gradient_bytes:
            continue
        busy = 3 * share * unit.gradient_bytes / bandwidth
        waiting = unit.tensors * adding_s
        if device.kind != "cpu":
            # Launches run ahead of the device: additional ones cost what it does not hide,
            # additional work what they do not hide.
            ahead = devices * unit.backward_kernels * launch_s - time.backward_s
            waiting = max(0.0, ahead + waiting - busy) - max(0.0, ahead)
        # Work that hides earlier launches reduces idle time: no part of a step shrinks.
        moving += unit.count * (busy + min(0.0, waiting))
        launching += unit.count * max(0.0, waiting)
    return Busy(compute_s=moving, recompute_s=0.0, launch_s=launching)


RunPasses = tuple[tuple[UnitPasses, UnitPasses | None], ...]
"""Of one unit of every run, and of the code before it."""


def unit_times(
    loads: Loads,
    *,
    recompute: Recompute,
    device: Device,
    dtype: str,
    stack: Stack = TORCH,
    calibration: Calibration = CALIBRATION,
    is_sharded: bool = False,
) -> tuple[UnitTime, ...]:
    """Seconds of one unit for every entry of `loads` on `device`.

    Args:
        is_sharded: True if FSDP2 gathers and reduces the parameters of each.
    """
    passes = passes_of(
        loads,
        device=device,
        dtype=dtype,
        stack=stack,
        calibration=calibration,
        is_sharded=is_sharded,
    )
    return with_recompute(passes, recompute, stack)


def passes_of(
    loads: Loads,
    *,
    device: Device,
    dtype: str,
    stack: Stack = TORCH,
    calibration: Calibration = CALIBRATION,
    is_sharded: bool = False,
) -> RunPasses:
    """Passes of all runs of `loads`, from which `unit_times` follow for any recompute."""
    rates = functools.partial(Rates.of, device, charges_kernels=loads.charges_kernels)
    inner = rates(dtype, stack, calibration)
    # Heads stay in 16 bits where blocks multiply in 8 (DeepSeek-V3, arXiv:2412.19437, section
    # 3.3.1; Megatron-LM's output layer is none of Transformer Engine's).
    outer = rates("bfloat16", stack, calibration) if inner.is_narrow else inner
    passes = []
    for run in loads.runs:
        own = UnitPasses.of(run, inner if run.is_block else outer, is_sharded=is_sharded)
        glue = UnitPasses.of(run.glue, outer, is_sharded=False) if run.glue is not None else None
        passes.append((own, glue))
    return tuple(passes)


def with_recompute(
    passes: RunPasses, recompute: Recompute, stack: Stack, *, is_stage: bool = False
) -> tuple[UnitTime, ...]:
    """`unit_times` of loads with these `passes_of`, which are those of a stage or of the model."""
    # Entries of one run differ only in count.
    times = []
    for own, glue in passes:
        time = own.time(recompute, stack)
        if glue is not None:
            time = time.with_glue(glue.time(recompute, stack))
        counts = ends_of(own.unit.count)
        times += [time if n == time.count else replace(time, count=n) for n in counts]
    return in_sequence(times, is_stage=is_stage)


def block_times(
    model: ModelProfile, cluster: ClusterProfile, kind: Numerics, *, samples: int
) -> BlockTimes | None:
    """Measured times for a plan of these numerics, at the nearest microbatch."""
    device = cluster.device
    fitting = [
        times
        for times in model.times
        if times.numerics == kind
        and times.is_of(
            device=device.name,
            kind=device.kind,
            ranks=cluster.devices_per_node,
            cores=cluster.cores,
        )
    ]
    return min(fitting, key=lambda times: abs(log(times.samples / samples)), default=None)


def with_measured(
    times: tuple[UnitTime, ...],
    loads: Loads,
    *,
    measured: BlockTimes,
    at_measured: tuple[UnitTime, ...],
    error: float,
    added: Busy,
) -> Computing:
    """Replace the roofline's times by measured seconds where available.

    Args:
        measured: times on this device, possibly at another microbatch.
        at_measured: the roofline at that microbatch.
        error: of the roofline.
        added: the roofline's; blocks were timed without accumulating gradients.
    """
    timed, seconds, doubts, known = [], 0.0, 0.0, 0.0
    for unit, time, then in zip(loads.entries, times, at_measured, strict=True):
        timing = measured.units.get(unit.name)
        doubt = error
        if timing is not None:
            time = _measured_time(time, then, timing)
            doubt = hypot(MEASURED_ERROR, _spread(timing))
            if measured.samples != loads.samples:
                doubt = hypot(doubt, SCALED_ERROR)
        timed.append(time)
        busy = unit.count * (time.forward_s + time.backward_s + time.recompute_s)
        before = unit.count * sum(time.glue_s)  # never measured
        seconds += busy
        doubts += doubt * (busy - before) + error * before
        known += (busy - before) * (timing is not None)
    return Computing(
        times=tuple(timed),
        error=min(1.0, doubts / seconds) if seconds else error,
        measured_share=known / seconds if seconds else 0.0,
        added=added,
    )


def _measured_time(time: UnitTime, then: UnitTime, timing: UnitTiming) -> UnitTime:
    """Scale a measurement to another microbatch; it includes launches, and no code before the
    unit."""
    forward, backward = _own_s(time)
    was_forward, was_backward = _own_s(then)
    again = time.recompute_s + time.recompute_launch_s
    forward_s = timing.forward.median_s * (forward / was_forward if was_forward else 1.0)
    backward_s = timing.backward.median_s * (backward / was_backward if was_backward else 1.0)
    return UnitTime(
        forward_s=forward_s + time.glue_s[0],
        backward_s=backward_s + time.glue_s[1],
        recompute_s=forward_s * again / forward if forward else 0.0,
        forward_launch_s=0.0,
        backward_launch_s=0.0,
        recompute_launch_s=0.0,
        count=time.count,
        glue_s=time.glue_s,
    )


def _own_s(time: UnitTime) -> tuple[float, float]:
    """Seconds of a unit's forward and backward, launches included, without code before it."""
    forward_s, backward_s = time.glue_s
    return (
        time.forward_s + time.forward_launch_s - forward_s,
        time.backward_s + time.backward_launch_s - backward_s,
    )


def _spread(timing: UnitTiming) -> float:
    """Half of the range over the median, of forward plus backward."""
    parts = (timing.forward, timing.backward)
    median = sum(part.median_s for part in parts)
    return sum(part.high_s - part.low_s for part in parts) / (2 * median) if median else 0.0


def optimizer_s(
    plan: Plan, update: Upkeep, *, device: Device, ranks: int, waiting: float = 0.0
) -> float:
    """Update of a rank's parameters, on the host if states are offloaded.

    It moves bytes; the few optimizers that multiply matrices do that in bf16, on large ones. A
    processor updates tensor by tensor, which takes the host longer than a small tensor's bytes; an
    accelerator takes lists, which the host makes while the device works. Optimizers that are not
    torch's, or look at more than an element, go through shards one by one, on an accelerator while
    it works. Adafactor goes tensor by tensor on both, and waits for two norms of each
    (torch/optim/_adafactor.py): 170 to 370 us a tensor in steps on an H200.

    Args:
        waiting: share of the passes in which an accelerator waits for its host, as it does then for
            lists; 0 for a lower bound.
    """
    if plan.offload.states and device.kind != "cpu":
        return update.moved_bytes / (HOST_BANDWIDTH_BYTES_PER_S / ranks)
    moving = update.moved_bytes / CALIBRATION.bandwidth_bytes_per_s(device)
    reached = peak_flop_per_s(device, "bfloat16").value * matmul_fraction(device)
    host_s = update.read_back * device.launch_s.value
    one_by_one = plan.data_parallel.is_sharded and update.name.lower() not in STEPS_OWN_PARTS
    if device.kind == "cpu":
        operation = SHARD_OPERATION if one_by_one else PLAIN_OPERATION
        host_s = update.operations * operation * device.launch_s.value
        host_s += new_memory_s(device, update.new_bytes)
    elif one_by_one:
        shard_s = SHARD_OPERATION * PYTHON_SHARE * device.launch_s.value
        moving = max(moving, update.operations * shard_s)
    else:
        listed = UPDATE_LAUNCHES + LISTED_OPERATION * update.operations
        moving = max(moving, waiting * listed * device.launch_s.value)
    return moving + update.flop / reached + host_s


def compute_error(device: Device, dtype: str) -> float:
    """Half-width of the range of computing time, as a fraction."""
    matmul = hypot(
        peak_flop_per_s(device, dtype).relative_error, device.matmul_fraction.relative_error
    )
    return hypot(COMPUTE_ERROR, max(matmul, device.memory_bandwidth_bytes_per_s.relative_error))


def launch_error(device: Device) -> float:
    """Half-width of the range of launching time, as a fraction."""
    return min(1.0, hypot(COMPUTE_ERROR, device.launch_s.relative_error))
