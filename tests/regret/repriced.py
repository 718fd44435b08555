"""The report as today's code predicts and decides it, from the machines that it stores."""

from __future__ import annotations

from advisor.cost import CostModel
from advisor.decide.choose import choose
from advisor.decide.tree import in_leaf
from engines.plan import Plan
from tests.regret.cases import CASES
from tests.regret.decided import facts_of, proved_styles
from tests.regret.report import Report, Result


def repriced(report: Report) -> Report:
    """Every case that is still one, predicted anew, and decided anew."""
    results = tuple(
        repriced_case(result) if result.name in CASES else result for result in report.results
    )
    return report.model_copy(update={"results": results})


def repriced_case(result: Result) -> Result:
    """Predictions, leaf and dissent of today; the choice too, where it is a plan that was run."""
    case = CASES[result.name]
    facts = facts_of(case, result.cluster)
    decision, costs = choose(facts, styles=proved_styles(case, facts)), CostModel(facts)
    rows = []
    for row in result.rows:
        plan = Plan.parse(row.plan)
        cost = costs.estimate(plan)
        rows.append(
            row.model_copy(
                update={
                    "predicted_s": cost.step_s,
                    "predicted_peak_bytes": cost.peak_bytes,
                    "predicted_high_bytes": cost.peak_high_bytes,
                    "in_leaf": in_leaf(plan, decision.trace),
                }
            )
        )
    update: dict[str, object] = {
        "rows": tuple(rows),
        "leaf": decision.trace.leaf,
        "families": decision.trace.families,
        "dissent": decision.dissent,
    }
    taken = str(decision.plan)
    if taken != result.plans[0] and any(row.plan == taken for row in rows):
        others = tuple(plan for plan in result.plans if plan != taken)
        peak = next(row.peak_bytes for row in rows if row.plan == taken)
        failed = peak > result.limit_bytes
        update |= {"plans": (taken, *others), "again": (), "failed_for_memory": failed}
    return result.model_copy(update=update)
