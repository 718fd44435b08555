"""Infeasible facts: the plans tried, the nearest miss, and changes that make a plan fit."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Any

from advisor.cost import CostModel
from advisor.cost.ledger import disk_bytes_per_s
from advisor.decide.allocator import advice, slack_decides, without_slack
from advisor.decide.candidates import searched
from advisor.decide.comparison import Shape, kind_words, nearest_miss, offloaded, shape, title
from advisor.decide.decide import Choice, decide
from advisor.decide.levers import RANK, lora, qlora
from advisor.decide.offload import with_disk
from advisor.inputs.changed_facts import (
    TOKENS_STEP,
    Lever,
    value,
    varied,
    with_8_bit_states,
)
from advisor.inputs.facts import Facts
from advisor.inputs.policy import Policy
from advisor.inputs.precision import reduced_precision
from advisor.search.cache import SearchCache
from advisor.search.ranking import Candidate, host_bytes_per_node, preferred
from engines.plan import Offload, OffloadTo, PartialPlan, Plan, Precision
from profiles.errors import InputError, NoPlanError
from profiles.model.profile import Numerics
from profiles.provenance import Quantity, Source
from profiles.units import format_bandwidth, format_gib, format_seconds
from profiles.workload.optimizers import DIVISIBLE, OPTIMIZERS

# Changes shown if nothing fits: enough to choose from, few enough to read.
_CHANGES_SHOWN = 4
# With more plans a decision takes seconds, and a dozen are made here: changes are then tried only
# on the shapes of the nearest misses, `_NEAREST_SHOWN` for each kind of offload.
_MANY_PLANS = 5_000
_NEAREST_SHOWN = 2
# Unlimited main memory: a million times that of a node.
_UNLIMITED_BYTES = 2.0**60
# Dividing by a share and multiplying by it again may round down.
_ROUNDED_UP = 1 + 1e-6


def no_plan(facts: Facts, policy: Policy, partial: PartialPlan, choice: Choice) -> NoPlanError:
    """Return the error with the plans tried, the nearest miss, and changes that make a plan fit."""
    counts = ", ".join(f"{count} by `{rule}`" for rule, count in choice.rejected.items())
    nearest = nearest_miss(choice.weighed)
    because = nearest.finding.because if nearest.finding else ""
    here = [plan.model_copy(update={"offload": Offload.NONE}) for plan in choice.kinds]
    kinds = "; ".join(dict.fromkeys(map(kind_words, here)))
    away = [offloaded(plan) for plan in choice.kinds if plan.offload is not Offload.NONE]
    if away:
        kinds += f"; where possible also with {', '.join(dict.fromkeys(away))}"
    near = _nearest_shapes(choice) if choice.total > _MANY_PLANS else ()
    tried = _Tried(policy, near)
    changes = list(islice(_changes(facts, tried, partial, choice.weighed), _CHANGES_SHOWN))
    device, high = facts.cluster.device, nearest.estimate.peak_high_bytes
    if slack_decides(high, device, policy):
        least = format_gib(without_slack(high, device))
        changes.append(
            f"only the allocator's slack is too much, {least} are needed without it: {advice()}"
        )
    return NoPlanError(
        f"nothing fits: {choice.total} plans were weighed and left out ({counts})",
        where=f"tried: {kinds}\nnearest: {title(nearest.plan)} ({nearest.plan})\n{because}",
        hints=changes,
    )


def _changes(
    facts: Facts, tried: _Tried, partial: PartialPlan, weighed: Sequence[Candidate]
) -> Iterator[str]:
    """Yield changes that make a plan fit, cheapest first; each was tried."""
    for key in partial.fixed:
        all_plans = _Tried(tried.policy, ())
        change = f"leave `{partial.only(key)}` open"
        yield from _verified(change, facts, all_plans, partial.leaving(key))
    if facts.workload.precision == "fp32" and Numerics.BF16 in facts.model.numerics:
        reduced = (reduced_precision(facts.cluster.device) or Precision.BF16).value
        changed = _with(facts, workload=facts.workload.model_copy(update={"precision": reduced}))
        change = f"compute in {reduced} (`--precision {reduced}`)"
        yield from _verified(change, changed, tried, partial)
    if facts.workload.optimizer.indivisible != DIVISIBLE:
        workload = facts.workload.model_copy(update={"optimizer": OPTIMIZERS["adamw"]})
        name = facts.workload.optimizer.name
        words = f"step with AdamW, which can be split, in place of {name}"
        yield from _verified(words, _with(facts, workload=workload), tried, partial)
    yield from _smaller_states(facts, tried, partial)
    yield from _adapters(facts, tried, partial)
    # If only main memory is too small, that comes before larger changes.
    yield from _main_memory(facts, tried, partial)
    yield from _disk(facts, tried, partial)
    yield from _more_devices(facts, tried, partial)
    yield from _more_memory(facts, tried, partial, weighed)
    yield from _shorter_sequences(facts, tried, partial)


def _more_devices(facts: Facts, tried: _Tried, partial: PartialPlan) -> Iterator[str]:
    """Try multiples of the nodes, or of the devices if no network is known.

    The batch grows if it must to divide.
    """
    cluster, batch = facts.cluster, facts.workload.global_batch_size
    if cluster.inter is not None:
        field, name = "num_nodes", "nodes"
    elif cluster.intra is not None:
        field, name = "devices_per_node", "devices"
    else:
        return
    # With many more devices no offload is needed.
    tried = _Tried(tried.policy, tuple(p for p in tried.near if p.offload is Offload.NONE))
    for factor in tried.policy.device_factors:
        count = getattr(cluster, field) * factor
        larger = cluster.model_copy(update={field: count})
        world = larger.world_size
        wanted = -(-batch // world) * world
        workload = facts.workload.model_copy(update={"global_batch_size": wanted})
        changed = facts.rebuilt(cluster=larger, workload=workload)
        grows = f" and a global batch of {wanted}" if wanted != batch else ""
        hints = list(_verified(f"take {count} {name}{grows}", changed, tried, partial))
        if hints:
            yield from hints
            return


def _more_memory(
    facts: Facts, tried: _Tried, partial: PartialPlan, weighed: Sequence[Candidate]
) -> Iterator[str]:
    """Try devices with the memory that the smallest plan without offload needs."""
    peaks = [c.estimate.peak_high_bytes for c in weighed if c.plan.offload is Offload.NONE]
    if not peaks:
        return
    needed = min(peaks) / (1 - tried.policy.headroom_fraction) * _ROUNDED_UP
    changed = varied(facts, Lever.MEMORY, needed)
    yield from _verified(
        f"take devices with {format_gib(needed)} of memory", changed, tried, partial
    )


def _main_memory(facts: Facts, tried: _Tried, partial: PartialPlan) -> Iterator[str]:
    """Try nodes with enough main memory for an offload, if only that is too small."""
    if partial.fixes("offload") or facts.cluster.device.kind == "cpu":
        return
    unlimited = Quantity(value=_UNLIMITED_BYTES, source=Source.ASSUMED)
    roomy = facts.cluster.model_copy(update={"host_memory_bytes": unlimited})
    winner = tried.winner(_with(facts, cluster=roomy), partial)
    if winner is None or not winner.estimate.host_bytes:
        return
    needed = host_bytes_per_node(winner.estimate, facts.cluster)
    needed *= _ROUNDED_UP / (1 - tried.policy.host_headroom_fraction)
    memory = Quantity(value=needed, source=Source.ASSUMED)
    larger = facts.cluster.model_copy(update={"host_memory_bytes": memory})
    change = f"take nodes with {format_gib(needed)} of main memory"
    yield from _verified(change, _with(facts, cluster=larger), tried, partial)


def _disk(facts: Facts, tried: _Tried, partial: PartialPlan) -> Iterator[str]:
    """Try offload to files, if no disk is known."""
    if partial.fixes("offload", "offload_to") or facts.cluster.disk_write_bytes_per_s is not None:
        return
    cluster = with_disk(facts.cluster)
    written, read = disk_bytes_per_s(cluster)
    rates = f"{format_bandwidth(written.value)} written, {format_bandwidth(read.value)} read"
    change = f"keep states in files on a disk of {rates} (`advise probe --disk FOLDER` times one)"
    wanted = partial.fixing(offload_to=OffloadTo.DISK) if tried.near else partial
    yield from _verified(change, _with(facts, cluster=cluster), tried, wanted)


def _smaller_states(facts: Facts, tried: _Tried, partial: PartialPlan) -> Iterator[str]:
    """Try 8-bit optimizer states in place of 32-bit ones."""
    changed = with_8_bit_states(facts)
    if changed is not None:
        yield from _verified("step with 8-bit AdamW", changed, tried, partial)


def _adapters(facts: Facts, tried: _Tried, partial: PartialPlan) -> Iterator[str]:
    """Try adapters on a frozen base in 16 bits, and in 4 if that is still too much."""
    ways = (("16 bits (LoRA)", lora(facts)), ("4 bits (QLoRA), priced only", qlora(facts)))
    for words, changed in ways:
        if changed is None:
            continue
        change = f"train only adapters of rank {RANK}, the base frozen in {words}"
        hints = list(_verified(change, changed, tried, partial))
        if hints:
            yield from hints
            return


def _shorter_sequences(facts: Facts, tried: _Tried, partial: PartialPlan) -> Iterator[str]:
    """Try half the length, a quarter and so on, if the model can be profiled at other lengths."""
    try:
        length = int(value(facts, Lever.SEQUENCE)) // 2
    except InputError:
        return
    while length >= TOKENS_STEP:
        changed = varied(facts, Lever.SEQUENCE, length)
        hints = list(_verified(f"cut sequences to {length} tokens", changed, tried, partial))
        if hints:
            yield from hints
            return
        length //= 2


@dataclass(frozen=True, slots=True)
class _Tried:
    """Trial of changes: by whole decisions, or by the shapes of the nearest misses (`near`)."""

    policy: Policy
    near: tuple[Plan, ...]

    def winner(self, facts: Facts, partial: PartialPlan) -> Candidate | None:
        """Return the plan taken for other facts; None if nothing fits.

        Raises:
            InputError: no plan is legal.
        """
        if not self.near:
            return decide(facts, policy=self.policy, partial=partial, nearest=False).winner
        cache = SearchCache(CostModel(facts))
        fitting: list[Candidate] = []
        tried: list[PartialPlan] = []
        for plan in self.near:
            wanted = partial.fixing(**_degrees(plan, facts.cluster.world_size))
            if (each := wanted.fixing(offload=plan.offload)) in tried:
                continue
            tried.append(each)
            search = searched(cache, wanted, self.policy, offload=plan.offload)
            best = search.preferred(search.rows)
            fitting += [best] if best is not None else []
        return preferred(fitting, self.policy) if fitting else None


def _nearest_shapes(choice: Choice) -> tuple[Plan, ...]:
    """Return the nearest misses of different shapes for every kind of offload; and FSDP, which
    gains most from more devices."""
    nearest: dict[Offload, dict[Shape, Plan]] = {}
    missed = sorted(choice.weighed, key=lambda c: c.finding.missing_bytes if c.finding else 0.0)
    for candidate in missed:
        plans = nearest.setdefault(candidate.plan.offload, {})
        if len(plans) < _NEAREST_SHOWN and candidate.plan.offload_to is OffloadTo.HOST:
            plans.setdefault(shape(candidate.plan), candidate.plan)
    sharded = [p for p in choice.kinds if title(p).startswith("FSDP")]
    here = [plan for plan in sharded if plan.offload is Offload.NONE]
    return (*here[:1], *(plan for plans in nearest.values() for plan in plans.values()))


def _degrees(plan: Plan, devices: int) -> dict[str, Any]:
    """Return the degrees of a plan; for another number of devices without cp and data parallelism,
    which are decided again."""
    axes = ["pp", "tp", "ep"]
    if devices == plan.world_size:
        axes += ["cp", "dp_replicate", "dp_shard", "data_parallel"]
    return {name: getattr(plan, name) for name in axes}


def _verified(change: str, facts: Facts, tried: _Tried, partial: PartialPlan) -> Iterator[str]:
    """Yield `change` with the plan then taken; nothing if none fits or is legal."""
    try:
        winner = tried.winner(facts, partial)
    except InputError:
        return
    if winner is not None:
        yield (
            f"{change}: {title(winner.plan)} then needs up to"
            f" {format_gib(winner.estimate.peak_high_bytes)},"
            f" step {format_seconds(winner.estimate.step_s)}"
        )


def _with(facts: Facts, **changes: object) -> Facts:
    return facts.model_copy(update=changes)
