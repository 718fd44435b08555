"""Borders between pipeline stages: bytes sent and receive buffers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

from advisor.cost.context import CostContext
from advisor.cost.ledger import Ledger
from advisor.cost.stages.orders import rank_of
from engines.plan import Plan, Schedule
from profiles.machine.cluster import ClusterProfile, Collective
from profiles.workload.stack import Stack


@dataclass(frozen=True, slots=True)
class Border:
    """Bytes of one microbatch across a border in the forward and in the backward, and the seconds
    of the larger transfer. `group_size`: as a send over it is charged, see `charged_group`."""

    activation_bytes: float
    gradient_bytes: float
    seconds: float
    group_size: int


def sent_samples(plan: Plan, stack: Stack) -> float:
    """Samples of a microbatch that a rank sends to the next stage.

    In stacks that scatter what is sent, each tp rank sends its part (arXiv:2104.04473, section
    4.1).
    """
    assert plan.microbatch_size is not None
    scattered = plan.tp if stack.sequence_parallel or stack.states else 1
    return plan.microbatch_size / plan.cp / scattered


def charged_group(cluster: ClusterProfile, pp: int, source: int, target: int) -> int:
    """Size of the group, `world_size / pp` ranks apart, that a send between two positions of the pp
    axis is charged as.

    Two ranks, one from the other. Where a node has several positions, most of its sends stay inside
    and are two neighbors'; one that leaves it shares the node's cards with those of the other
    pipelines alone, as the whole axis does.
    """
    stride, domain = cluster.world_size // pp, cluster.domain_devices
    ends = (source * stride // domain, ((source + 1) * stride - 1) // domain)
    others = (target * stride // domain, ((target + 1) * stride - 1) // domain)
    return pp if stride < domain and ends != others else 2


def charged_groups(
    cluster: ClusterProfile, schedule: Schedule | None, *, ranks: int, stages: int
) -> list[int]:
    """`charged_group` of each border, in model order."""
    assert schedule is not None
    places = [rank_of(schedule, stage, ranks=ranks, stages=stages) for stage in range(stages)]
    return [charged_group(cluster, ranks, *hop) for hop in pairwise(places)]


def borders_of(model: CostContext, plan: Plan, ends: Sequence[int]) -> list[Border]:
    assert plan.microbatch_size is not None
    kind = model.numerics(plan)
    ledger, stride = model.ledger(), plan.world_size // plan.pp
    samples, cluster = sent_samples(plan, model.stack), model.facts.cluster
    groups = charged_groups(cluster, plan.schedule, ranks=plan.pp, stages=len(ends) - 1)
    shares = model.shares(plan)
    borders: list[Border] = []
    alike: dict[tuple[float, float, int], Border] = {}
    for place, group_size in zip(ends[1:-1], groups, strict=True):
        activations, gradients = model.stages.crossing(
            place, numerics=kind, samples=samples, shares=shares
        )
        key = activations, gradients, group_size
        if key not in alike:
            seconds = ledger.charge(
                Collective.SEND_RECV,
                "",
                max(activations, gradients),
                group_size=group_size,
                stride=stride,
            )
            alike[key] = Border(activations, gradients, seconds, group_size)
        borders.append(alike[key])
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


def received_into(borders: Sequence[Border], stage: int) -> tuple[float, float]:
    """Bytes of the activations and of the gradients that a stage receives of a microbatch: our
    stages have buffers of them from the message to the end of the backward."""
    returned = borders[stage].gradient_bytes if stage < len(borders) else 0.0
    return sent_over(borders, stage - 1), returned


def charge_sends(plan: Plan, own: Sequence[int], borders: Sequence[Border], ledger: Ledger) -> None:
    """Charge the sends of the rank's stages: activations to the next, gradients to the previous.
    Under ZBV the last rank passes between its two stages without sending."""
    stride = plan.world_size // plan.pp
    for stage in own:
        sends = []
        if stage < len(borders):
            after = borders[stage]
            sends.append((stage + 1, "activations", after.activation_bytes, after.group_size))
        if stage:
            before = borders[stage - 1]
            sends.append(
                (stage - 1, "gradients of activations", before.gradient_bytes, before.group_size)
            )
        for to, purpose, payload, group_size in sends:
            if to not in own:
                ledger.charge(
                    Collective.SEND_RECV,
                    purpose,
                    payload,
                    group_size=group_size,
                    stride=stride,
                    count=plan.forwards,
                )
