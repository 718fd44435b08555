"""Models that are under a plan: their modules are split, wrapped or hooked, and take no other."""

from __future__ import annotations

import weakref

from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

from engines.parallel import ParallelModel
from engines.plan import Plan
from profiles.errors import ModelError, a_type

_WRAPPED = (ParallelModel, FSDPModule, DistributedDataParallel)
_spread: weakref.WeakSet[nn.Module] = weakref.WeakSet()


def note_spread(model: nn.Module, plan: Plan) -> None:
    """Note the modules of a model to which `plan` was applied."""
    if plan.world_size > 1:
        _spread.update(model.modules())


def require_plain(model: nn.Module) -> None:
    """Require a model that autograd knows, and of which no part is under a plan.

    Raises:
        ModelError: one is, and which; or a parameter was made in inference mode.
    """
    inferred = next((n for n, p in model.named_parameters() if _is_for_inference(p)), None)
    if inferred is not None:
        raise ModelError(
            f"`{inferred}` was made in inference mode: no backward can save it",
            hints=[
                "build the model outside of `torch.inference_mode()`; `load_state_dict` takes the"
                " values of one that was built inside",
            ],
        )
    parts = model.named_modules()
    name = next((n for n, part in parts if isinstance(part, _WRAPPED) or part in _spread), None)
    if name is None and not any(isinstance(p, DTensor) for p in model.parameters()):
        return
    if not name:
        raise ModelError(
            f"the model is parallel already ({a_type(model)})",
            hints=["build it anew, and apply the plan to the plain module"],
        )
    raise ModelError(
        f"`{name}` in the model is parallel already ({a_type(model.get_submodule(name))}): another"
        " model under a plan has it too, and each would exchange its gradients",
        hints=[
            "apply one plan to a module that holds both models, and returns the loss of both",
            "or build it anew, and apply the plan to the plain module",
        ],
    )


def _is_for_inference(parameter: nn.Parameter) -> bool:
    return parameter.requires_grad and parameter.is_inference()
