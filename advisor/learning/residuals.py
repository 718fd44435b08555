"""Compute an anchor from measured steps: the corrections that explain them, term by term."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from datetime import UTC, datetime
from math import copysign, exp, hypot, log

from advisor.cost import CostModel, Estimate, Time, estimate
from advisor.cost.anchored import update_error
from advisor.cost.communication.exchange import COMMUNICATION_ERROR
from advisor.cost.compute.unit_times import COMPUTE_ERROR
from advisor.cost.estimates.process_memory import ProcessMemory, process_memory
from advisor.inputs.facts import Facts
from advisor.learning.anchor import (
    LEFT,
    Anchor,
    Links,
    Term,
    TermResidual,
    kind_of,
    on_cluster,
    with_constants,
)
from advisor.learning.constants import COMPUTING, WIDEST_ERROR, slowed, tier_of, unit_times
from engines.plan import Plan
from profiles.machine.cluster import Anchored, ClusterProfile, Constant, Learned
from profiles.provenance import Timing
from profiles.timing.runs import Machine

# Links are told from the rest where they take this share of the step, as `learning.TOLD_SHARE`.
LEAST_SHARE = 0.1
# Factors of links and activations lie between these: beyond them something else is wrong.
LEAST, MOST = 1 / 16, 16.0
ROUNDS = 24  # of halving: to a part in 10^6
# Peaks of two sizes differ by activations alone; a processor's resident set is known to some MiB.
LEAST_DIFFERENCE_BYTES = 16 * 2**20

_PRODUCTS = (Constant.PRODUCTS, Constant.ATTENTION)
NUDGE = 1e-3  # by which products are slowed to see what rests on them


@dataclass(frozen=True, slots=True)
class StepMeasurement:
    """One rank's measurements of one plan.

    Attributes:
        step: of all ranks; None where one rank was run without the others.
        alone: what this rank does itself in such a step, without waiting for others; None where
            that is not known. One that took longer than all ranks together was disturbed: those are
            the bound.
        update: the optimizer's part of either.
        products_share: of forward and backward in `alone`, matrix products and attention; None
            where they were not timed.
        links: of all ranks, timed beside the step; None where they were not.
        peak_bytes: everything that the process held, as `profiles.allocator.process_peak` says;
            None: unknown.
        allocated_bytes: tensors alone; 0 where the device has no allocator that counts.
        smaller: samples of a smaller microbatch, and the peak at them (`allocated_bytes` where it
            is counted); None where the microbatch is one sample.
    """

    step: Timing | None
    alone: Timing | None
    update: Timing
    peak_bytes: float | None = None
    allocated_bytes: float = 0.0
    smaller: tuple[int, float] | None = None
    products_share: float | None = None
    links: Links | None = None


def anchor_of(plan: Plan, facts: Facts, measured: StepMeasurement, machine: Machine) -> Anchor:
    """Compare the measurements with the estimate of `plan`, and solve for the corrections.

    Measured block times of the model are dropped: constants would not explain them.
    """
    facts = facts.model_copy(update={"model": facts.model.model_copy(update={"times": ()})})
    terms = terms_of(plan, facts, measured)
    if measured.links is not None:
        facts = on_cluster(facts, measured.links.on(facts.cluster))
    before = estimate(plan, facts)
    corrected = _Corrected(facts, plan)
    whole = measured.alone or measured.step
    assert whole is not None  # one of them was run
    knows_compute = measured.alone is not None
    every = COMPUTING if knows_compute else (*COMPUTING, *_tiers(before, facts.cluster))
    corrected.slow(every, 1.0)  # as measured ones, which a calibration leaves as they are
    update_s = measured.update.median_s
    whole_s = min(each.median_s for each in (measured.alone, measured.step) if each is not None)
    if knows_compute:
        _slow_products(corrected, measured.products_share, whole_s - update_s)
    then = corrected.estimate()
    predicted_s = busy_s(then) if knows_compute else then.step_s - then.time.optimizer_s
    corrected.slow_further(every, (whole_s - update_s) / predicted_s)
    then_s = corrected.estimate().time.optimizer_s
    if then_s and update_s:
        corrected.set(update=update_s / then_s)
    sending_error = None
    if measured.step is not None and (
        _waits(corrected, measured) or _slow_links(corrected, before, measured)
    ):
        sending_error = hypot(measured.step.relative_error, LEFT * COMMUNICATION_ERROR)
    computing_error = hypot(whole.relative_error, LEFT * COMPUTE_ERROR) if knows_compute else None
    corrected.set(
        compute_error=_narrow(computing_error),
        update_error=_narrow(hypot(measured.update.relative_error, LEFT * COMPUTE_ERROR)),
        communication_error=_narrow(sending_error),
    )
    missed_bytes = _fill_memory(corrected, measured)
    return Anchor(
        machine=machine,
        ranks=plan.world_size,
        is_one_rank=measured.step is None,
        model=facts.model.name,
        kind=kind_of(facts.model),
        dtype=facts.precision.dtype,
        stack=facts.stack.name,
        optimizer=facts.workload.optimizer.name,
        plan=str(plan),
        batch=plan.global_batch_size or facts.workload.global_batch_size,
        tokens=facts.tokens_per_sample,
        terms=terms,
        constants=corrected.constants,
        links=measured.links,
        corrections=corrected.step,
        context_missed_bytes=missed_bytes,
        measured_at=datetime.now(UTC).isoformat(timespec="seconds"),
    )


class _Corrected:
    """Facts that are corrected term by term, and their estimate."""

    def __init__(self, facts: Facts, plan: Plan) -> None:
        self.facts, self.plan = facts, plan
        self.step = Anchored(plan=str(plan))
        self.constants: dict[Constant, float] = {}
        self._units = unit_times(facts.cluster, facts.precision.dtype)

    def slow(self, constants: Iterable[Constant], factor: float) -> None:
        for constant in constants:
            if constant in self._units:
                self.constants[constant] = factor * self._units[constant]

    def slow_further(self, constants: Iterable[Constant], factor: float) -> None:
        for constant in constants:
            if constant in self.constants:
                self.constants[constant] *= factor

    def set(self, **changes: float | None) -> None:
        self.step = self.step.model_copy(update=changes)

    def estimate(
        self, *, links: tuple[Iterable[Constant], float] = ((), 1.0), rows: int | None = None
    ) -> Estimate:
        """Estimate the plan, with other links, or at another microbatch."""
        facts, plan = self._at(links=links, rows=rows)
        return estimate(plan, facts)

    def process_memory(self, *, rows: int | None = None) -> ProcessMemory:
        """Predict the memory of the process, or at another microbatch."""
        facts, plan = self._at(rows=rows)
        costs = CostModel(facts)
        return process_memory(costs, plan, costs.estimate(plan))

    def _at(
        self, *, links: tuple[Iterable[Constant], float] = ((), 1.0), rows: int | None = None
    ) -> tuple[Facts, Plan]:
        tiers, factor = links
        constants = self.constants | {tier: factor * self._units[tier] for tier in tiers}
        cluster = with_constants(self.facts.cluster, constants, self.facts.precision.dtype)
        learned = (cluster.learned or Learned()).model_copy(update={"anchored": self.step})
        facts = on_cluster(self.facts, cluster.model_copy(update={"learned": learned}))
        plan = self.plan if rows is None else self.plan.model_copy(update={"microbatch_size": rows})
        return facts, plan


def busy_s(estimate: Estimate) -> float:
    """Seconds of a rank's forward and backward."""
    return estimate.time.compute_s + estimate.time.recompute_s + estimate.time.launch_s


def products_s(plan: Plan, facts: Facts) -> float:
    """Seconds of matrix products and attention in these: the part that scales with their
    constants."""

    def computed_s(cluster: ClusterProfile) -> float:
        time = estimate(plan, on_cluster(facts, cluster)).time
        return time.compute_s + time.recompute_s

    nudged = slowed(facts.cluster, dict.fromkeys(_PRODUCTS, 1 + NUDGE))
    return (computed_s(nudged) - computed_s(facts.cluster)) / NUDGE


def _slow_products(corrected: _Corrected, share: float | None, whole_s: float) -> None:
    """Scale products, this share of compute, and the rest of it each by its own factor."""
    whole = busy_s(corrected.estimate())
    products = products_s(corrected.plan, corrected.facts)
    if share is None or not 0 < share < 1 or not 0 < products < whole:
        return
    others = [constant for constant in COMPUTING if constant not in _PRODUCTS]
    corrected.slow(_PRODUCTS, share * whole_s / products)
    corrected.slow(others, (1 - share) * whole_s / (whole - products))


def _tiers(estimate: Estimate, cluster: ClusterProfile) -> list[Constant]:
    """Links that a plan's collectives use; those between devices of a rank are excluded."""
    sent = {(item.group_size, item.stride) for item in estimate.traffic if item.stride > 0}
    return sorted({tier_of(cluster, size, stride) for size, stride in sent})


def _waits(corrected: _Corrected, measured: StepMeasurement) -> bool:
    """Attribute the part of a step beyond measured links to waiting; a shorter step means that
    links are faster in it."""
    if measured.links is None or measured.alone is None or measured.step is None:
        return False
    now = corrected.estimate()
    rest_s = measured.step.median_s - now.step_s
    if rest_s < 0:
        return False
    corrected.set(waiting=rest_s / busy_s(now))
    return True


def _slow_links(corrected: _Corrected, before: Estimate, measured: StepMeasurement) -> bool:
    """Scale links so that the predicted step matches the measured one outside its scatter; a
    smaller difference says nothing about links, which other plans may use far more."""
    tiers = _tiers(before, corrected.facts.cluster)
    if not tiers or measured.step is None or measured.alone is None:
        return False
    step_s, now_s = measured.step.median_s, corrected.estimate().step_s
    without_s = corrected.estimate(links=(tiers, LEAST)).step_s
    if max(step_s, now_s) - without_s < LEAST_SHARE * step_s:
        return False
    doubt_s = step_s * hypot(measured.step.relative_error, measured.alone.relative_error)
    if abs(now_s - step_s) <= doubt_s:
        return False
    wanted_s = step_s + copysign(doubt_s, now_s - step_s)
    factor = _solved(lambda x: corrected.estimate(links=(tiers, x)).step_s, wanted_s)
    corrected.slow(tiers, factor)
    return True


def _fill_memory(corrected: _Corrected, measured: StepMeasurement) -> float:
    """Correct activations; return the bytes of a process beyond its predicted context."""
    if measured.peak_bytes is None:
        return 0.0
    own = corrected.facts.cluster
    learned = own.learned or Learned()

    def allocated(rows: int | None = None) -> float:
        """As it is measured: without a counting allocator, what the process holds."""
        if not measured.allocated_bytes:
            return corrected.process_memory(rows=rows).nbytes
        predicted = corrected.estimate(rows=rows)
        return predicted.memory.total - predicted.memory.context

    def with_activations(amount: Callable[[], float]) -> Callable[[float], float]:
        def scaled_amount(factor: float) -> float:
            corrected.set(activations=factor)
            return amount()

        return scaled_amount

    counted_bytes = measured.allocated_bytes or measured.peak_bytes
    if measured.smaller is not None:
        rows, less_bytes = measured.smaller

        def difference() -> float:
            return allocated() - allocated(rows)

        wanted, predicted = counted_bytes - less_bytes, difference()
        if min(wanted, predicted) >= LEAST_DIFFERENCE_BYTES:
            corrected.set(activations=_solved(with_activations(difference), wanted))
    elif measured.allocated_bytes:
        memory = corrected.estimate().memory
        working = memory.activations + memory.transient
        if working >= LEAST_SHARE * measured.allocated_bytes:
            factor = _solved(with_activations(allocated), measured.allocated_bytes)
            corrected.set(activations=factor)
    if measured.step is None and corrected.plan.world_size > 1:
        return 0.0  # the buffers of its communication library are not there
    missed_bytes = measured.peak_bytes - corrected.process_memory().nbytes
    return missed_bytes + learned.context_offset_bytes


def terms_of(plan: Plan, facts: Facts, measured: StepMeasurement) -> dict[Term, TermResidual]:
    """Compare each measured term with its prediction and range."""
    costs = CostModel(facts)
    before = costs.estimate(plan)
    time: Time = before.time
    terms: dict[Term, TermResidual] = {}

    def add(term: Term, predicted: float, error: float, measured: float, scatter: float) -> None:
        terms[term] = TermResidual(
            predicted=predicted,
            low=predicted * (1 - min(1.0, error)),
            high=predicted * (1 + error),
            measured=max(0.0, measured),
            error=scatter,
        )

    update_s = measured.update.median_s
    if measured.alone is not None:
        busy_s = time.compute_s + time.recompute_s
        total_s = busy_s + time.launch_s
        doubt = (before.compute_error * busy_s + before.launch_error * time.launch_s) / total_s
        scatter = measured.alone.relative_error
        add(Term.COMPUTING, total_s, doubt, measured.alone.median_s - update_s, scatter)
        if measured.products_share is not None:
            measured_s = measured.products_share * (measured.alone.median_s - update_s)
            add(Term.PRODUCTS, products_s(plan, facts), doubt, measured_s, scatter)
    doubt = update_error(facts.cluster, facts.precision.dtype)
    add(Term.UPDATE, time.optimizer_s, doubt, update_s, measured.update.relative_error)
    if measured.alone is not None and measured.step is not None and plan.world_size > 1:
        rest_s = time.exposed_s + time.host_s + time.idle_s + time.straggling_s
        exposed_s = measured.step.median_s - measured.alone.median_s
        scatter = hypot(measured.step.relative_error, measured.alone.relative_error)
        add(Term.SENDING, rest_s, before.communication_error, exposed_s, scatter)
    if measured.step is not None:
        terms[Term.STEP] = TermResidual(
            predicted=before.step_s,
            low=before.step_low_s,
            high=before.step_high_s,
            measured=measured.step.median_s,
            error=measured.step.relative_error,
        )
    if measured.peak_bytes is not None:
        memory = process_memory(costs, plan, before)
        terms[Term.PEAK] = TermResidual(
            predicted=memory.nbytes,
            low=memory.low,
            high=memory.high,
            measured=measured.peak_bytes,
        )
    return terms


def _solved(amount: Callable[[float], float], wanted: float) -> float:
    """Factor at which an increasing amount equals `wanted`, between LEAST and MOST."""
    low, high = log(LEAST), log(MOST)
    for _ in range(ROUNDS):
        middle = (low + high) / 2
        if amount(exp(middle)) < wanted:
            low = middle
        else:
            high = middle
    return exp((low + high) / 2)


def _narrow(error: float | None) -> float | None:
    return None if error is None else min(WIDEST_ERROR, error)
