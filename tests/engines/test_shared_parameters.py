"""Parameters that are used outside of their module, or of its call, train like on one process."""

from __future__ import annotations

import pytest
from torch import nn

from engines.apply import Proofs
from engines.parallel import ParallelModel
from engines.parallel.parity import relative_errors
from engines.plan import Plan
from engines.tensor.proposal import propose_styles
from tests.engines.cases import Case, profile_of
from tests.engines.parity import local_rows, reference_loss, relative, spread
from tests.engines.shared_parameters import OUTSIDE
from tests.matrix.cell import TOLERANCE
from tests.nightly import half
from tests.workers import Pool

ROWS = 8
STAGES = "schedule=1f1b microbatches=2 stages=blocks.1"
PLANS = {
    "dp_replicate=2": 2,
    "dp_shard=2": 2,
    "tp=2": 2,
    f"pp=2 {STAGES}": 2,
    f"pp=2 dp_shard=2 {STAGES}": 4,
}
"""With their ranks."""


def _spread(case: Case, text: str) -> tuple[nn.Module, ParallelModel]:
    """Under the plan, with the split of layers that is proposed for it."""
    plan, model, batch = Plan.parse(text), case.build(), case.batch(2)
    if plan.tp == 1:
        return spread(case, text)
    profile = profile_of(case, model)
    split = propose_styles(model, batch, size=plan.tp, profile=profile, has_target=True)
    plan = plan.model_copy(update={"tensor_styles": split.styles})
    return spread(case, str(plan), proofs=Proofs(layers=split.proof))


def _errors(name: str, plan: str) -> tuple[float, float]:
    case = OUTSIDE[name]
    reference, parallel = _spread(case, plan)
    batch = case.batch(ROWS)
    wanted = reference_loss(reference, case, batch)
    wanted.backward()
    loss = parallel.forward_backward(local_rows(parallel, batch, ROWS))
    gradients = {n: p.grad for n, p in reference.named_parameters() if p.grad is not None}
    errors = relative_errors(parallel.full_gradients(), gradients)
    return relative(loss, wanted.detach()), max(errors.values())


EACH = [(name, plan) for name in OUTSIDE for plan in PLANS]


@pytest.mark.dist
@pytest.mark.parametrize(("name", "plan"), half(EACH, of=3))
def test_loss_and_gradients_are_those_of_one_process(name: str, plan: str, pool: Pool) -> None:
    for loss, gradient in pool.run(_errors, name, plan, world_size=PLANS[plan]):
        assert loss < TOLERANCE
        assert gradient < TOLERANCE
