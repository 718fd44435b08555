"""Exposed copies between devices of a manually placed module.

One process runs the parts in sequence. Inputs of the next part leave the previous device, and their
gradients return in the backward. With n copies of B bytes in total, over a link with latency a and
b seconds a byte, a microbatch waits n a + B b in the forward, and the same for the gradients. No
compute overlaps.
"""

from __future__ import annotations

from advisor.cost.ledger import Ledger
from engines.plan import Plan
from profiles.model.crossings import DeviceCrossing
from profiles.model.profile import ModelProfile, Numerics


def crossed_s(plan: Plan, model: ModelProfile, numerics: Numerics, ledger: Ledger) -> float:
    """Seconds of a step spent on copies between the devices of a rank."""
    return sum(_crossed_s(plan, each, ledger) for each in model.crossings.get(numerics, ()))


def _crossed_s(plan: Plan, crossing: DeviceCrossing, ledger: Ledger) -> float:
    assert plan.microbatch_size is not None
    transfers = (
        ("activations", crossing.bytes, crossing.copies),
        ("gradients", crossing.back_bytes, crossing.back_copies),
    )
    through_host = "cpu" in (crossing.source, crossing.target)
    seconds = 0.0
    for what, size, copies in transfers:
        if not copies:
            continue
        each_bytes, count = size.at(plan.microbatch_size) / copies, copies * plan.forwards
        if through_host:
            seconds += count * ledger.to_host(each_bytes, count=count)
        else:
            seconds += count * ledger.between_parts(f"{what} of parts", each_bytes, count=count)
    return seconds
