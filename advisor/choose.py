"""choose: facts and policy in, decision out."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import islice

import numpy as np

from advisor.candidates import refuse, searched
from advisor.comparison import Kind, best_of, compare, kind, nearest_miss, shape, title
from advisor.cost import CostModel
from advisor.decision import Alternative, Decision
from advisor.facts import Facts
from advisor.policy import Objective, Policy
from advisor.reasons import reasons
from advisor.rules import Candidate, host_bytes_per_node, margin_s, simplicity
from advisor.search.legal import Styles
from advisor.search.search import Search
from advisor.search.space import Pins
from advisor.tree import Trace, in_leaf
from advisor.walk import walk
from engines.plan import Offload
from profiles.errors import InputError, NoPlanError, PlanError
from profiles.model import Numerics
from profiles.optimizers import OPTIMIZERS
from profiles.provenance import Quantity, Source
from profiles.units import format_gib, format_percent, format_seconds

_DEFAULT = Policy()
_NO_PINS: Pins = {}
# Changes shown when nothing fits: enough to choose from, few enough to read.
_CHANGES_SHOWN = 3
# So many plans are all estimated, a fraction of a second: then what is said of them is complete.
_FEW_ROWS = 256


@dataclass(frozen=True, slots=True)
class Choice:
    """What was weighed, and what was taken of it.

    Attributes:
        winner: None where nothing fits.
        weighed: the plans that were estimated exactly: all that an answer depends on. `pool` are
            those that fit and that the winner was taken from, `fitting` all that fit.
        total: plans that were weighed, most of them by their bounds alone.
        rejected: by rule, how many of them cannot be taken.
    """

    winner: Candidate | None
    pool: Sequence[Candidate]
    fitting: Sequence[Candidate]
    weighed: Sequence[Candidate]
    trace: Trace
    total: int
    rejected: dict[str, int]


def choose(
    facts: Facts,
    *,
    policy: Policy = _DEFAULT,
    pins: Pins = _NO_PINS,
    styles: Styles | None = None,
) -> Decision:
    """The plan for these facts, with the argument for it: see `decide`.

    Raises:
        PlanError: `pins` allow no legal plan.
        NoPlanError: there are legal plans and none fits.
    """
    choice = decide(facts, policy=policy, pins=pins, styles=styles, compares=True)
    winner, weighed, trace = choice.winner, choice.weighed, choice.trace
    if winner is None:
        raise _no_plan(facts, policy, pins, choice)
    others = _alternatives(weighed, winner, policy, trace)
    return Decision(
        plan=winner.plan,
        estimate=winner.estimate,
        facts=facts,
        policy=policy,
        pins=dict(pins),
        reasons=tuple(reasons(winner, weighed, choice.pool, facts, policy, trace)),
        trace=trace,
        alternatives=tuple(others[: policy.alternatives]),
        weighed=choice.total,
        estimated=len(weighed),
        rejected=choice.rejected,
        dissent=_dissent(winner, choice.fitting, policy, trace),
    )


def decide(
    facts: Facts,
    *,
    policy: Policy = _DEFAULT,
    pins: Pins = _NO_PINS,
    styles: Styles | None = None,
    compares: bool = False,
) -> Choice:
    """The plan for these facts: deterministic, nothing else is looked at.

    Every legal plan is weighed, most of them by lower bounds (`advisor.search`). The tree's leaf
    says which families come first; the fastest plan of them that fits is taken, the simpler one on
    a tie. States go to the host only where nothing else fits.

    Args:
        styles: how layers are split over a tp axis of some size; by default what the profile alone
            tells (`advisor.styles`).
        compares: also estimate the best plan of every other kind.

    Raises:
        PlanError: `pins` allow no legal plan.
    """
    costs = CostModel(facts)
    searches = [searched(facts, pins, costs, policy, styles=styles)]
    if not len(searches[0].space):
        raise refuse(facts, pins)
    trace = walk(costs, policy)
    winner = _winner(searches[0], policy, trace)
    if winner is None and "offload" not in pins and facts.cluster.device.kind != "cpu":
        # A CPU rank's device memory is the host's already.
        to_host = searched(facts, pins, costs, policy, styles=styles, offload=Offload.STATES)
        searches.append(to_host)
        winner = _winner(searches[1], policy, trace)
    for search in searches:
        if winner is None:
            search.nearest(search.rows)
        elif compares:
            _compare_kinds(search, winner)
    weighed = [candidate for search in searches for candidate in search.weighed]
    fitting = [c for c in weighed if c.fits]
    of_leaf = [c for c in fitting if in_leaf(c.plan, trace)]
    follows = policy.objective is Objective.TREE and bool(of_leaf)
    return Choice(
        winner=winner,
        pool=of_leaf if follows else fitting,
        fitting=fitting,
        weighed=weighed,
        trace=trace,
        total=sum(len(search.space) for search in searches),
        rejected=dict(sorted(sum((s.left_out for s in searches), Counter()).items())),
    )


def _winner(search: Search, policy: Policy, trace: Trace) -> Candidate | None:
    """Of the tree's families where one of their plans fits and the policy follows it."""
    if policy.objective is Objective.TREE:
        of_leaf = [rows for plan, rows in search.kinds() if in_leaf(plan, trace)]
        found = search.preferred(np.concatenate(of_leaf)) if of_leaf else None
        if found is not None:
            return found
    return search.preferred(search.rows)


def _compare_kinds(search: Search, winner: Candidate) -> None:
    """Estimate what the winner is set against: few rows all, else the best of every kind."""
    if len(search.space) <= _FEW_ROWS:
        search.weigh_all()
        return
    for _, rows in search.kinds():
        search.strongest(search.besides(rows, winner.plan))


def _alternatives(
    weighed: Sequence[Candidate], winner: Candidate, policy: Policy, trace: Trace
) -> list[Alternative]:
    """The best plan of every other kind, and of the winner's kind with other degrees."""
    kinds: dict[Kind, list[Candidate]] = {}
    for candidate in weighed:
        if shape(candidate.plan) != shape(winner.plan):
            kinds.setdefault(kind(candidate.plan), []).append(candidate)
    found = []
    for group in kinds.values():
        best = _strongest(group, policy)
        verdict, because = compare(best, winner, policy, trace)
        found.append(
            Alternative(
                title=title(best.plan),
                plan=best.plan,
                verdict=verdict,
                step_s=best.estimate.step_s if best.fits else None,
                peak_bytes=best.estimate.peak_bytes,
                peak_high_bytes=best.estimate.peak_high_bytes,
                because=because,
            )
        )
    found.sort(key=lambda a: (a.step_s is None, a.step_s or a.peak_high_bytes, a.title))
    return found


def _strongest(group: list[Candidate], policy: Policy) -> Candidate:
    """What speaks most against the winner: the fastest that fits (the smallest, if that counts)."""
    if policy.objective is Objective.TREE:
        policy = policy.model_copy(update={"objective": Objective.TIME})
    return best_of(group, policy)


def _dissent(
    winner: Candidate, fitting: Sequence[Candidate], policy: Policy, trace: Trace
) -> str | None:
    """A plan that the tree passes over and that is faster by more than the range."""
    outside = [c for c in fitting if not in_leaf(c.plan, trace)]
    if policy.objective is not Objective.TREE or not outside:
        return None
    fastest = min(outside, key=lambda c: (c.estimate.step_s, simplicity(c.plan), str(c.plan)))
    gain = winner.estimate.step_s - fastest.estimate.step_s
    if gain <= margin_s(fastest.estimate, winner.estimate, policy):
        return None
    return (
        f"{title(fastest.plan)} is predicted {format_percent(gain / winner.estimate.step_s)} faster"
        f" ({format_seconds(fastest.estimate.step_s)}) although the tree passes it over:"
        " `--objective time` takes it"
    )


def _no_plan(facts: Facts, policy: Policy, pins: Pins, choice: Choice) -> NoPlanError:
    """What was tried, the nearest miss, and changes that the cost model says would help."""
    counts = ", ".join(f"{count} by `{rule}`" for rule, count in choice.rejected.items())
    nearest = nearest_miss(choice.weighed)
    because = nearest.finding.because if nearest.finding else ""
    changes = list(islice(_changes(facts, policy, pins, nearest), _CHANGES_SHOWN))
    return NoPlanError(
        f"nothing fits: {choice.total} plans were weighed and left out ({counts})",
        where=f"nearest: {title(nearest.plan)} ({nearest.plan})\n{because}",
        hints=changes,
    )


def _changes(facts: Facts, policy: Policy, pins: Pins, nearest: Candidate) -> Iterator[str]:
    """Changes that make something fit, cheapest first, each tried."""
    for key, value in pins.items():
        others = {name: kept for name, kept in pins.items() if name != key}
        yield from _verified(f"leave `{key}={value}` open", facts, policy, others)
    if facts.workload.precision == "fp32" and Numerics.BF16 in facts.model.numerics:
        workload = facts.workload.model_copy(update={"precision": "bf16"})
        changed = _try_facts(facts, workload=workload)
        if changed is not None:
            yield from _verified("compute in bf16 (`--precision bf16`)", changed, policy, pins)
    if facts.workload.optimizer.whole_because:
        workload = facts.workload.model_copy(update={"optimizer": OPTIMIZERS["adamw"]})
        changed = _try_facts(facts, workload=workload)
        if changed is not None:
            name = facts.workload.optimizer.name
            words = f"step with AdamW, which can be sharded, in place of {name}"
            yield from _verified(words, changed, policy, pins)
    yield from _more_devices(facts, policy, pins)
    yield from _more_memory(facts, policy, pins, nearest)


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
        changed = Facts(model=facts.model, cluster=larger, workload=workload)
        grows = f" and a global batch of {wanted}" if wanted != batch else ""
        found = list(_verified(f"take {count} {name}{grows}", changed, policy, pins))
        if found:
            yield from found
            return


def _more_memory(facts: Facts, policy: Policy, pins: Pins, nearest: Candidate) -> Iterator[str]:
    """Devices (or nodes, for offloaded states) with as much memory as the nearest miss needs."""
    cluster, device = facts.cluster, facts.cluster.device
    if nearest.finding is not None and nearest.finding.rule == "fits-host":
        needed = host_bytes_per_node(nearest.estimate, cluster)
        needed /= 1 - policy.host_headroom_fraction
        memory = Quantity(value=needed, source=Source.ASSUMED)
        larger = cluster.model_copy(update={"host_memory_bytes": memory})
        change = f"take nodes with {format_gib(needed)} of main memory"
    else:
        needed = nearest.estimate.peak_high_bytes / (1 - policy.headroom_fraction)
        memory = device.memory_bytes.model_copy(update={"value": needed})
        larger = cluster.model_copy(
            update={"device": device.model_copy(update={"memory_bytes": memory})}
        )
        change = f"take devices with {format_gib(needed)} of memory"
    changed = Facts(model=facts.model, cluster=larger, workload=facts.workload)
    yield from _verified(change, changed, policy, pins)


def _try_facts(facts: Facts, **changes: object) -> Facts | None:
    try:
        return Facts.build({**_parts(facts), **changes})
    except InputError:
        return None


def _parts(facts: Facts) -> dict[str, object]:
    return {"model": facts.model, "cluster": facts.cluster, "workload": facts.workload}


def _verified(change: str, facts: Facts, policy: Policy, pins: Pins) -> Iterator[str]:
    try:
        best = decide(facts, policy=policy, pins=pins).winner
    except PlanError:
        return
    if best is not None:
        yield (
            f"{change}: {title(best.plan)} then needs up to"
            f" {format_gib(best.estimate.peak_high_bytes)},"
            f" step {format_seconds(best.estimate.step_s)}"
        )
