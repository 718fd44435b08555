"""Convert rows of vision networks to inputs of `advisor.cost`: profile, stack and plan fields."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import pairwise
from typing import Any

from advisor.cost.compute.unit_times import unit_times
from advisor.cost.load.loads import loads_of
from advisor.cost.stages.complete import even_cuts
from advisor.predict.setup import Setup
from engines.plan import Precision, Recompute, Schedule
from profiles.closed_forms.convnets.costs import HALF
from profiles.closed_forms.convnets.layers import Convnet
from profiles.closed_forms.convnets.profile import profile_of
from profiles.errors import InputError
from profiles.machine import catalogue
from profiles.machine.cluster import Device
from profiles.model.affine import Affine
from profiles.model.profile import ModelProfile, Numerics, UnitProfile
from profiles.model.work import FusibleKind
from profiles.workload.optimizer_states import FP32_BYTES
from profiles.workload.optimizers import OPTIMIZERS
from profiles.workload.stack import Stack
from profiles.workload.under_stack import under_stack

_HALF = ("float16", "bfloat16")
# Reserved over allocated memory: activations differ from block to block, so freed blocks may not
# fit later requests. Half of the largest overhead in replays of ResNet-50's step
# (`advisor.cost.estimates.rank_step`): 1.01 to 1.37 times the allocation, by device, batch and
# number of devices.
IMAGES_SLACK = 0.18
# Images per timed block when stages are cut (torchgpipe's balance_by_time takes a sample).
TIMED_SAMPLES = 16


@dataclass(frozen=True, slots=True)
class NetworkCase:
    """Inputs to estimate a row of a vision network.

    Attributes:
        plan: fields of `engines.plan.Plan`, whole but for `stages`.
        notes: on what the products run in, in words.
    """

    model: ModelProfile
    stack: Stack
    plan: dict[str, Any]
    notes: tuple[str, ...]


def network_case(setup: Setup, *, by_memory: bool = False) -> NetworkCase:
    """Convert a setup with a network.

    Args:
        by_memory: stages are cut so that the fullest takes the least; else so that the slowest
            takes the least, as torchgpipe's profile proposes.

    Raises:
        InputError: it is of a transformer.
    """
    if setup.network is None:
        raise InputError(f"{setup.row_id} is no network on images")
    layout, software = setup.layout, setup.software
    product_dtype, note = _product_dtype(setup.cluster.device, setup.dtype)
    stack = _stack(setup, product_dtype)
    is_half = setup.dtype in _HALF
    plan: dict[str, Any] = {
        "pp": layout.pp,
        "dp_replicate": layout.dp,
        "microbatch_size": layout.microbatch,
        "precision": Precision.BF16 if is_half else Precision.FP32,
        "recompute": Recompute.FULL if software.recompute == "full" else Recompute.NONE,
    }
    model = _profile(setup.network, stack)
    ends: tuple[int, ...] = (0, len(model.units))
    if layout.pp > 1:
        ends = _stage_ends(setup, stack, by_memory=by_memory)
        plan |= {
            "schedule": Schedule.GPIPE,
            "microbatches": layout.accumulation,
            "stages": tuple(model.units[end].name for end in ends[1:-1]),
        }
    else:
        plan["accumulation"] = layout.accumulation
    if plan["recompute"] is Recompute.FULL:
        model = _with_stage_recompute(setup.network, stack, ends)
    return NetworkCase(
        model=model,
        stack=stack,
        plan=plan,
        notes=(note,) if note else (),
    )


@lru_cache(maxsize=256)
def _profile(network: Convnet, stack: Stack) -> ModelProfile:
    profile = profile_of(network, samples=1).model_copy(update={"has_loss": True})
    return under_stack(profile, stack)


def _stage_ends(setup: Setup, stack: Stack, *, by_memory: bool) -> tuple[int, ...]:
    """Return stage boundaries among the blocks: 0, ..., number of blocks."""
    network, layout = setup.network, setup.layout
    assert network is not None
    is_half = setup.dtype in _HALF
    if not by_memory:
        return _even_in_time(network, stack, setup.cluster.device.name, layout.pp, is_half=is_half)
    each = layout.microbatch * (HALF if is_half else FP32_BYTES)
    states = 2 * FP32_BYTES + OPTIMIZERS[setup.optimizer].state_bytes_per_element
    block_bytes = [states * block.parameters + each * block.saved for block in network.blocks]
    return _even(block_bytes, layout.pp)


@lru_cache(maxsize=256)
def _even_in_time(
    network: Convnet, stack: Stack, device: str, stages: int, *, is_half: bool
) -> tuple[int, ...]:
    assert stack.product_dtype is not None
    loads = loads_of(
        _profile(network, stack),
        numerics=Numerics.BF16_AUTOCAST if is_half else Numerics.AS_BUILT,
        samples=TIMED_SAMPLES,
    )
    times = unit_times(
        loads,
        recompute=Recompute.NONE,
        device=catalogue.accelerator(device),
        dtype=stack.product_dtype,
        stack=stack,
    )
    seconds = [time.forward_s + time.backward_s for time in times for _ in range(time.count)]
    return _even(seconds, stages)


def _even(costs: Sequence[float], stages: int) -> tuple[int, ...]:
    count = len(costs)
    return (0, *even_cuts(costs, range(1, count), stages), count)


@lru_cache(maxsize=256)
def _with_stage_recompute(network: Convnet, stack: Stack, ends: tuple[int, ...]) -> ModelProfile:
    """Return the profile of a network whose stages torchgpipe recomputes as a whole.

    Only a stage's input is saved. After its forward is recomputed, activations of all its blocks
    are live together: a block's backward runs next to those of the blocks before it.
    """
    profile = _profile(network, stack)
    units: list[UnitProfile] = []
    for first, last in pairwise(ends):
        before: dict[Numerics, float] = dict.fromkeys(Numerics, 0.0)
        for unit in profile.units[first:last]:
            costs = {}
            for kind, cost in unit.costs.items():
                live_bytes, activation_bytes = before[kind], cost.activation_bytes.per_sample
                costs[kind] = cost.model_copy(
                    update={
                        "input_bytes": cost.input_bytes if not live_bytes else Affine(),
                        "backward_transient_bytes": cost.backward_transient_bytes
                        + Affine(per_sample=live_bytes),
                    }
                )
                before[kind] += activation_bytes
            units.append(unit.model_copy(update={"costs": costs}))
    return profile.model_copy(update={"units": tuple(units)})


def _product_dtype(device: Device, dtype: str) -> tuple[str, str]:
    """Return the dtype of matrix products, and a note if it is not the row's.

    Where a device is slower in 16 bits than in fp32 (consumer cards of 2016), libraries compute in
    fp32 and store in 16 bits; TF32 units that are no faster than the plain ones are left alone.
    """
    plain = device.flop_per_s["float32"].value
    rate = device.flop_per_s.get(dtype)
    if dtype == "float32" or (rate is not None and rate.value > plain):
        return dtype, ""
    return "float32", f"products in fp32: {dtype} is no faster on {device.name}"


def _stack(setup: Setup, product_dtype: str) -> Stack:
    """Return the software's stack with the device's product dtype."""
    stack = setup.software.stack
    fused = list(stack.fused)
    if product_dtype == "float32" and FusibleKind.LAYOUT not in fused:
        fused.append(FusibleKind.LAYOUT)  # vision kernels accept any memory layout
    slack = IMAGES_SLACK if stack.allocator_slack is None else stack.allocator_slack
    return stack.model_copy(
        update={
            "name": f"{stack.name} on images in {product_dtype}",
            "fused": tuple(fused),
            "product_dtype": product_dtype,
            "allocator_slack": slack,
        }
    )
