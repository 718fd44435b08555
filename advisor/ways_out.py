"""Ways out where nothing fits: what was tried, the nearest miss, and changes that do help."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import islice

from advisor.allocator import advice, slack_decides, without_slack
from advisor.comparison import kind_words, nearest_miss, offloaded, title
from advisor.cost.ledger import disk_bytes_per_s
from advisor.decide import Choice, decide
from advisor.facts import Facts
from advisor.levers import TOKENS_STEP, Lever, value, varied
from advisor.outside import with_disk
from advisor.policy import Policy
from advisor.rules import Candidate, host_bytes_per_node
from advisor.search.space import Pins
from engines.plan import Offload
from profiles.errors import InputError, NoPlanError
from profiles.model import Numerics
from profiles.optimizers import OPTIMIZERS
from profiles.provenance import Quantity, Source
from profiles.units import format_bandwidth, format_gib, format_seconds

# Changes shown when nothing fits: enough to choose from, few enough to read.
_CHANGES_SHOWN = 4
# Main memory that is no limit: a million times what nodes have.
_ENDLESS_BYTES = 2.0**60
# What is divided by a share and multiplied by it again may come out a digit too small.
_ROUNDED_UP = 1 + 1e-6


def no_plan(facts: Facts, policy: Policy, pins: Pins, choice: Choice) -> NoPlanError:
    """What was tried, the nearest miss, and changes with which a plan was seen to fit."""
    counts = ", ".join(f"{count} by `{rule}`" for rule, count in choice.rejected.items())
    nearest = nearest_miss(choice.weighed)
    because = nearest.finding.because if nearest.finding else ""
    here = [plan.model_copy(update={"offload": Offload.NONE}) for plan in choice.kinds]
    kinds = "; ".join(dict.fromkeys(map(kind_words, here)))
    away = [offloaded(plan) for plan in choice.kinds if plan.offload is not Offload.NONE]
    if away:
        kinds += f"; where possible also with {', '.join(dict.fromkeys(away))}"
    changes = list(islice(_changes(facts, policy, pins, choice.weighed), _CHANGES_SHOWN))
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
    facts: Facts, policy: Policy, pins: Pins, weighed: Sequence[Candidate]
) -> Iterator[str]:
    """Changes that make something fit, cheapest first, each tried."""
    for key, setting in pins.items():
        others = {name: kept for name, kept in pins.items() if name != key}
        yield from _verified(f"leave `{key}={setting}` open", facts, policy, others)
    if facts.workload.precision == "fp32" and Numerics.BF16 in facts.model.numerics:
        changed = _with(facts, workload=facts.workload.model_copy(update={"precision": "bf16"}))
        yield from _verified("compute in bf16 (`--precision bf16`)", changed, policy, pins)
    if facts.workload.optimizer.whole_because:
        workload = facts.workload.model_copy(update={"optimizer": OPTIMIZERS["adamw"]})
        name = facts.workload.optimizer.name
        words = f"step with AdamW, which can be sharded, in place of {name}"
        yield from _verified(words, _with(facts, workload=workload), policy, pins)
    # Where nothing but main memory is in the way, that is said before anything larger.
    yield from _main_memory(facts, policy, pins)
    yield from _disk(facts, policy, pins)
    yield from _more_devices(facts, policy, pins)
    yield from _more_memory(facts, policy, pins, weighed)
    yield from _shorter_sequences(facts, policy, pins)
    yield from _smaller_states(facts, policy, pins)


def _more_devices(facts: Facts, policy: Policy, pins: Pins) -> Iterator[str]:
    """The first multiple of nodes (or of devices, where nothing is known of a network) that is
    enough; the batch grows where it must, to divide."""
    cluster, batch = facts.cluster, facts.workload.global_batch_size
    if cluster.inter is not None:
        field, name = "num_nodes", "nodes"
    elif cluster.intra is not None:
        field, name = "devices_per_node", "devices"
    else:
        return
    for factor in policy.device_factors:
        count = getattr(cluster, field) * factor
        larger = cluster.model_copy(update={field: count})
        world = larger.world_size
        wanted = -(-batch // world) * world
        workload = facts.workload.model_copy(update={"global_batch_size": wanted})
        changed = Facts(model=facts.model, cluster=larger, workload=workload, stack=facts.stack)
        grows = f" and a global batch of {wanted}" if wanted != batch else ""
        found = list(_verified(f"take {count} {name}{grows}", changed, policy, pins))
        if found:
            yield from found
            return


def _more_memory(
    facts: Facts, policy: Policy, pins: Pins, weighed: Sequence[Candidate]
) -> Iterator[str]:
    """Devices with as much memory as the smallest plan needs that keeps its states on them."""
    peaks = [c.estimate.peak_high_bytes for c in weighed if c.plan.offload is Offload.NONE]
    if not peaks:
        return
    needed = min(peaks) / (1 - policy.headroom_fraction) * _ROUNDED_UP
    changed = varied(facts, Lever.MEMORY, needed)
    yield from _verified(f"take devices with {format_gib(needed)} of memory", changed, policy, pins)


def _main_memory(facts: Facts, policy: Policy, pins: Pins) -> Iterator[str]:
    """Nodes whose main memory holds the states, where that is all that is in the way."""
    if "offload" in pins or facts.cluster.device.kind == "cpu":
        return
    roomy = Quantity(value=_ENDLESS_BYTES, source=Source.ASSUMED)
    endless = facts.cluster.model_copy(update={"host_memory_bytes": roomy})
    found = decide(_with(facts, cluster=endless), policy=policy, pins=pins).winner
    if found is None or not found.estimate.host_bytes:
        return
    needed = host_bytes_per_node(found.estimate, facts.cluster)
    needed *= _ROUNDED_UP / (1 - policy.host_headroom_fraction)
    memory = Quantity(value=needed, source=Source.ASSUMED)
    larger = facts.cluster.model_copy(update={"host_memory_bytes": memory})
    change = f"take nodes with {format_gib(needed)} of main memory"
    yield from _verified(change, _with(facts, cluster=larger), policy, pins)


def _disk(facts: Facts, policy: Policy, pins: Pins) -> Iterator[str]:
    """Files, where nothing is known of a disk."""
    if {"offload", "offload_to"} & set(pins) or facts.cluster.disk_write_bytes_per_s is not None:
        return
    cluster = with_disk(facts.cluster)
    written, read = disk_bytes_per_s(cluster)
    rates = f"{format_bandwidth(written.value)} written, {format_bandwidth(read.value)} read"
    change = f"keep states in files on a disk of {rates} (`advise probe --disk FOLDER` times one)"
    yield from _verified(change, _with(facts, cluster=cluster), policy, pins)


def _smaller_states(facts: Facts, policy: Policy, pins: Pins) -> Iterator[str]:
    """The same optimizer with states of 8 bits, where its states are of 32."""
    if facts.workload.optimizer.name in ("adam", "adamw"):
        workload = facts.workload.model_copy(update={"optimizer": OPTIMIZERS["adamw-8bit"]})
        changed = _with(facts, workload=workload)
        yield from _verified("step with 8-bit AdamW", changed, policy, pins)


def _shorter_sequences(facts: Facts, policy: Policy, pins: Pins) -> Iterator[str]:
    """Half as long, a quarter ..., where the model can be counted at other lengths."""
    try:
        length = int(value(facts, Lever.SEQUENCE)) // 2
    except InputError:
        return
    while length >= TOKENS_STEP:
        changed = varied(facts, Lever.SEQUENCE, length)
        found = list(_verified(f"cut sequences to {length} tokens", changed, policy, pins))
        if found:
            yield from found
            return
        length //= 2


def _verified(change: str, facts: Facts, policy: Policy, pins: Pins) -> Iterator[str]:
    """`change` with the plan that is then taken; nothing where none fits or is legal."""
    try:
        found = decide(facts, policy=policy, pins=pins).winner
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
