"""AdamW for parameters in bf16, by compensated sums in place of copies in fp32."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor

from profiles.errors import InputError

_STATES = ("exp_avg", "exp_avg_sq", "lost", "lost_sq")


class CompensatedAdamW(torch.optim.Optimizer):
    """AdamW of which rounding takes nothing.

    In bf16 an update is often smaller than half the distance of two neighbours, and so is a
    thousandth of a second moment: a plain sum stays where it is. Here what a sum loses is kept
    beside it in the same dtype and added with its next change (Kahan; arXiv:2010.06192), so
    that 16 bits of a parameter count, not 8. Parameters, gradients and states take 12 bytes an
    element; fp32 parameters that are cast to bf16 in the forward take 16.

    Replicas stay equal, as nothing is drawn: stochastic rounding would need the same numbers on all
    of them.

    Args:
        params: in bf16 or more.
        lr, betas, eps, weight_decay: as `torch.optim.AdamW`'s.

    Raises:
        InputError: a parameter in fp16, in which second moments below 6e-8 are 0.
    """

    def __init__(
        self,
        params: Iterable[Tensor] | Iterable[dict[str, Any]],
        lr: float | Tensor = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 1e-2,
    ) -> None:
        defaults = {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay}
        super().__init__(params, defaults)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """See `torch.optim.Optimizer`."""
        super().add_param_group(param_group)
        if any(each.dtype == torch.float16 for each in self.param_groups[-1]["params"]):
            raise InputError(
                "CompensatedAdamW keeps second moments in the dtype of a parameter: in float16"
                " those below 6e-8 are 0",
                hints=["build the model in bfloat16, or in float32 for precision=fp16"],
            )

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Update every parameter that has a gradient; returns what `closure` does."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    self._update(parameter, parameter.grad, group)
        return loss

    def _update(self, parameter: Tensor, given: Tensor, group: dict[str, Any]) -> None:
        state = self.state[parameter]
        if not state:
            state["step"] = torch.zeros(())
            state.update((name, torch.zeros_like(parameter)) for name in _STATES)
        state["step"] += 1
        step, (beta1, beta2) = state["step"].item(), group["betas"]
        gradient = _wide(given)
        average = _wide(state["exp_avg"]).lerp_(gradient, 1 - beta1)
        state["exp_avg"].copy_(average)
        square = _sum(state["exp_avg_sq"], state["lost_sq"])
        square.lerp_(gradient.square_(), 1 - beta2)
        denominator = (square / (1 - beta2**step)).sqrt_().add_(group["eps"])
        _store(square, state["exp_avg_sq"], state["lost_sq"])
        total = _sum(parameter, state["lost"]).mul_(1 - group["lr"] * group["weight_decay"])
        total.addcdiv_(average.mul_(group["lr"] / (1 - beta1**step)), denominator, value=-1)
        _store(total, parameter, state["lost"])


def _wide(value: Tensor) -> Tensor:
    """A copy in fp32, or in the dtype of `value` if that is wider."""
    return value.to(torch.promote_types(value.dtype, torch.float32), copy=True)


def _sum(value: Tensor, lost: Tensor) -> Tensor:
    return _wide(value).add_(lost)


def _store(total: Tensor, value: Tensor, lost: Tensor) -> None:
    """Write a sum to `value`, and what its dtype cannot hold to `lost`."""
    value.copy_(total)
    lost.copy_(total.sub_(value))
