"""Policy: which plan, and why.

from advisor import advise, auto_parallelize
"""

from typing import TYPE_CHECKING

from profiles.lazy import attach

if TYPE_CHECKING:
    from advisor.auto.growing_batch import GrowingBatch as GrowingBatch
    from advisor.auto.memory_report import memory_report as memory_report
    from advisor.auto.parallelize import advise as advise
    from advisor.auto.parallelize import auto_parallelize as auto_parallelize
    from advisor.decide.decision import Decision as Decision
    from advisor.inputs.facts import Facts as Facts
    from advisor.inputs.policy import Policy as Policy
    from advisor.learning.run_log import keep_run as keep_run
    from engines.state.deferred import deferred as deferred

__getattr__, __dir__, __all__ = attach(
    __name__,
    {
        "Decision": "advisor.decide.decision",
        "Facts": "advisor.inputs.facts",
        "GrowingBatch": "advisor.auto.growing_batch",
        "Policy": "advisor.inputs.policy",
        "advise": "advisor.auto.parallelize",
        "auto_parallelize": "advisor.auto.parallelize",
        "deferred": "engines.state.deferred",
        "keep_run": "advisor.learning.run_log",
        "memory_report": "advisor.auto.memory_report",
    },
)
