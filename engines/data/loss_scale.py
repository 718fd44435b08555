"""Loss scaling: gradients that fp16 would round to zero, moved to where it has numbers.

Numbers of fp16 end at 65,504 and below at 2^-24, and gradients of activations are often smaller.
So the loss is multiplied by a scale, which multiplies all gradients, and what is summed over ranks
and microbatches in fp32 is divided by it before it is clipped and stepped by (Micikevicius et al.
2018, arXiv:1710.03740, section 3.2). The scale is as large as gradients allow: torch's GradScaler
halves it where one overflows, leaves that step out, and doubles it after 2,000 without.

All ranks learn of an overflow by the mean of losses (`engines.data.finite`): scales stay equal.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from engines.data.gradients import local_gradients
from profiles.errors import PlanError
from profiles.torch_compat import scale_all

NAME = "loss_scale"
"""Of the scale in checkpoints."""

_STATE = {
    "scale": "scale",
    "growth_factor": "growth_factor",
    "backoff_factor": "backoff_factor",
    "growth_interval": "growth_interval",
    "_growth_tracker": "growth_tracker",
}
"""Names in states of torch.amp.GradScaler, and here."""


class LossScaler:
    """The scale of the losses of a model's steps, and of the gradients that it has.

    Args:
        is_on: False scales nothing, as plans do that compute in fp32 or bf16.

    Attributes:
        scale: of the next loss; 1 where it is off.
        growth_factor, backoff_factor: of the scale, after `growth_interval` finite steps and after
            one that is not.
        growth_tracker: finite steps since the scale changed.
    """

    def __init__(self, module: nn.Module, *, is_on: bool) -> None:
        self._module = module
        self._is_scaled = False
        self.is_on = is_on
        self.scale = 2.0**16 if is_on else 1.0
        self.growth_factor, self.backoff_factor, self.growth_interval = 2.0, 0.5, 2000
        self.growth_tracker = 0

    def begin(self) -> float:
        """The factor of a loss, before its backward. Gradients that were divided by it, and that
        the backward adds to, are multiplied again."""
        if self.is_on and not self._is_scaled:
            self._multiply(self.scale)
            self._is_scaled = True
        return self.scale

    def unscaled(self, loss: Tensor) -> Tensor:
        """A loss that was multiplied by the scale, without it."""
        return loss / self.scale if self.is_on else loss

    def unscale(self) -> None:
        """Divide the gradients by the scale, once all of them are there.

        Raises:
            PlanError: they are of a loss that was not multiplied by it.
        """
        if not self.is_on:
            return
        if not self._is_scaled:
            raise PlanError(
                "gradients of a loss that was not scaled: fp16 rounds small ones to zero",
                where="precision=fp16",
                hints=[
                    "write `parallel.scale_loss(loss).backward()`, in place of a GradScaler",
                    "or `parallel.train_step(batch)`, which scales by itself",
                ],
            )
        self._multiply(1 / self.scale)
        self._is_scaled = False

    def update(self, *, is_finite: bool) -> None:
        """Follow a step whose gradients are finite on all ranks, or on one are not."""
        if not self.is_on:
            return
        if not is_finite:
            self.scale *= self.backoff_factor
            self.growth_tracker = 0
            return
        self.growth_tracker += 1
        if self.growth_tracker == self.growth_interval:
            grown = self.scale * self.growth_factor
            self.scale = grown if grown <= torch.finfo(torch.float32).max else self.scale
            self.growth_tracker = 0

    def state_dict(self) -> dict[str, Any]:
        """The state, as that of torch.amp.GradScaler."""
        return {name: getattr(self, own) for name, own in _STATE.items()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from a state of this class, or of torch.amp.GradScaler."""
        for name, own in _STATE.items():
            setattr(self, own, state[name])

    @torch.no_grad()
    def _multiply(self, factor: float) -> None:
        gradients = list(local_gradients(self._module.named_parameters()).values())
        if gradients:
            scale_all(gradients, factor)
