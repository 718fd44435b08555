"""The finals of a case: which plans live side by side, and what their turns came to."""

from __future__ import annotations

from advisor.cost import CostModel
from engines.plan import Plan
from tests.regret.report import Result

FINAL_RATIO = 1.6
"""Plans in the finals are so much slower than the best at most."""
FINAL_STATES_BYTES = 6 * 2**30
"""Of all finalists on all ranks."""


def finalists(result: Result, costs: CostModel, *, most: int) -> list[str]:
    """The chosen plan, the fastest that fit, and the chosen one again."""
    fitting = [row for row in result.rows if row.peak_bytes <= result.limit_bytes]
    fitting.sort(key=lambda row: row.step_s)
    if not fitting or result.chosen is None or result.failed_for_memory:
        return []

    def states_bytes(text: str) -> float:
        return costs.estimate(Plan.parse(text)).states_bytes * result.cluster.world_size

    chosen = result.chosen.plan
    names, nbytes = [chosen], 2 * states_bytes(chosen)
    for row in fitting:
        nbytes += states_bytes(row.plan)
        is_slow = row.step_s > FINAL_RATIO * fitting[0].step_s
        if row.plan == chosen or is_slow:
            continue
        if len(names) == most or nbytes > FINAL_STATES_BYTES:
            break
        names.append(row.plan)
    return [*names, chosen]


def with_finals(result: Result, names: list[str], seconds: list[list[float]]) -> Result:
    """`result` with the seconds of finalists' steps; the last is the chosen plan again."""
    if not names:
        return result
    final = dict(zip(names[:-1], seconds[:-1], strict=True))
    rows = [
        row.model_copy(update={"seconds": tuple(final[row.plan]), "is_final": True})
        if final.get(row.plan)
        else row
        for row in result.rows
    ]
    return result.model_copy(update={"rows": tuple(rows), "again": tuple(seconds[-1])})
