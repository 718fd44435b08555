"""Legality: what is possible, stated once; candidates are made by it and engines guarded by it.

Lives here: one file of rules per mechanism, each yielding a `Problem` for what is in the way, and
`problems`, which asks them all. Must not: torch, work on a model, or a choice between plans.
"""

from engines.legality.problem import Problem as Problem
from engines.legality.problems import numerics as numerics
from engines.legality.problems import problems as problems
from engines.legality.problems import require_legal as require_legal
from engines.legality.problems import scales_loss as scales_loss
