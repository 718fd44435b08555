"""Dense gradients where collectives send flat messages: everywhere but between plain replicas."""

from __future__ import annotations

from collections.abc import Sequence

from torch import nn

from engines.plan import Plan
from profiles.errors import PlanError, a_type


def sends_flat(plan: Plan) -> bool:
    """True if gradients go in messages that hold no sparse ones."""
    return plan.data_parallel.is_sharded or plan.pp * plan.tp * plan.cp * plan.ep > 1


def require_dense(
    model: nn.Module, plan: Plan, sparse: Sequence[str], *, sparse_alone: str = ""
) -> None:
    """Require that gradients can be made dense, and stepped, if the plan needs it.

    Args:
        sparse: names of parameters with sparse gradients.
        sparse_alone: the reason why the optimizer steps no dense ones; empty if it does.

    Raises:
        PlanError: something else than an embedding makes a sparse gradient, or nothing steps them.
    """
    if not sends_flat(plan):
        return
    if sparse_alone:
        raise PlanError(
            sparse_alone,
            where=f"plan: {plan}",
            hints=["take torch.optim.Adam, or replicate (dp_replicate without zero)"],
        )
    for name in sparse:
        holder = model.get_submodule(name.rpartition(".")[0])
        if not isinstance(holder, nn.Embedding | nn.EmbeddingBag):
            raise PlanError(
                f"`{name}` has sparse gradients, made by {a_type(holder)}: the messages of"
                " this plan hold dense ones",
                where=f"plan: {plan}",
                hints=["make them with sparse=False, or replicate (dp_replicate without zero)"],
            )


def make_gradients_dense(model: nn.Module, plan: Plan) -> None:
    """Let embeddings have dense gradients, of the same values, if the plan needs them."""
    for module in model.modules() if sends_flat(plan) else ():
        if isinstance(module, nn.Embedding | nn.EmbeddingBag):
            module.sparse = False
