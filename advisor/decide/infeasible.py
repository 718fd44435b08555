"""Ways out where nothing fits: what was tried, the nearest miss, and changes that do help."""

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
    LOSS_CHUNKS,
    TOKENS_STEP,
    Lever,
    value,
    varied,
    with_8_bit_states,
    with_chunked_loss,
)
from advisor.inputs.facts import Facts
from advisor.inputs.policy import Policy
from advisor.search.cache import SearchCache
from advisor.search.ranking import Candidate, host_bytes_per_node, preferred
from engines.plan import Offload, OffloadTo, PartialPlan, Plan
from profiles.errors import InputError, NoPlanError
from profiles.model.profile import Numerics
from profiles.provenance import Quantity, Source
from profiles.units import format_bandwidth, format_gib, format_seconds
from profiles.workload.optimizers import OPTIMIZERS

# Changes shown when nothing fits: enough to choose from, few enough to read.
_CHANGES_SHOWN = 4
# Of so many plans a decision takes seconds, and a dozen are made here: changes are then tried on
# the ways of spreading that came nearest, so many for each kind of offload.
_MANY_PLANS = 5_000
_NEAREST_SHOWN = 2
# Main memory that is no limit: a million times what nodes have.
_ENDLESS_BYTES = 2.0**60
# What is divided by a share and multiplied by it again may come out a digit too small.
_ROUNDED_UP = 1 + 1e-6


def no_plan(facts: Facts, policy: Policy, partial: PartialPlan, choice: Choice) -> NoPlanError:
    """What was tried, the nearest miss, and changes with which a plan was seen to fit."""
    counts = ", ".join(f"{count} by `{rule}`" for rule, count in choice.rejected.items())
    nearest = nearest_miss(choice.weighed)
    because = nearest.finding.because if nearest.finding else ""
    here = [plan.model_copy(update={"offload": Offload.NONE}) for plan in choice.kinds]
    kinds = "; ".join(dict.fromkeys(map(kind_words, here)))
    away = [offloaded(plan) for plan in choice.kinds if plan.offload is not Offload.NONE]
    if away:
        kinds += f"; where possible also with {', '.join(dict.fromkeys(away))}"
    near = _nearest_spreads(choice) if choice.total > _MANY_PLANS else ()
    tried = _Tried(policy, near)
    changes = list(islice(_changes(facts, tried, partial, choice.weighed), _CHANGES_SHOWN))
    device, high = facts.cluster.device, nearest.estimate.peak_high_bytes
    if slack_decides(high, device, policy):
        least = format_gib(without_slack(high, device))
        changes.append(
            f"only what the allocator may lose is too much, without it {least} are needed:"
            f" {advice()}"
        )
    return NoPlanError(
        f"nothing fits: {choice.total} plans were weighed and left out ({counts})",
        where=f"tried: {kinds}\nnearest: {title(nearest.plan)} ({nearest.plan})\n{because}",
        hints=changes,
    )


def _changes(
    facts: Facts, tried: _Tried, partial: PartialPlan, weighed: Sequence[Candidate]
) -> Iterator[str]:
    """Changes that make something fit, cheapest first, each tried."""
    for key in partial.fixed:
        whole = _Tried(tried.policy, ())
        change = f"leave `{partial.only(key)}` open"
        yield from _verified(change, facts, whole, partial.leaving(key))
    if facts.workload.precision == "fp32" and Numerics.BF16 in facts.model.numerics:
        changed = _with(facts, workload=facts.workload.model_copy(update={"precision": "bf16"}))
        yield from _verified("compute in bf16 (`--precision bf16`)", changed, tried, partial)
    if facts.workload.optimizer.whole_because:
        workload = facts.workload.model_copy(update={"optimizer": OPTIMIZERS["adamw"]})
        name = facts.workload.optimizer.name
        words = f"step with AdamW, which can be sharded, in place of {name}"
        yield from _verified(words, _with(facts, workload=workload), tried, partial)
    yield from _smaller_states(facts, tried, partial)
    yield from _smaller_loss(facts, tried, partial)
    yield from _adapters(facts, tried, partial)
    # Where nothing but main memory is in the way, that is said before anything larger.
    yield from _main_memory(facts, tried, partial)
    yield from _disk(facts, tried, partial)
    yield from _more_devices(facts, tried, partial)
    yield from _more_memory(facts, tried, partial, weighed)
    yield from _shorter_sequences(facts, tried, partial)


def _more_devices(facts: Facts, tried: _Tried, partial: PartialPlan) -> Iterator[str]:
    """The first multiple of nodes (or of devices, where nothing is known of a network) that is
    enough; the batch grows where it must, to divide."""
    cluster, batch = facts.cluster, facts.workload.global_batch_size
    if cluster.inter is not None:
        field, name = "num_nodes", "nodes"
    elif cluster.intra is not None:
        field, name = "devices_per_node", "devices"
    else:
        return
    # With so many more devices nothing has to wait outside them.
    tried = _Tried(tried.policy, tuple(p for p in tried.near if p.offload is Offload.NONE))
    for factor in tried.policy.device_factors:
        count = getattr(cluster, field) * factor
        larger = cluster.model_copy(update={field: count})
        world = larger.world_size
        wanted = -(-batch // world) * world
        workload = facts.workload.model_copy(update={"global_batch_size": wanted})
        changed = Facts(model=facts.model, cluster=larger, workload=workload, stack=facts.stack)
        grows = f" and a global batch of {wanted}" if wanted != batch else ""
        found = list(_verified(f"take {count} {name}{grows}", changed, tried, partial))
        if found:
            yield from found
            return


def _more_memory(
    facts: Facts, tried: _Tried, partial: PartialPlan, weighed: Sequence[Candidate]
) -> Iterator[str]:
    """Devices with as much memory as the smallest plan needs that keeps its states on them."""
    peaks = [c.estimate.peak_high_bytes for c in weighed if c.plan.offload is Offload.NONE]
    if not peaks:
        return
    needed = min(peaks) / (1 - tried.policy.headroom_fraction) * _ROUNDED_UP
    changed = varied(facts, Lever.MEMORY, needed)
    yield from _verified(
        f"take devices with {format_gib(needed)} of memory", changed, tried, partial
    )


def _main_memory(facts: Facts, tried: _Tried, partial: PartialPlan) -> Iterator[str]:
    """Nodes whose main memory holds the states, where that is all that is in the way."""
    if partial.fixes("offload") or facts.cluster.device.kind == "cpu":
        return
    roomy = Quantity(value=_ENDLESS_BYTES, source=Source.ASSUMED)
    endless = facts.cluster.model_copy(update={"host_memory_bytes": roomy})
    found = tried.winner(_with(facts, cluster=endless), partial)
    if found is None or not found.estimate.host_bytes:
        return
    needed = host_bytes_per_node(found.estimate, facts.cluster)
    needed *= _ROUNDED_UP / (1 - tried.policy.host_headroom_fraction)
    memory = Quantity(value=needed, source=Source.ASSUMED)
    larger = facts.cluster.model_copy(update={"host_memory_bytes": memory})
    change = f"take nodes with {format_gib(needed)} of main memory"
    yield from _verified(change, _with(facts, cluster=larger), tried, partial)


def _disk(facts: Facts, tried: _Tried, partial: PartialPlan) -> Iterator[str]:
    """Files, where nothing is known of a disk."""
    if partial.fixes("offload", "offload_to") or facts.cluster.disk_write_bytes_per_s is not None:
        return
    cluster = with_disk(facts.cluster)
    written, read = disk_bytes_per_s(cluster)
    rates = f"{format_bandwidth(written.value)} written, {format_bandwidth(read.value)} read"
    change = f"keep states in files on a disk of {rates} (`advise probe --disk FOLDER` times one)"
    wanted = partial.fixing(offload_to=OffloadTo.DISK) if tried.near else partial
    yield from _verified(change, _with(facts, cluster=cluster), tried, wanted)


def _smaller_states(facts: Facts, tried: _Tried, partial: PartialPlan) -> Iterator[str]:
    """The same optimizer with states of 8 bits, where its states are of 32."""
    changed = with_8_bit_states(facts)
    if changed is not None:
        yield from _verified("step with 8-bit AdamW", changed, tried, partial)


def _smaller_loss(facts: Facts, tried: _Tried, partial: PartialPlan) -> Iterator[str]:
    """A loss over a part of the tokens at a time."""
    changed = with_chunked_loss(facts)
    if changed is not None:
        words = f"take the loss in {LOSS_CHUNKS} chunks of the tokens (in your own code)"
        yield from _verified(words, changed, tried, partial)


def _adapters(facts: Facts, tried: _Tried, partial: PartialPlan) -> Iterator[str]:
    """Adapters that learn beside a frozen base: in 16 bits, in 4 where that is still too much."""
    for words, changed in (("16 bits (LoRA)", lora(facts)), ("4 bits (QLoRA)", qlora(facts))):
        if changed is None:
            continue
        change = f"train adapters of rank {RANK} alone, the base frozen in {words}, priced only"
        found = list(_verified(change, changed, tried, partial))
        if found:
            yield from found
            return


def _shorter_sequences(facts: Facts, tried: _Tried, partial: PartialPlan) -> Iterator[str]:
    """Half as long, a quarter ..., where the model can be counted at other lengths."""
    try:
        length = int(value(facts, Lever.SEQUENCE)) // 2
    except InputError:
        return
    while length >= TOKENS_STEP:
        changed = varied(facts, Lever.SEQUENCE, length)
        found = list(_verified(f"cut sequences to {length} tokens", changed, tried, partial))
        if found:
            yield from found
            return
        length //= 2


@dataclass(frozen=True, slots=True)
class _Tried:
    """How changes are tried: whole decisions, or where these take seconds each, the ways of
    spreading that came nearest to fitting."""

    policy: Policy
    near: tuple[Plan, ...]

    def winner(self, facts: Facts, partial: PartialPlan) -> Candidate | None:
        """What is taken for other facts; None where nothing fits.

        Raises:
            InputError: no plan is legal.
        """
        if not self.near:
            return decide(facts, policy=self.policy, partial=partial, nearest=False).winner
        kept, found = SearchCache(CostModel(facts)), []
        tried: list[PartialPlan] = []
        for plan in self.near:
            wanted = partial.fixing(**_spread_as(plan, facts.cluster.world_size))
            if (each := wanted.fixing(offload=plan.offload)) in tried:
                continue
            tried.append(each)
            search = searched(kept, wanted, self.policy, offload=plan.offload)
            found.append(search.preferred(search.rows))
        fitting = [candidate for candidate in found if candidate is not None]
        return preferred(fitting, self.policy) if fitting else None


def _nearest_spreads(choice: Choice) -> tuple[Plan, ...]:
    """Of every kind of offload the plans that miss by least, of different shapes; and everything
    sharded, which gains most from more devices."""
    found: dict[Offload, dict[Shape, Plan]] = {}
    missed = sorted(choice.weighed, key=lambda c: c.finding.missing_bytes if c.finding else 0.0)
    for candidate in missed:
        plans = found.setdefault(candidate.plan.offload, {})
        if len(plans) < _NEAREST_SHOWN and candidate.plan.offload_to is OffloadTo.HOST:
            plans.setdefault(shape(candidate.plan), candidate.plan)
    sharded = [p for p in choice.kinds if title(p).startswith("FSDP")]
    here = [plan for plan in sharded if plan.offload is Offload.NONE]
    return (*here[:1], *(plan for plans in found.values() for plan in plans.values()))


def _spread_as(plan: Plan, devices: int) -> dict[str, Any]:
    """The degrees of a plan; of more devices than it has those along the batch and the tokens are
    left open, as what was one replica may be sharded then."""
    axes = ["pp", "tp", "ep"]
    if devices == plan.world_size:
        axes += ["cp", "dp_replicate", "dp_shard", "data_parallel"]
    return {name: getattr(plan, name) for name in axes}


def _verified(change: str, facts: Facts, tried: _Tried, partial: PartialPlan) -> Iterator[str]:
    """`change` with the plan that is then taken; nothing where none fits or is legal."""
    try:
        found = tried.winner(facts, partial)
    except InputError:
        return
    if found is not None:
        yield (
            f"{change}: {title(found.plan)} then needs up to"
            f" {format_gib(found.estimate.peak_high_bytes)},"
            f" step {format_seconds(found.estimate.step_s)}"
        )


def _with(facts: Facts, **changes: object) -> Facts:
    return facts.model_copy(update=changes)
