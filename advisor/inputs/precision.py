"""Precision where none was named: bf16 on accelerators that have units for it.

fp32 masters stay, so only forward and backward are rounded. A number for fp32 on such a device
answers a question that few people ask: products in bf16 are 2 to 16 times as fast there.
"""

from __future__ import annotations

from advisor.inputs.facts import Facts
from engines.plan import Precision
from profiles.machine.cluster import Device
from profiles.model.profile import ModelProfile, Numerics
from profiles.units import format_flop_rate

MIXED = (Numerics.BF16, Numerics.BF16_AUTOCAST)
"""Kinds of numerics that a model built in fp32 needs a profile of, to be planned in bf16."""


def has_bf16_units(device: Device) -> bool:
    """Return True if bfloat16 matrix products are faster than float32 on this accelerator.

    A GPU that emulates bfloat16 (V100, T4) has no rate of it in the catalogue, and a measured rate
    is not above float32's. CPUs are excluded: few are faster in it.
    """
    reduced, plain = (device.flop_per_s.get(name) for name in ("bfloat16", "float32"))
    if device.kind == "cpu" or reduced is None or plain is None:
        return False
    return reduced.value > plain.value


def default_precision(model: ModelProfile, device: Device | None) -> Precision | None:
    """Return bf16 if the device has units for it and the profile supports it, else (and without a
    device) the model's own precision; None if no precision matches."""
    is_faster = device is not None and has_bf16_units(device)
    # `Facts` refuses a profile without units, in words.
    if model.units and is_faster and model.dtype == "float32" and set(MIXED) <= set(model.numerics):
        return Precision.BF16
    return next((p for p in Precision if p.dtype == model.dtype), None)


def hint(facts: Facts) -> str | None:
    """Hint that bf16 would be faster, if an fp32 model runs as built by default."""
    device = facts.cluster.device
    is_silent = "precision" not in facts.workload.given
    if not is_silent or facts.workload.precision != "fp32" or not has_bf16_units(device):
        return None
    rates = (format_flop_rate(device.flop_per_s[name].value) for name in ("bfloat16", "float32"))
    return (
        "planned in fp32, as the model is built; {} does {} in bf16 and {} in fp32:"
        ' `precision="bf16"` (`--precision bf16`) keeps fp32 masters'
    ).format(device.name, *rates)
