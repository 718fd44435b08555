"""Seconds of a step, taken apart.

A step is `accumulation` microbatches through the fullest stage, the bubble of filling and draining
the pipeline, what data-parallel traffic adds that computing does not hide, and the update:

    product    flop / (peak * best share * share in a step)
    attention  flop at its own rate, or products and passes over scores where those are kept
    exchange   `advisor.cost.collective` over the rate that collectives reach inside a step
    host       a layer takes no less than launching its kernels

What does not depend on the fitted constants is in `basis` and `passes`.
"""

from __future__ import annotations

from dataclasses import dataclass

from advisor.predict.basis import Basis, basis_of
from advisor.predict.constants import CONSTANTS, Constants
from advisor.predict.passes import Pass
from advisor.predict.setup import Setup


@dataclass(frozen=True, slots=True, kw_only=True)
class StepTime:
    """Seconds of a step by what they go into; they add up to `step_s`."""

    compute_s: float
    recompute_s: float
    tensor_s: float
    experts_s: float
    bubble_s: float
    data_s: float
    update_s: float
    host_s: float

    @property
    def step_s(self) -> float:
        busy = self.compute_s + self.recompute_s + self.tensor_s + self.experts_s
        return busy + self.bubble_s + self.data_s + self.update_s + self.host_s


def time_of(setup: Setup, constants: Constants = CONSTANTS) -> StepTime:
    """Seconds of a transformer's step."""
    return step_time(basis_of(setup), constants)


def step_time(basis: Basis, constants: Constants) -> StepTime:
    """A step from its basis: the formulas of this module."""
    launch_s = constants.launch_s * basis.host_slowness
    layers = _parts(basis.forward + basis.backward, basis, constants)
    again = _parts(basis.again, basis, constants)
    head = _parts(basis.head, basis, constants)
    whole = sum(layers) + sum(again) + sum(head)
    fullest = (sum(layers) + sum(again)) * basis.slowest
    bottleneck = max(fullest, (sum(layers) + sum(again)) * basis.last + sum(head))
    if basis.stages == 1:
        bottleneck = whole
    m = basis.accumulation
    share = m * bottleneck / whole
    bubble = (whole - bottleneck) / basis.virtual
    boundary = basis.boundary_s / _of(constants, basis.boundary_rate)
    visible = 1 - constants.overlap if basis.overlap_boundary else 1.0
    bubble += (2 * m * basis.virtual * visible + 2 * (basis.stages - 1)) * boundary
    bubble += 2 * m * basis.waits * launch_s
    data = _data_s(basis, constants, whole / basis.stages)
    return StepTime(
        compute_s=(layers[0] + head[0]) * share,
        recompute_s=again[0] * share,
        tensor_s=(layers[1] + again[1] + head[1]) * share,
        experts_s=(layers[2] + again[2]) * share,
        bubble_s=bubble,
        data_s=data,
        update_s=basis.update_s,
        host_s=(layers[3] + again[3] + head[3]) * share + basis.once * launch_s,
    )


def _parts(part: Pass, basis: Basis, c: Constants) -> tuple[float, float, float, float]:
    """Seconds of computing, tensor and context exchange, tokens, and waiting for the host."""
    share = (c.limited if basis.limited else c.sustained) * basis.power
    compute = (part.plain_s + part.unaligned_s / c.unaligned) / share
    compute += part.expert_s / (share * (1.0 if basis.fused_experts else c.expert))
    compute += part.flash_s / (share * c.flash)
    compute += (part.memory_s + part.scan_s * c.scan_bytes) / c.memory
    hidden = c.overlap if basis.overlap_tensor else 0.0
    tensor = part.tensor_s * (1 - hidden) / _of(c, basis.tensor_rate)
    tensor += part.context_s * (1 - c.overlap) / c.inside
    tokens = part.tokens_s
    launch = part.kernels * c.launch_s * basis.host_slowness
    busy = 0.0 if basis.blocking else compute + tensor + tokens
    return compute, tensor, tokens, max(0.0, launch - busy)


def _data_s(basis: Basis, c: Constants, microbatch_s: float) -> float:
    """What the exchange of gradients and weights adds to a step."""
    rate = _of(c, basis.data_rate)
    reduce, gather = basis.reduce_s / rate, basis.gather_s / rate
    if basis.zero == 3 and basis.stages == 1:
        # Weights come twice and gradients leave once in each microbatch, beside the computing.
        traffic = 2 * gather + reduce
        hidden = min(c.overlap * traffic, microbatch_s) if basis.overlap_gather else 0.0
        return (traffic - hidden) * basis.accumulation + basis.once_s / rate
    # In a pipeline weights stay whole from their first microbatch to their last (torchtitan's
    # reshard_after_forward, "default"), so that they come and their gradients leave once.
    part = 1.0 if basis.buckets else c.overlap
    if basis.overlap_reduce:
        reduce -= min(part * reduce, microbatch_s * 2 / 3)
    if basis.zero == 2 and basis.stages == 1:
        # Gradients that are split cannot be added up first: they leave in each microbatch.
        reduce *= basis.accumulation
    if basis.overlap_gather:
        gather -= min(part * gather, microbatch_s / 3)
    return reduce + gather + basis.once_s / rate


def _of(constants: Constants, name: str) -> float:
    return float(getattr(constants, name))
