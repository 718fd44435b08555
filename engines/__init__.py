"""Mechanisms: a plan and a module in, a trainable parallel model out. Engines never choose."""

from typing import TYPE_CHECKING

from profiles.lazy import attach

if TYPE_CHECKING:
    from engines.apply import apply_plan as apply_plan
    from engines.legality import Problem as Problem
    from engines.legality import problems as problems
    from engines.parallel import ParallelModel as ParallelModel
    from engines.plan import Plan as Plan
    from engines.plan import load_plan as load_plan

__getattr__, __dir__, __all__ = attach(
    __name__,
    {
        "ParallelModel": "engines.parallel",
        "Plan": "engines.plan",
        "Problem": "engines.legality",
        "apply_plan": "engines.apply",
        "load_plan": "engines.plan",
        "problems": "engines.legality",
    },
)
