"""Borders between pipeline stages: bytes sent and receive buffers."""

from __future__ import annotations

from collections.abc import Container, Sequence
from dataclasses import dataclass

from advisor.cost.context import CostContext
from advisor.cost.ledger import Ledger
from engines.plan import Plan
from profiles.machine.cluster import Collective
from profiles.workload.stack import Stack


@dataclass(frozen=True, slots=True)
class Border:
    """Bytes of one microbatch across a border in the forward and in the backward, and the seconds
    of the larger transfer."""

    activation_bytes: float
    gradient_bytes: float
    seconds: float


def sent_samples(plan: Plan, stack: Stack) -> float:
    """Samples of a microbatch that a rank sends to the next stage.

    In stacks that scatter what is sent, each tp rank sends its part (arXiv:2104.04473, section
    4.1).
    """
    assert plan.microbatch_size is not None
    scattered = plan.tp if stack.sequence_parallel or stack.states else 1
    return plan.microbatch_size / plan.cp / scattered


def borders_of(model: CostContext, plan: Plan, ends: Sequence[int]) -> list[Border]:
    assert plan.microbatch_size is not None
    kind = model.numerics(plan)
    ledger, stride = model.ledger(), plan.world_size // plan.pp
    samples = sent_samples(plan, model.stack)
    borders = []
    for place in ends[1:-1]:
        activations, gradients = model.stages.crossing(
            place, numerics=kind, samples=samples, shares=model.shares(plan)
        )
        seconds = ledger.charge(
            Collective.SEND_RECV, "", max(activations, gradients), group_size=2, stride=stride
        )
        borders.append(Border(activations, gradients, seconds))
    return borders


def sent_over(borders: Sequence[Border], stage: int) -> float:
    """Bytes of a microbatch sent after a stage; 0 for the last one and for -1."""
    return borders[stage].activation_bytes if 0 <= stage < len(borders) else 0.0


def retained_over(
    model: CostContext, plan: Plan, borders: Sequence[Border], stage: int, places: tuple[int, int]
) -> tuple[float, float]:
    """Bytes of a microbatch received into and sent from a stage of units `places`, which
    `between_bytes` takes: of torch's stages `StageBorders.retained`, of others all that cross."""
    if model.stack.states is not None:
        return sent_over(borders, stage - 1), sent_over(borders, stage)
    return model.stages.retained(
        *places,
        numerics=model.numerics(plan),
        samples=sent_samples(plan, model.stack),
        shares=model.shares(plan),
    )


def received_into(borders: Sequence[Border], stage: int, *, splits: Container[int]) -> float:
    """Bytes of receive buffers per microbatch: torch's stages allocate a tensor for each receive,
    for every microbatch of a round, for as long as the stage lives (`_RecvInfo` in
    torch/distributed/pipelining/stage.py). If backwards are split, gradients of the received
    tensors stay until the round ends (`stage_backward_input`)."""
    received = sent_over(borders, stage - 1)
    returned = borders[stage].gradient_bytes if stage < len(borders) else 0.0
    return received + returned + (borders[stage - 1].gradient_bytes if stage in splits else 0.0)


def charge_sends(plan: Plan, own: Sequence[int], borders: Sequence[Border], ledger: Ledger) -> None:
    """Charge the sends of the rank's stages: activations to the next, gradients to the previous.
    Under ZBV the last rank passes between its two stages without sending."""
    stride = plan.world_size // plan.pp
    for stage in own:
        sends = {
            "activations": (
                stage + 1,
                borders[stage].activation_bytes if stage < len(borders) else 0.0,
            ),
            "gradients of activations": (
                stage - 1,
                borders[stage - 1].gradient_bytes if stage else 0.0,
            ),
        }
        for purpose, (to, payload) in sends.items():
            if to not in own:
                ledger.charge(
                    Collective.SEND_RECV,
                    purpose,
                    payload,
                    group_size=2,
                    stride=stride,
                    count=plan.forwards,
                )
