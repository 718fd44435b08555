"""Precision where none was named: bf16 on accelerators that have units for it.

fp32 masters stay, so only forward and backward are rounded. A number for fp32 on such a device
answers a question that few people ask: products in bf16 are 2 to 16 times as fast there. fp16,
where a device has no bf16, is asked for: it has a small range, and some steps are left out.
"""

from __future__ import annotations

from advisor.inputs.facts import Facts
from engines.plan import Precision
from profiles.machine.cluster import Device
from profiles.model.profile import ModelProfile, Numerics
from profiles.units import format_flop_rate

MIXED = (Numerics.BF16, Numerics.BF16_AUTOCAST)
"""Kinds of numerics that a model built in fp32 needs a profile of, to be planned in 16 bits."""

AUTO = "auto"
"""Asks for the precision of 16 bits that the device has units for, be it fp16."""

REDUCED = (Precision.BF16, Precision.FP16)
"""The first is preferred: it has the range of fp32, the second needs a loss scale."""

NARROW = (*REDUCED, Precision.FP8)
"""All that compute in 16 bits, or fewer, on parameters of fp32."""


def reduced_precision(device: Device) -> Precision | None:
    """Return the precision of 16 bits whose matrix products are faster than float32 on this
    accelerator; None without one.

    A GPU that emulates bfloat16 (V100, T4) has no rate of it in the catalogue, and a measured rate
    is not above float32's. CPUs are excluded: few are faster in it.
    """
    plain = device.flop_per_s.get("float32")
    if device.kind == "cpu" or plain is None:
        return None
    rates = ((each, device.flop_per_s.get(each.dtype)) for each in REDUCED)
    return next((each for each, rate in rates if rate and rate.value > plain.value), None)


def default_precision(
    model: ModelProfile, device: Device | None, *, asked: str | None = None
) -> Precision | None:
    """Return the precision of 16 bits that the device has units for, fp16 if `AUTO` was asked for
    only, and if the profile supports it; else (and without a device) the model's own; None if no
    precision matches."""
    faster = reduced_precision(device) if device is not None else None
    if faster is Precision.FP16 and asked != AUTO:
        faster = None
    # `Facts` refuses a profile without units, in words.
    if model.units and model.dtype == "float32" and set(MIXED) <= set(model.numerics):
        return faster or Precision.FP32
    return next((p for p in Precision if p.dtype == model.dtype), None)


def hint(facts: Facts) -> str | None:
    """Hint that 16 bits would be faster, if an fp32 model runs as built by default."""
    device = facts.cluster.device
    faster, is_silent = reduced_precision(device), "precision" not in facts.workload.given
    if not is_silent or facts.workload.precision != "fp32" or faster is None:
        return None
    rate, plain = (
        format_flop_rate(device.flop_per_s[dtype].value) for dtype in (faster.dtype, "float32")
    )
    scaled = ", and scales the loss" * (faster is Precision.FP16)
    return (
        f"planned in fp32, as the model is built; {device.name} does {rate} in {faster} and {plain}"
        f' in fp32: `precision="{faster}"` (`--precision {faster}`) keeps fp32 masters{scaled}'
    )
