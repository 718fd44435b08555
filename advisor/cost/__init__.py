"""Cost: predicted time and memory of a plan. `estimate` is a pure function of plan and facts."""

from __future__ import annotations

from advisor.cost.breakdown import Estimate, Memory, StageEstimate, Time, Traffic
from advisor.cost.calibration import CALIBRATION, Calibration
from advisor.cost.model import CostModel
from advisor.inputs.facts import Facts
from engines.plan import Plan

__all__ = [
    "CALIBRATION",
    "Calibration",
    "CostModel",
    "Estimate",
    "Memory",
    "StageEstimate",
    "Time",
    "Traffic",
    "estimate",
]


def estimate(plan: Plan, facts: Facts, calibration: Calibration = CALIBRATION) -> Estimate:
    """Estimate memory, time and traffic of `plan`. It must be legal and name its microbatch size.

    Stage borders that it leaves open share the FLOP evenly.

    Raises:
        PlanError: the microbatch size is open.
    """
    return CostModel(facts, calibration).estimate(plan)
