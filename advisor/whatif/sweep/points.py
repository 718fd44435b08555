"""A sweep: the same facts with one quantity at several values, and the plan taken at each.

A pure function of facts, settings and values; what is measured beside it comes from
`advisor.auto.measure`.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from enum import StrEnum
from math import prod
from typing import Self

from pydantic import NonNegativeFloat, PositiveInt

from advisor.cost import Estimate
from advisor.decide.decide import decide
from advisor.inputs.changed_facts import Lever, shown, value, varied
from advisor.inputs.facts import Facts
from advisor.inputs.policy import Policy
from advisor.inputs.resize import on
from advisor.inputs.stacks import stack_of, with_stack
from engines.plan import AXES, PartialPlan, Plan, read_settings
from profiles.errors import InputError
from profiles.provenance import Timing
from profiles.record import Record
from profiles.record.bounds import MOST_BATCH, MOST_DEVICES, whole_number
from profiles.units import format_bandwidth, parse_bandwidth

_DEFAULT = Policy()


class Swept(StrEnum):
    """Quantity of a sweep."""

    SPLIT_SIZE = "split size"  # samples of a microbatch, as PyTorch's tutorial calls it
    MICROBATCHES = "microbatches"
    BANDWIDTH = "bandwidth"  # of the links between nodes; inside the node where there is one
    DEVICES = "devices"
    BATCH = "global batch"
    STACK = "stack"  # software against software: bars
    PLAN = "plan"  # settings against settings: bars, not a curve

    @property
    def is_number(self) -> bool:
        return self not in (Swept.PLAN, Swept.STACK)


class Point(Record):
    """One value of a sweep.

    Attributes:
        label: the value as it is shown; `value` as a number, in base units, None for settings.
        plan: what was taken there; the smallest one where nothing fits.
        devices: that it runs on.
        step_s, low_s, high_s: predicted seconds of an optimizer step, with their range.
        peak_high_bytes: upper end of the fullest device's predicted peak.
        fits: whether that is usable.
        measured: seconds of a step, where the plan was run: median, 10th and 90th percentile.
    """

    label: str
    value: float | None = None
    plan: Plan
    devices: PositiveInt
    step_s: NonNegativeFloat
    low_s: NonNegativeFloat
    high_s: NonNegativeFloat
    peak_high_bytes: NonNegativeFloat
    fits: bool
    measured: Timing | None = None

    @classmethod
    def of(
        cls,
        case: SweepCase,
        plan: Plan,
        estimate: Estimate,
        *,
        fits: bool,
        measured: Timing | None = None,
    ) -> Self:
        """The point of a plan that was taken."""
        return cls(
            label=case.label,
            value=case.value,
            plan=plan,
            devices=plan.world_size,
            step_s=estimate.step_s,
            low_s=estimate.step_low_s,
            high_s=estimate.step_high_s,
            peak_high_bytes=estimate.peak_high_bytes,
            fits=fits,
            measured=measured,
        )


class Sweep(Record):
    """All points of one quantity, in the requested order.

    >>> Sweep(model="gpt", cluster="here", swept="devices", global_batch_size=8, points=()).best
    """

    model: str
    cluster: str
    swept: Swept
    global_batch_size: PositiveInt
    points: tuple[Point, ...]

    @property
    def best(self) -> Point | None:
        """Fastest point that fits; per sample in a sweep over batches."""
        return min((p for p in self.points if p.fits), key=self.seconds, default=None)

    @property
    def is_measured(self) -> bool:
        """Return True if all points that fit were run."""
        return all(point.measured for point in self.points if point.fits)

    def seconds(self, point: Point) -> float:
        """Seconds to compare points by: per step, or per sample in a sweep over batches."""
        timed = self.is_measured and point.measured
        seconds = timed.median_s if timed else point.step_s
        return seconds / point.value if self.swept is Swept.BATCH and point.value else seconds


def sweep(
    facts: Facts,
    swept: Swept,
    values: Sequence[str],
    *,
    settings: PartialPlan,
    policy: Policy = _DEFAULT,
) -> Sweep:
    """Predict the step of the plan chosen at each value.

    Settings that `settings` leaves open are decided at each value, so a curve may change from one
    kind of plan to another; settings that name all degrees prevent that. `Swept.PLAN` has its
    settings as values, and each uses as many devices as its degrees multiply to.

    Args:
        values: as they are written: "12", "25 Gbit/s", "pp=2 schedule=naive", "torchtitan".
        settings: fixed at every value.

    Raises:
        InputError: a value that is no such quantity, or there is nothing of its kind to vary.
        PlanError: a value that allows no legal plan, as a split that does not divide the batch.
    """
    points = tuple(_point(case, policy) for case in cases(facts, swept, values, settings=settings))
    return sweep_of(facts, swept, points)


def sweep_of(facts: Facts, swept: Swept, points: tuple[Point, ...]) -> Sweep:
    """Return `points` with the sweep's metadata."""
    return Sweep(
        model=facts.model.name,
        cluster=facts.cluster.name,
        swept=swept,
        global_batch_size=facts.workload.global_batch_size,
        points=points,
    )


class SweepCase(Record):
    """Facts and settings of one value."""

    label: str
    value: float | None
    facts: Facts
    settings: PartialPlan


def cases(
    facts: Facts, swept: Swept, values: Sequence[str], *, settings: PartialPlan
) -> Iterator[SweepCase]:
    """Yield facts and settings of each value; raises as `sweep`."""
    for text in values:
        there, partial, label = facts, settings, text
        if swept is Swept.PLAN:
            partial = partial.fixing(**read_settings(text).fixed)
            there = on(facts, _devices(partial, facts))
            yield SweepCase(label=label, value=None, facts=there, settings=partial)
            continue
        if swept is Swept.STACK:
            stack = stack_of(text)
            partial, there = with_stack(partial, stack), facts.rebuilt(stack=stack)
            yield SweepCase(label=label, value=None, facts=there, settings=partial)
            continue
        number = _number(text, swept)
        match swept:
            case Swept.SPLIT_SIZE | Swept.MICROBATCHES:
                name = "microbatch_size" if swept is Swept.SPLIT_SIZE else "microbatches"
                partial = partial.fixing(**{name: round(number)})
                if (partial.pp or 1) > 1 and partial.accumulation is None:
                    # One round: what is split is the batch, as in the tutorial.
                    partial = partial.fixing(accumulation=1)
            case Swept.BANDWIDTH:
                there, label = varied(facts, _link(facts), number), format_bandwidth(number)
            case Swept.DEVICES:
                there = on(facts, round(number))
            case Swept.BATCH:
                there = varied(facts, Lever.BATCH, number)
        yield SweepCase(label=label, value=number, facts=there, settings=partial)


def _point(case: SweepCase, policy: Policy) -> Point:
    choice = decide(case.facts, policy=policy, partial=case.settings)
    taken = choice.winner or min(
        choice.weighed, key=lambda candidate: candidate.estimate.peak_high_bytes
    )
    return Point.of(case, taken.plan, taken.estimate, fits=choice.winner is not None)


def _number(text: str, swept: Swept) -> float:
    """Parse a value to base units."""
    if swept is Swept.BANDWIDTH:
        return parse_bandwidth(text, where="--bandwidth")
    most = MOST_DEVICES if swept is Swept.DEVICES else MOST_BATCH
    try:
        return whole_number(text, swept.value, most=most)
    except InputError as error:
        error.hints = ("write 1 or more: `1,2,4`",)
        raise


def _link(facts: Facts) -> Lever:
    cluster = facts.cluster
    if not (cluster.inter or cluster.intra or cluster.link_in_rank):
        raise InputError(
            f"{cluster.name} is one device, and has no links to vary",
            hints=["name two devices or more, as `2xV100-PCIe-32GB`"],
        )
    return Lever.LINKS_BETWEEN_NODES if cluster.inter else Lever.LINKS_IN_NODE


def _devices(settings: PartialPlan, facts: Facts) -> int:
    """As many as the degrees that are named multiply to; all of them where none is."""
    named = settings.only(*AXES).fixed.values()
    return prod(named) if named else facts.cluster.world_size


def shown_link(facts: Facts) -> str:
    """Link that a sweep over bandwidth varies, with its current bandwidth."""
    lever = _link(facts)
    return f"{lever}, now {shown(lever, value(facts, lever))}"
