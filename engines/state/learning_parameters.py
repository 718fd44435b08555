"""Parameters that learn, as the plan was applied to them: the training may freeze some, let frozen
ones learn, and give the optimizer further ones."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from operator import attrgetter

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from engines.plan import Plan
from profiles.errors import ModelError
from profiles.torch_compat import gradient_hooks

_LEARNS = attrgetter("requires_grad")
"""Asked of every parameter in every step, by `map`: a loop takes five times as long."""


class LearningParameters:
    """The parameters of a model by now: those that are frozen, and those that the optimizer has.

    Args:
        ddp_waits: every backward is to reach all that learns by now.

    Raises:
        ModelError: the optimizer has others, a loss function's say, whose gradients ranks would not
            exchange.
    """

    def __init__(
        self,
        named: Iterable[tuple[str, nn.Parameter]],
        optimizer: torch.optim.Optimizer,
        plan: Plan,
        *,
        ddp_waits: bool = False,
    ) -> None:
        self._optimizer, self._plan = optimizer, plan
        self._named = list(named)
        self._frozen = [(name, p) for name, p in self._named if not p.requires_grad]
        self._waited_for = {n: p for n, p in self._named if p.requires_grad and ddp_waits}
        shards = [(n, p) for n, p in self._named if isinstance(p, DTensor)]
        self._hooked = [(name, p, gradient_hooks(p)) for name, p in shards]
        self._stepped = {id(parameter) for parameter in self._in_groups()}
        self._require_own()

    def _require_own(self) -> None:
        known = {id(parameter) for _, parameter in self._named}
        others = [p for p in self._in_groups() if id(p) not in known and p.numel()]
        if others and (self._plan.data_degree > 1 or self._plan.pp > 1):
            raise ModelError(
                f"the optimizer has parameters that are not in the model: {len(others)}, the first"
                f" of shape {tuple(others[0].shape)}. Ranks would not exchange their gradients, and"
                " a checkpoint would not have them",
                where=f"plan: {self._plan}",
                hints=[
                    "a loss with parameters of its own is a part of the model: let its forward"
                    " take the target and return the loss (`loss_fn=None`)"
                ],
            )

    def require_known(self) -> None:
        """Require, before a step, that the optimizer has what learns by now, and nothing that the
        plan does not know: no rank would exchange its gradient. What DDP waits for must not be
        frozen: the gradients that share its message would not be exchanged. No hook may be new
        where the gradient of a shard would go past it.

        Raises:
            ModelError: there is such a parameter.
        """
        if not all(map(_LEARNS, self._waited_for.values())):
            name = next(n for n, p in self._waited_for.items() if not p.requires_grad)
            raise ModelError(
                f"`{name}` was frozen after the plan was applied: DDP waits for its gradient,"
                " and exchanges none of those beside it",
                where=f"plan: {self._plan}",
                hints=[
                    "a learning rate of 0, or no gradient (`parameter.grad = None` before the"
                    " step), leaves it as it is",
                    "or shard: `dp_shard` or `zero=1` allow it",
                ],
            )
        for name, shard, hooks in self._hooked:
            if gradient_hooks(shard) > hooks:
                raise ModelError(
                    f"`{name}` got a hook for its gradient after the plan was applied: those of"
                    " shards go past it, and it would never run",
                    where=f"plan: {self._plan}",
                    hints=[
                        "give it to the model before `auto_parallelize`",
                        "or change `parameter.grad` between the backward and the step",
                    ],
                )
        learning = [(n, p) for n, p in self._frozen if p.requires_grad and p.grad is not None]
        in_all = sum(len(group["params"]) for group in self._optimizer.param_groups)
        is_longer = in_all > len(self._stepped)
        if not learning and not is_longer:
            return
        known = {id(parameter) for _, parameter in self._named} | self._stepped
        in_groups = {id(parameter) for parameter in self._in_groups()}
        if self._plan.world_size > 1 and (foreign := len(in_groups - known)):
            raise ModelError(
                f"the optimizer has {foreign} parameters that were not in the model when the plan"
                " was applied: ranks would exchange neither them nor their gradients",
                where=f"plan: {self._plan}",
                hints=[
                    "build the model with all its parameters, and freeze what learns later",
                    "or save, and apply the plan to the changed model:"
                    " `torch.save(parallel.state_dict(), path)` on all ranks",
                ],
            )
        for name, parameter in learning:
            if id(parameter) not in in_groups:
                raise ModelError(
                    f"`{name}` learns by now, was frozen when the plan was applied, and the"
                    " optimizer does not have it: it would never be stepped",
                    where=f"plan: {self._plan}",
                    hints=[
                        "give it to the optimizer where it begins to learn:"
                        " `parallel.optimizer.add_param_group({'params': [...]})`",
                        "or freeze it after the plan was applied",
                    ],
                )

    def _in_groups(self) -> Iterator[torch.Tensor]:
        for group in self._optimizer.param_groups:
            yield from group["params"]
