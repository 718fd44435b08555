"""Passes of one unit: seconds of its forward and backward, and of what is computed again."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

from advisor.cost.compute.rates import (
    PRODUCTS_OF_ATTENTION,
    PYTHON_SHARE,
    WIDE_BYTES,
    matmul_fraction,
    new_memory_s,
    product_efficiency,
)
from advisor.cost.compute.rates import DeviceRates as Rates
from advisor.cost.load.unit_load import UnitLoad
from engines.plan import Recompute
from profiles.model.profile import LOSS
from profiles.model.work import ProductKind
from profiles.workload.new_memory import mapped
from profiles.workload.stack import Selective, Stack

# Python code in torch.utils.checkpoint without reentrance (2.13), in launches. A kernel of the
# backward reads one saved tensor, which hooks pack and unpack, and pack again where the forward is
# repeated: 20 to 28 us beside launches of 14. Selective recompute sees every operator in a mode,
# twice, views too, which are nearly two for a kernel: 45 to 90 us a kernel.
HOOKS, MODES = 2, 5
# Of these a cast is as many as any other kernel; a plan in 16 bits has 1.4 times the kernels that
# its casts, which are 0.45 of one, leave in the counts (a GPT under autocast).
WITH_CASTS = 1.4
# Hooks of FSDP2 (2.13) in a forward or a backward, in launches: of a unit, and of each of its
# parameters, which are copied into a buffer and out of it, and swapped. 280 us and 28 for both, in
# one process on a processor whose launches take 14 (`python -m tests.benchmarks.shard_host`). On an
# accelerator they launch the copies, record events and call NCCL besides: 2 ms for both of a unit
# of 12 parameters on a host whose launches take 41 (two models of 7 units on an H200, one rank, and
# one of 8 without an exchange: `make gpu`, part e, shards of one rank).
SHARD_UNIT, SHARD_TENSOR = 10, 1


class PassSeconds(NamedTuple):
    """Seconds of a forward or of a backward.

    Attributes:
        launch_s: launches that the work of the device does not hide.
        ahead_s: work that the device has left when its host has launched all.
    """

    busy_s: float
    launch_s: float = 0.0
    ahead_s: float = 0.0

    @classmethod
    def of(cls, rates: Rates, busy_s: float, kernels: float) -> PassSeconds:
        """The pass of so many launches; a CPU, which runs both, hides none."""
        host_s = kernels * rates.launch_s
        if rates.device.kind == "cpu" or rates.waits:
            return cls(busy_s, host_s)
        return cls(busy_s, max(0.0, host_s - busy_s), max(0.0, busy_s - host_s))

    def then(self, other: PassSeconds) -> PassSeconds:
        """Both, one behind the other."""
        busy_s = self.busy_s + other.busy_s
        launch_s = self.launch_s + max(0.0, other.launch_s - self.ahead_s)
        return PassSeconds(
            busy_s, launch_s, max(0.0, self.ahead_s - other.launch_s) + other.ahead_s
        )


@dataclass(frozen=True, slots=True)
class UnitTime:
    """Seconds of one unit: compute, recompute, and waiting.

    Attributes:
        count: equal units in sequence, each of which takes as long.
        glue_s: of the forward and of the backward, launches included, of code before the unit.
        ahead_s: work of the device that is left when the host is through with the forward, and with
            the backward: it hides launches of what comes next, see `in_sequence`.
    """

    forward_s: float
    backward_s: float
    recompute_s: float
    forward_launch_s: float
    backward_launch_s: float
    recompute_launch_s: float
    count: int = 1
    glue_s: tuple[float, float] = (0.0, 0.0)
    ahead_s: tuple[float, float] = (0.0, 0.0)

    def with_glue(self, glue: UnitTime) -> UnitTime:
        """Time of the unit and of the code before it, which is not recomputed."""
        forward, backward = (
            glue.forward.then(self.forward),
            self.backward.then(glue.backward),
        )
        return replace(
            self,
            forward_s=forward.busy_s,
            backward_s=backward.busy_s,
            forward_launch_s=forward.launch_s,
            backward_launch_s=backward.launch_s,
            glue_s=(
                glue.forward_s + forward.launch_s - self.forward_launch_s,
                glue.backward_s + backward.launch_s - self.backward_launch_s,
            ),
            ahead_s=(forward.ahead_s, backward.ahead_s),
        )

    @property
    def forward(self) -> PassSeconds:
        return PassSeconds(self.forward_s, self.forward_launch_s, self.ahead_s[0])

    @property
    def backward(self) -> PassSeconds:
        """The backward without what is computed again."""
        return PassSeconds(self.backward_s, self.backward_launch_s, self.ahead_s[1])


def in_sequence(times: Sequence[UnitTime], *, is_stage: bool = False) -> tuple[UnitTime, ...]:
    """Times of units as they follow each other in a microbatch: what the device has left to do of
    one hides launches of the next, from the first forward to the last backward.

    Args:
        is_stage: True for units of a pipeline's stage. Its backward waits for a gradient, by when
            the device is done with the forward.
    """
    lead, forward, backward = 0.0, [], []
    for time in times:
        launch_s, lead = _hidden(lead, time.forward_launch_s, time.ahead_s[0], time.count)
        forward.append(launch_s)
    if is_stage:
        lead = 0.0
    for time in reversed(times):
        unhidden = time.backward_launch_s + time.recompute_launch_s
        launch_s, lead = _hidden(lead, unhidden, time.ahead_s[1], time.count)
        backward.append(launch_s / unhidden if unhidden else 0.0)
    return tuple(
        replace(
            time,
            forward_launch_s=waited,
            backward_launch_s=share * time.backward_launch_s,
            recompute_launch_s=share * time.recompute_launch_s,
        )
        for time, waited, share in zip(times, forward, reversed(backward), strict=True)
    )


def _hidden(lead: float, launch_s: float, ahead_s: float, count: int) -> tuple[float, float]:
    """Unhidden launches of each of `count` equal passes in a row, and the lead after them."""
    first = max(0.0, launch_s - lead)
    lead = max(0.0, lead - launch_s) + ahead_s
    gain = ahead_s - launch_s
    further = count - 1
    if gain >= 0:
        return first / count, lead + further * gain
    short = max(0.0, further * -gain - (lead - ahead_s))
    return (first + short) / count, max(ahead_s, lead + further * gain)


@dataclass(frozen=True, slots=True)
class UnitPasses:
    """A unit's forward and backward without recompute.

    Attributes:
        kernels: of a forward and of a backward, casts to 8 bits among them.
        multiplied_bytes: of the operands of a forward's products.
        hooks: host work of FSDP2 in each pass, in launches.
        python: of such of Python's code alone, over a launch.
    """

    unit: UnitLoad
    rates: Rates
    forward: PassSeconds
    backward: PassSeconds
    kernels: tuple[float, float]
    multiplied_bytes: float
    hooks: float
    python: float

    @classmethod
    def of(cls, unit: UnitLoad, rates: Rates, *, is_sharded: bool) -> UnitPasses:
        device = rates.device
        python = 1.0 if device.kind == "cpu" else PYTHON_SHARE
        hooks = shard_launches(unit) if is_sharded else 0.0
        products = unit.work.products
        kernels = (
            unit.forward_kernels + rates.cast_kernels(products, forward=True),
            unit.backward_kernels + rates.cast_kernels(products, forward=False),
        )

        def seconds(busy: float, charged: float, *, forward: bool) -> PassSeconds:
            moved = unit.forward_moved_bytes if forward else unit.backward_moved_bytes
            cycles = unit.forward_cycles if forward else unit.backward_cycles
            busy += rates.moving_s(max(0.0, moved - charged), cycles)
            busy += new_memory_s(device, _new_bytes(unit, forward=forward))
            return PassSeconds.of(rates, busy, kernels[not forward] + hooks)

        busy_s, multiplied_bytes = _multiplying(unit, rates, forward=True)
        forward = seconds(busy_s, multiplied_bytes, forward=True)
        backward = seconds(*_multiplying(unit, rates, forward=False), forward=False)
        return cls(unit, rates, forward, backward, kernels, multiplied_bytes, hooks, python)

    def time(self, recompute: Recompute, stack: Stack) -> UnitTime:
        """Seconds of the unit with its recompute."""
        forward, backward = self.forward, self.backward
        repeats = self.unit.runs_again(recompute)
        again = self._again(recompute, stack) if repeats else PassSeconds(0.0)
        ahead_s = again.ahead_s if again.busy_s else backward.ahead_s
        return UnitTime(
            forward_s=forward.busy_s,
            backward_s=backward.busy_s,
            recompute_s=again.busy_s,
            forward_launch_s=forward.launch_s,
            backward_launch_s=backward.launch_s,
            recompute_launch_s=again.launch_s,
            count=self.unit.count,
            ahead_s=(forward.ahead_s, ahead_s),
        )

    def _again(self, recompute: Recompute, stack: Stack) -> PassSeconds:
        """Seconds of what is computed again; the work that is left is that of the backward too."""
        unit, rates, forward = self.unit, self.rates, self.forward
        if recompute is Recompute.FULL:
            if stack.recomputes_whole:
                return forward.then(self.backward)._replace(
                    busy_s=forward.busy_s, launch_s=forward.launch_s
                )
            last = [each for each in unit.work.products if not each.is_recomputed]
            spared = (rates.product_s(p, p.forward_flop, p.forward_bytes) for p in last)
            return self._repeated(max(0.0, forward.busy_s - sum(spared)), recompute, stack)
        if stack.selective is Selective.CORE:
            core = sum(rates.attention_s(call, forward=True) for call in unit.work.attention)
            core += max(0.0, unit.activation_bytes - unit.selective_bytes) * 2 / rates.bandwidth
            return PassSeconds(min(core, forward.busy_s), ahead_s=self.backward.ahead_s)
        moved = max(0.0, unit.forward_moved_bytes - self.multiplied_bytes)
        return self._repeated(rates.moving_s(moved, unit.forward_cycles), recompute, stack)

    def _repeated(self, busy_s: float, recompute: Recompute, stack: Stack) -> PassSeconds:
        """Seconds of a forward again; the host's work hides behind the whole backward too."""
        rates, backward = self.rates, self.backward
        is_half = rates.device.kind != "cpu" and rates.operand_bytes < WIDE_BYTES
        share = self.python * (WITH_CASTS if is_half else 1.0)
        kernels = sum(self.kernels) + self.hooks
        kernels += share * checkpoint_launches(self.unit, recompute, stack)
        both = PassSeconds.of(rates, backward.busy_s + busy_s, kernels)
        own = PassSeconds.of(rates, busy_s, self.kernels[0])
        return PassSeconds(
            busy_s, max(both.launch_s - backward.launch_s, own.launch_s), both.ahead_s
        )


def _multiplying(unit: UnitLoad, rates: Rates, *, forward: bool) -> tuple[float, float]:
    """Seconds of all products and attention, and their bytes."""
    seconds = moved = known = 0.0
    for product in unit.work.products:
        flop = product.forward_flop if forward else product.backward_flop
        nbytes = product.forward_bytes if forward else product.backward_bytes
        seconds += rates.product_s(product, flop, nbytes)
        moved += nbytes
        known += flop * (product.kind is not ProductKind.ELEMENTWISE)
    for call in unit.work.attention:
        known += call.forward_flop if forward else call.backward_flop
        seconds += rates.attention_s(call, forward=forward)
        moved += call.forward_bytes if forward else call.backward_bytes
    # Products without a record: attention's scores and values, if captured.
    rest = (unit.forward_flop if forward else unit.backward_flop) - known
    if rest > 1e-6 * known:
        share = matmul_fraction(rates.device, rates.calibration)
        share *= product_efficiency(rates.device, rest / PRODUCTS_OF_ATTENTION, rates.peak)
        seconds += rest / (rates.peak * share)
    return seconds, moved


def _new_bytes(unit: UnitLoad, *, forward: bool) -> float:
    """Bytes that a processor maps anew for what a unit makes: outputs, or gradients of its inputs
    and parameters; of a loss the probabilities that it keeps, and their gradients."""
    of_loss = mapped(unit.activation_bytes) if unit.name == LOSS else 0.0
    if forward:
        return mapped(unit.output_bytes) + of_loss
    return unit.new_gradient_bytes + mapped(unit.input_bytes) + of_loss


def shard_launches(unit: UnitLoad) -> float:
    """Host work of FSDP2's hooks in a forward or a backward, in launches."""
    return unit.is_separate * (SHARD_UNIT + SHARD_TENSOR * unit.tensors)


def checkpoint_launches(unit: UnitLoad, recompute: Recompute, stack: Stack) -> float:
    """Host work of torch.utils.checkpoint beside the kernels it repeats, in launches."""
    if stack.compiled or stack.recomputes_whole:
        return 0.0
    launches = HOOKS * unit.backward_kernels
    return launches + MODES * unit.forward_kernels * (recompute is Recompute.SELECTIVE)
