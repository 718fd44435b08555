"""Policy: which plan, and why.

from advisor import advise, auto_parallelize
"""

from typing import TYPE_CHECKING

from profiles.lazy import attach

if TYPE_CHECKING:
    from advisor.auto import advise as advise
    from advisor.auto import auto_parallelize as auto_parallelize
    from advisor.decision import Decision as Decision
    from advisor.facts import Facts as Facts
    from advisor.growing_batch import GrowingBatch as GrowingBatch
    from advisor.held import memory_report as memory_report
    from advisor.policy import Policy as Policy
    from advisor.runs import keep_run as keep_run

__getattr__, __dir__, __all__ = attach(
    __name__,
    {
        "Decision": "advisor.decision",
        "Facts": "advisor.facts",
        "GrowingBatch": "advisor.growing_batch",
        "Policy": "advisor.policy",
        "advise": "advisor.auto",
        "auto_parallelize": "advisor.auto",
        "keep_run": "advisor.runs",
        "memory_report": "advisor.held",
    },
)
