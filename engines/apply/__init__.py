"""`apply_plan`: a plan and a module in, a trainable parallel model out.

Lives here: the order of the steps (`steps`), one file for each of them, and the state that
they pass on (`build`). Must not: a mechanism itself, or a choice that the plan does not make.
"""

from engines.apply.plain import require_plain as require_plain
from engines.apply.proofs import Proofs as Proofs
from engines.apply.steps import apply_plan as apply_plan
