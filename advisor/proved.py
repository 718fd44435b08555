"""A decision that splits layers, with the split proved on the model itself."""

from __future__ import annotations

import logging

from torch import nn

from advisor.choose import choose
from advisor.cost import estimate
from advisor.decision import Decision
from engines.tensor.proposal import propose_styles
from profiles.batch import Batch
from profiles.errors import PlanError

log = logging.getLogger(__name__)


def with_proved_styles(
    decision: Decision, model: nn.Module, sample: Batch, *, has_target: bool
) -> Decision:
    """A split of layers that was weighed from the profile alone, as it is proved on the model.

    Where the model cannot be split after all, the best plan that does not split it.
    """
    plan, facts = decision.plan, decision.facts
    if plan.tp == 1 or "tensor_styles" in decision.pins:
        return decision
    try:
        proposal = propose_styles(
            model, sample, size=plan.tp, profile=facts.model, has_target=has_target
        )
    except PlanError as error:
        if "tp" in decision.pins:
            raise
        log.info("tensor parallel: %s", error.what)
        return choose(facts, policy=decision.policy, pins={**decision.pins, "tp": 1})
    plan = plan.model_copy(update={"tensor_styles": proposal.styles})
    return decision.model_copy(update={"plan": plan, "estimate": estimate(plan, facts)})
