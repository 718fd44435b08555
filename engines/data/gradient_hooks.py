"""Hooks on gradients of parameters, where a plan cuts the batch: each runs on the gradient of a
part, before those of the others are added.

A mask or a factor may do so. A bound on the elements gives another sum, as under plain DDP, and it
is said. A hook that steps an optimizer would do so with one rank's gradient: replicas come apart.
"""

from __future__ import annotations

import logging
from itertools import chain
from typing import NamedTuple

import torch
from torch import Tensor, nn

from engines.plan import Plan
from profiles.capture.fakes.code_states import unchanged_code
from profiles.capture.fakes.tensors import preserved_random_state
from profiles.capture.frames import summary
from profiles.errors import PlanError
from profiles.torch_compat import gradient_hooks_of, has_gradient_hooks

log = logging.getLogger(__name__)

SIZES = (1e-3, 1.0, 1e3)
"""Of the gradients that are tried: a bound changes the large ones alone."""


class HookTrial(NamedTuple):
    """Names of parameters whose hooks step them, or take their gradient away, and whose hooks make
    of the gradient of a batch another than of its parts; "" for none."""

    stepped_by_hook: str = ""
    bent_by_hook: str = ""


def tried_hooks(model: nn.Module, plan: Plan) -> HookTrial:
    """Run the hooks on gradients that are made up; only where the plan cuts a batch."""
    trial = HookTrial()
    if _parts(plan) == 1:
        return trial
    for name, parameter in model.named_parameters():
        if not parameter.requires_grad or parameter.is_meta or not has_gradient_hooks(parameter):
            continue
        try:
            with unchanged_code(chain(*gradient_hooks_of(parameter))), preserved_random_state():
                is_bent = _is_bent(parameter, sums=plan.forwards > 1)
        except _SteppedError:
            return HookTrial(stepped_by_hook=name)
        except Exception as error:  # of the user's code
            log.info("hooks of `%s` are not tried: %s", name, summary(error))
        else:
            if is_bent and not trial.bent_by_hook:
                trial = HookTrial(bent_by_hook=name)
    return trial


def require_hooks_of_parts(trial: HookTrial, plan: Plan, *, warns: bool) -> None:
    """Raise or warn where hooks do not go with parts of a batch.

    Raises:
        PlanError: a hook steps its parameter.
    """
    if trial.stepped_by_hook:
        raise PlanError(
            f"a hook changes `{trial.stepped_by_hook}` itself, or takes its gradient away, as soon"
            " as a backward has made it: before the gradients of the other parts of the batch are"
            " added",
            where=f"plan: {plan}",
            hints=[
                "leave the hook out and give the optimizer: `auto_parallelize(..., optimizer=)`",
                "or take a plan that leaves a batch in one piece: tp=2",
            ],
        )
    if trial.bent_by_hook and warns:
        log.warning(
            "a hook on the gradient of `%s` makes of the whole gradient another than of its parts"
            " (a bound on its elements, say). Each of the %d parts of a global batch goes through"
            " it alone, as under plain DDP: that is not what one process computes. Change gradients"
            " between the backward and the step, or by `max_grad_norm=`; tp leaves a batch in one"
            " piece",
            trial.bent_by_hook,
            _parts(plan),
        )


def _parts(plan: Plan) -> int:
    """Parts of a global batch: rows of replicas, microbatches, tokens of ranks that share them."""
    return plan.data_degree * plan.forwards * plan.cp


class _SteppedError(Exception):
    pass


@torch.no_grad()
def _is_bent(parameter: nn.Parameter, *, sums: bool) -> bool:
    """True if the hooked mean of two gradients is not the mean of both hooked; or the sum, where
    gradients are added up on a rank (what a hook adds to each would be in it several times)."""
    drawn = torch.Generator().manual_seed(0)
    share = 1.0 if sums else 0.5
    for size in SIZES:
        first, second = (
            (torch.randn(parameter.shape, generator=drawn) * size).to(parameter) for _ in range(2)
        )
        parts = (_hooked(parameter, first) + _hooked(parameter, second)) * share
        whole = _hooked(parameter, (first + second) * share)
        if not torch.allclose(whole, parts, rtol=1e-3, atol=1e-4 * size, equal_nan=True):
            return True
    return False


def _hooked(parameter: nn.Parameter, gradient: Tensor) -> Tensor:
    """Run the hooks on a gradient, on a copy of the parameter's values.

    Raises:
        _SteppedError: these changed, or the gradient is gone.
    """
    torch.manual_seed(0)
    before, after = gradient_hooks_of(parameter)
    for hook in before:
        changed = hook(gradient)
        gradient = gradient if changed is None else changed
    values, left = parameter.data, parameter.grad
    parameter.data, parameter.grad = values.clone(), gradient.clone()
    try:
        for hook in after:
            hook(parameter)
        if parameter.grad is None or not torch.equal(parameter.data, values):
            raise _SteppedError
        return parameter.grad
    finally:
        parameter.data, parameter.grad = values, left
