"""Rows of a batch that act on each other: what a plan that cuts the batch does then.

Replicas train on the loss of their own rows each, as under plain DDP, and it is said. Microbatches
of the rows of one rank would change what it computes alone, so they are refused; unless
`loss_weight=` says that a microbatch's own loss is what is meant.
"""

from __future__ import annotations

import logging

from engines.data.loss_rule import LossParts
from engines.plan import Plan
from profiles.errors import BatchError

log = logging.getLogger(__name__)


def require_no_coupling(doubt: str, plan: Plan, *, is_said: bool, warns: bool) -> None:
    """Raise or warn where the losses of parts of a batch make up that of the whole by no rule.

    Args:
        doubt: see `LossParts.doubt_of`; "" where there is a rule.
        is_said: the weight of a part's loss was given.
        warns: this rank says it, and has not said it before.

    Raises:
        BatchError: the plan runs a rank's rows in several microbatches.
    """
    if not doubt or plan.data_degree * plan.forwards == 1:
        return
    why = "Rows of a batch act on each other, or it is a mean over something else"
    if plan.forwards > 1 and not is_said:
        raise BatchError(
            f"{doubt}. {why}: a step in {plan.forwards} microbatches is not that of the whole"
            " batch",
            where=f"plan: {plan}",
            hints=[
                "keep a rank's rows in one piece: microbatches=1 accumulation=1, in a pipeline"
                " with schedule=naive",
                "`loss_weight=` says what the loss is a mean over, or that each microbatch is to"
                " train on its own loss: `lambda batch: len(batch[0])`",
            ],
        )
    if warns:
        log.warning(
            "%s. %s. Each of the %d parts of a global batch trains on the loss of its own rows, as"
            " under plain DDP: that is not what one process computes. `loss_weight=` says what the"
            " loss is a mean over, `batch_dims=` which dimension is the batch; tp leaves a batch in"
            " one piece",
            doubt,
            why,
            plan.data_degree * plan.forwards,
        )


def warn_of_state(parts: LossParts, plan: Plan) -> None:
    """Warn where a forward changes what later ones compute with, and not as that of a whole batch
    would: see `LossParts`. Of batch norms it is said by `engines.data.batch_norm`."""
    state, count = parts.state, plan.data_degree * plan.forwards
    if parts.state_of_rows and count > 1:
        follow = ", and buffers follow the first replica's" if plan.data_degree > 1 else ""
        log.warning(
            "%s. Each of the %d parts of a global batch does so by its own rows%s, as under plain"
            " DDP: that is not what one process computes. tp leaves a batch in one piece",
            parts.state_of_rows,
            count,
            follow,
        )
        return
    if state and plan.forwards > 1:
        log.warning(
            "%s. Each of the %d microbatches of a step does so, as under plain accumulation of"
            " gradients: a step over the whole batch does it once. microbatches=1 accumulation=1"
            " (in a pipeline with schedule=naive) is that step",
            state,
            plan.forwards,
        )
