"""Complete a plan from partial settings by rule, if no search can begin with them.

Settings that allow no legal plan are completed so that legality names the violated rule.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from math import inf
from typing import Any

from engines.legality.pipeline import pipeline
from engines.plan import PartialPlan, Plan, Precision, Schedule
from engines.tensor.token_rules import splits_tokens
from profiles.machine.cluster import ClusterProfile
from profiles.model.flow import GLUE, LOSS
from profiles.model.profile import ModelProfile

Styles = Callable[[int], tuple[tuple[str, str], ...]]
TWO_STAGES_A_RANK = (Schedule.INTERLEAVED, Schedule.ZBV)
# The bubble of a pipeline with p stages and m microbatches is (p - 1) / (m + p - 1) (GPipe,
# arXiv:1811.06965, which finds m = 4 p sufficient).
MICROBATCHES_A_STAGE = 4


def completed(
    partial: PartialPlan,
    model: ModelProfile,
    cluster: ClusterProfile,
    *,
    rows: int,
    styles: Styles,
) -> Plan:
    """Complete `partial` to a plan, which need not be legal.

    Devices that no degree uses hold replicas (DDP). A pipeline runs 1F1B; its stages share the FLOP
    as evenly as borders between units allow, and a replica's batch is split into at least four
    microbatches per stage, if possible.

    Args:
        rows: of the batch of one replica.
        styles: tensor styles by tp degree, used if `partial` has none.
    """
    settings = partial.fixed
    if not partial.fixes("dp_replicate", "dp_shard"):
        left = cluster.world_size - partial.extra_ranks
        settings["dp_replicate"] = max(1, left // partial.model_ranks)
    if partial.precision is None:
        same = [p for p in Precision if p.dtype == model.dtype]
        settings |= {"precision": same[0]} if same else {}
    if (partial.pp or 1) > 1:
        settings.setdefault("schedule", Schedule.ONE_F_ONE_B)
        settings.setdefault("microbatches", _microbatches(partial, rows))
    plan = Plan.build(settings, where="plan")
    update: dict[str, Any] = {}
    if plan.pp > 1 and not plan.stages:
        update["stages"] = even_stages(plan, model, cluster)
    if plan.tp > 1 and not plan.tensor_styles:
        update["tensor_styles"] = styles(plan.tp)
    if not partial.fixes("sequence_parallel"):
        update["sequence_parallel"] = splits_tokens(update.get("tensor_styles", ()))
    return plan.model_copy(update=update)


def even_stages(plan: Plan, model: ModelProfile, cluster: ClusterProfile) -> tuple[str, ...]:
    """Units that begin stages 1, 2, ..., minimizing the largest share of FLOP.

    Exact over all legal borders. If there are too few, all are used, so that legality names the
    rule.
    """
    count = plan.pp * (2 if plan.schedule in TWO_STAGES_A_RANK else 1)
    order = list(dict.fromkeys(c.unit for c in model.flow.calls if c.unit not in (GLUE, LOSS)))
    flop = {unit.name: unit.flop(model.samples) for unit in model.units}
    legal = [n for n in range(1, len(order)) if _is_border(order[n], model, cluster)]
    places = legal if len(legal) >= count - 1 else list(range(1, len(order)))
    ends = even_cuts([flop.get(unit, 0.0) for unit in order], places, count)
    return tuple(order[n] for n in ends)


def _is_border(unit: str, model: ModelProfile, cluster: ClusterProfile) -> bool:
    alone = Plan(pp=2, schedule=Schedule.GPIPE, stages=(unit,))
    return not any(pipeline(alone, model, cluster))


def even_cuts(costs: Sequence[float], places: Sequence[int], count: int) -> list[int]:
    """Split `costs` at `count` - 1 of `places`, minimizing the largest sum."""
    sums = [0.0]
    for cost in costs:
        sums.append(sums[-1] + cost)
    # best[n]: (largest share so far, cuts) with the last cut at n.
    best: dict[int, tuple[float, list[int]]] = {0: (0.0, [])}
    for _ in range(count - 1):
        further: dict[int, tuple[float, list[int]]] = {}
        for here in places:
            for before, (largest, cuts) in best.items():
                share = max(largest, sums[here] - sums[before])
                if before < here and share < further.get(here, (inf, []))[0]:
                    further[here] = (share, [*cuts, here])
        best = further or best
    last = min(best, key=lambda n: max(best[n][0], sums[-1] - sums[n]))
    return best[last][1]


def _microbatches(partial: PartialPlan, rows: int) -> int:
    """Fewest equal microbatches, at least four per stage, in multiples of pp; else the most
    possible."""
    pp, rounds = partial.pp or 1, partial.accumulation or 1
    if partial.schedule is Schedule.NAIVE:
        return 1
    fitting = [n for n in range(pp, rows + 1, pp) if rows % (n * rounds) == 0]
    enough = [n for n in fitting if n >= MICROBATCHES_A_STAGE * pp]
    return enough[0] if enough else fitting[-1] if fitting else pp
