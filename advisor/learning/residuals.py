"""From measured steps to an anchor: what explains them, term by term."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from datetime import UTC, datetime
from math import copysign, exp, hypot, log

from advisor.cost import Estimate, Time, estimate
from advisor.cost.anchored import update_error
from advisor.cost.communication import COMMUNICATION_ERROR
from advisor.cost.compute import COMPUTE_ERROR
from advisor.inputs.facts import Facts
from advisor.learning.anchor import (
    LEFT,
    Anchor,
    Links,
    Residual,
    Term,
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
class Measured:
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


def anchor_of(plan: Plan, facts: Facts, found: Measured, machine: Machine) -> Anchor:
    """Set `found` beside the estimate of `plan`, and work out what explains it.

    Blocks of the model that were timed one by one are left out: constants would not explain them.
    """
    facts = facts.model_copy(update={"model": facts.model.model_copy(update={"times": ()})})
    terms = terms_of(plan, facts, found)
    if found.links is not None:
        facts = on_cluster(facts, found.links.on(facts.cluster))
    before = estimate(plan, facts)
    corrected = _Corrected(facts, plan)
    whole = found.alone or found.step
    assert whole is not None  # one of them was run
    is_told = found.alone is not None
    every = COMPUTING if is_told else (*COMPUTING, *_tiers(before, facts.cluster))
    corrected.slow(every, 1.0)  # as measured ones, which a calibration leaves as they are
    update_s = found.update.median_s
    whole_s = min(each.median_s for each in (found.alone, found.step) if each is not None)
    if is_told:
        _slow_products(corrected, found.products_share, whole_s - update_s)
    then = corrected.estimate()
    predicted_s = busy_s(then) if is_told else then.step_s - then.time.optimizer_s
    corrected.slow_further(every, (whole_s - update_s) / predicted_s)
    then_s = corrected.estimate().time.optimizer_s
    if then_s and update_s:
        corrected.set(update=update_s / then_s)
    sending_error = None
    if found.step is not None and (
        _waits(corrected, found) or _slow_links(corrected, before, found)
    ):
        sending_error = hypot(found.step.relative_error, LEFT * COMMUNICATION_ERROR)
    computing_error = hypot(whole.relative_error, LEFT * COMPUTE_ERROR) if is_told else None
    corrected.set(
        compute_error=_narrow(computing_error),
        update_error=_narrow(hypot(found.update.relative_error, LEFT * COMPUTE_ERROR)),
        communication_error=_narrow(sending_error),
    )
    missed_bytes = _fill_memory(corrected, found)
    return Anchor(
        machine=machine,
        ranks=plan.world_size,
        is_one_rank=found.step is None,
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
        links=found.links,
        corrections=corrected.step,
        context_missed_bytes=missed_bytes,
        measured_at=datetime.now(UTC).isoformat(timespec="seconds"),
    )


class _Corrected:
    """Facts that are corrected term by term, and the estimate that they make."""

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
        """Of the plan, with other links, or at another microbatch."""
        tiers, factor = links
        constants = self.constants | {tier: factor * self._units[tier] for tier in tiers}
        cluster = with_constants(self.facts.cluster, constants, self.facts.precision.dtype)
        learned = (cluster.learned or Learned()).model_copy(update={"anchored": self.step})
        facts = on_cluster(self.facts, cluster.model_copy(update={"learned": learned}))
        plan = self.plan if rows is None else self.plan.model_copy(update={"microbatch_size": rows})
        return estimate(plan, facts)


def busy_s(found: Estimate) -> float:
    """Seconds that a rank computes, forward and backward."""
    return found.time.compute_s + found.time.recompute_s + found.time.launch_s


def products_s(plan: Plan, facts: Facts) -> float:
    """Of these, matrix products and attention: what grows with their constants."""

    def computed_s(cluster: ClusterProfile) -> float:
        time = estimate(plan, on_cluster(facts, cluster)).time
        return time.compute_s + time.recompute_s

    nudged = slowed(facts.cluster, dict.fromkeys(_PRODUCTS, 1 + NUDGE))
    return (computed_s(nudged) - computed_s(facts.cluster)) / NUDGE


def _slow_products(corrected: _Corrected, share: float | None, whole_s: float) -> None:
    """Give products, this share of computing, and the rest of it each their own multiple."""
    whole = busy_s(corrected.estimate())
    products = products_s(corrected.plan, corrected.facts)
    if share is None or not 0 < share < 1 or not 0 < products < whole:
        return
    others = [constant for constant in COMPUTING if constant not in _PRODUCTS]
    corrected.slow(_PRODUCTS, share * whole_s / products)
    corrected.slow(others, (1 - share) * whole_s / (whole - products))


def _tiers(found: Estimate, cluster: ClusterProfile) -> list[Constant]:
    """The links that a plan's collectives use; none of one between parts of a rank."""
    sent = {(item.group_size, item.stride) for item in found.traffic if item.stride > 0}
    return sorted({tier_of(cluster, size, stride) for size, stride in sent})


def _waits(corrected: _Corrected, found: Measured) -> bool:
    """Take for waiting what a step lasted beyond links that were timed; where it was shorter they
    are faster in a step."""
    if found.links is None or found.alone is None or found.step is None:
        return False
    now = corrected.estimate()
    rest_s = found.step.median_s - now.step_s
    if rest_s < 0:
        return False
    corrected.set(waiting=rest_s / busy_s(now))
    return True


def _slow_links(corrected: _Corrected, before: Estimate, found: Measured) -> bool:
    """Give links the time that makes the predicted step the measured one, as far as its scatter
    tells: what is within it says nothing of links, which other plans may use far more."""
    tiers = _tiers(before, corrected.facts.cluster)
    if not tiers or found.step is None or found.alone is None:
        return False
    step_s, now_s = found.step.median_s, corrected.estimate().step_s
    without_s = corrected.estimate(links=(tiers, LEAST)).step_s
    if max(step_s, now_s) - without_s < LEAST_SHARE * step_s:
        return False
    doubt_s = step_s * hypot(found.step.relative_error, found.alone.relative_error)
    if abs(now_s - step_s) <= doubt_s:
        return False
    wanted_s = step_s + copysign(doubt_s, now_s - step_s)
    factor = _solved(lambda x: corrected.estimate(links=(tiers, x)).step_s, wanted_s)
    corrected.slow(tiers, factor)
    return True


def _fill_memory(corrected: _Corrected, found: Measured) -> float:
    """Correct activations; the bytes that a process holds beyond its predicted context."""
    if found.peak_bytes is None:
        return 0.0
    own = corrected.facts.cluster
    learned = own.learned or Learned()

    def allocated(rows: int | None = None) -> float:
        predicted = corrected.estimate(rows=rows)
        return predicted.memory.total - predicted.memory.context

    def with_activations(amount: Callable[[], float]) -> Callable[[float], float]:
        def told(factor: float) -> float:
            corrected.set(activations=factor)
            return amount()

        return told

    counted_bytes = found.allocated_bytes or found.peak_bytes
    if found.smaller is not None:
        rows, less_bytes = found.smaller

        def difference() -> float:
            return allocated() - allocated(rows)

        wanted, predicted = counted_bytes - less_bytes, difference()
        if min(wanted, predicted) >= LEAST_DIFFERENCE_BYTES:
            corrected.set(activations=_solved(with_activations(difference), wanted))
    elif found.allocated_bytes:
        memory = corrected.estimate().memory
        working = memory.activations + memory.transient
        if working >= LEAST_SHARE * found.allocated_bytes:
            factor = _solved(with_activations(allocated), found.allocated_bytes)
            corrected.set(activations=factor)
    if found.step is None and corrected.plan.world_size > 1:
        return 0.0  # the buffers of its communication library are not there
    now = corrected.estimate()
    predicted = max(now.reserved_bytes, now.peak_bytes)
    return found.peak_bytes - predicted + learned.context_offset_bytes


def terms_of(plan: Plan, facts: Facts, found: Measured) -> dict[Term, Residual]:
    """Every term that was measured, beside its prediction and range."""
    before = estimate(plan, facts)
    time: Time = before.time
    terms: dict[Term, Residual] = {}

    def add(term: Term, predicted: float, error: float, measured: float, scatter: float) -> None:
        terms[term] = Residual(
            predicted=predicted,
            low=predicted * (1 - min(1.0, error)),
            high=predicted * (1 + error),
            measured=max(0.0, measured),
            error=scatter,
        )

    update_s = found.update.median_s
    if found.alone is not None:
        busy_s = time.compute_s + time.recompute_s
        total_s = busy_s + time.launch_s
        doubt = (before.compute_error * busy_s + before.launch_error * time.launch_s) / total_s
        scatter = found.alone.relative_error
        add(Term.COMPUTING, total_s, doubt, found.alone.median_s - update_s, scatter)
        if found.products_share is not None:
            measured_s = found.products_share * (found.alone.median_s - update_s)
            add(Term.PRODUCTS, products_s(plan, facts), doubt, measured_s, scatter)
    doubt = update_error(facts.cluster, facts.precision.dtype)
    add(Term.UPDATE, time.optimizer_s, doubt, update_s, found.update.relative_error)
    if found.alone is not None and found.step is not None and plan.world_size > 1:
        rest_s = time.exposed_s + time.host_s + time.idle_s + time.straggling_s
        exposed_s = found.step.median_s - found.alone.median_s
        scatter = hypot(found.step.relative_error, found.alone.relative_error)
        add(Term.SENDING, rest_s, before.communication_error, exposed_s, scatter)
    if found.step is not None:
        terms[Term.STEP] = Residual(
            predicted=before.step_s,
            low=before.step_low_s,
            high=before.step_high_s,
            measured=found.step.median_s,
            error=found.step.relative_error,
        )
    if found.peak_bytes is not None:
        terms[Term.PEAK] = Residual(
            predicted=max(before.reserved_bytes, before.peak_bytes),
            low=before.peak_low_bytes,
            high=before.peak_high_bytes,
            measured=found.peak_bytes,
        )
    return terms


def _solved(amount: Callable[[float], float], wanted: float) -> float:
    """The factor at which a growing amount is `wanted`, between LEAST and MOST."""
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
