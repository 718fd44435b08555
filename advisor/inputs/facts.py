"""Facts: model, cluster and workload, validated against each other."""

from __future__ import annotations

from typing import Any

from advisor.inputs.stacks import convolves_in_tf32
from engines.legality import numerics
from engines.plan import DataParallel, Plan, Precision
from profiles.errors import InputError, UnknownNameError
from profiles.machine.cluster import ClusterProfile
from profiles.model.profile import ModelProfile
from profiles.model.work import AttentionKernel
from profiles.record import Record
from profiles.workload.stack import TORCH, Stack
from profiles.workload.under_stack import (
    calls_processor,
    in_plain_fp32,
    on_device,
    under_stack,
)
from profiles.workload.workload import Workload

# torch/optim/adam.py, `_fused_adam`: profiles/workload/optimizers.py counts the same.
FUSED_ADAM_BYTES = 32


class Facts(Record):
    """All inputs of a decision.

    Attributes:
        model: with the kernels of `stack`.
        stack: the software that runs the step; stock torch under `engines` unless said.

    Raises:
        UnknownNameError: a precision that does not exist.
        InputError: the parts do not fit each other.
    """

    model: ModelProfile
    cluster: ClusterProfile
    workload: Workload
    stack: Stack = TORCH

    def __init__(
        self,
        *,
        model: ModelProfile | None = None,
        cluster: ClusterProfile | None = None,
        workload: Workload | None = None,
        stack: Stack = TORCH,
        **others: Any,
    ) -> None:
        given = {"model": model, "cluster": cluster, "workload": workload}
        parts: dict[str, Any] = {name: part for name, part in given.items() if part is not None}
        parts |= {"stack": stack, **others}  # pydantic names what is missing or unknown
        # Facts read from a file were already adapted to their stack when built.
        if (
            isinstance(model, ModelProfile)
            and isinstance(cluster, ClusterProfile)
            and isinstance(workload, Workload)
            and isinstance(stack, Stack)
        ):
            charged = on_device(model, is_processor=cluster.device.kind == "cpu")
            if cluster.device.kind != "cpu" and not convolves_in_tf32(stack, cluster.device):
                charged = in_plain_fp32(charged)
            parts["model"] = under_stack(charged, _on_device(stack, model, cluster))
            parts["workload"] = _updated_by(stack, workload)
            parts["stack"] = _with_moments(stack, workload)
        super().__init__(**parts)
        known = [precision.value for precision in Precision]
        if self.workload.precision not in known:
            raise UnknownNameError(
                "precision", self.workload.precision, known, where="workload: precision"
            )
        _require_units(self.model)
        _require_numerics(self.model, self.precision)

    def rebuilt(self, **changes: Any) -> Facts:
        """With other parts; stack, model and workload are adapted to each other again."""
        parts = {name: getattr(self, name) for name in type(self).model_fields}
        return Facts(**{**parts, **changes})

    @property
    def precision(self) -> Precision:
        """Precision of forward and backward."""
        return Precision(self.workload.precision)

    @property
    def tokens_per_sample(self) -> int | None:
        """Tokens of a sample: the workload's, else those of the model's sample."""
        return self.workload.tokens_per_sample or self.model.tokens_per_sample


def _updated_by(stack: Stack, workload: Workload) -> Workload:
    """Apply a fused optimizer kernel if the stack has one: torch's `fused=True` reads parameter,
    gradient and both moments and writes all but the gradient, 28 bytes and a copy of the weight."""
    optimizer = workload.optimizer
    if not stack.fused_optimizer or optimizer.name not in ("adam", "adamw"):
        return workload
    fused = {"moved_bytes_per_element": FUSED_ADAM_BYTES, "list_copies": 0.0}
    return workload.model_copy(update={"optimizer": optimizer.model_copy(update=fused)})


def _on_device(stack: Stack, model: ModelProfile, cluster: ClusterProfile) -> Stack:
    """Use the attention kernel that torch selects on accelerators for a model profiled on CPU:
    kernels that do not save scores and skip masked tiles."""
    device = cluster.device if isinstance(cluster, ClusterProfile) else None
    is_cpu = device is not None and device.kind == "cpu"
    if is_cpu or stack.attention is not None or not calls_processor(model):
        return stack
    # torch prefers cuDNN's kernel on Hopper (2.11 on an H200), which is of the third kind.
    is_later = device is not None and device.is_hopper_or_later
    kernel = AttentionKernel.FLASH3 if is_later else AttentionKernel.FLASH2
    flash = {"attention": kernel, "name": f"{stack.name} with {kernel} attention"}
    return stack.model_copy(update=flash)


def _with_moments(stack: Stack, workload: Workload) -> Stack:
    """Set the bytes of the optimizer's moments if its states are elementwise."""
    states, optimizer = stack.states, workload.optimizer
    if states is None or states.moments is not None or not optimizer.is_elementwise:
        return stack
    moments = {"moments": optimizer.state_bytes_per_element}
    return stack.model_copy(update={"states": states.model_copy(update=moments)})


def captured(plan: Plan, model: ModelProfile) -> bool:
    """Return True if the model was profiled under the numerics of `plan`."""
    return numerics(plan, model) in model.numerics


def _require_units(model: ModelProfile) -> None:
    if not model.units:
        raise InputError(
            f"the profile of {model.name} has no units: nothing was looked at",
            hints=["profile it with a sample: `advise profile MODEL -o model.json`"],
        )
    if model.parameters == 0:
        raise InputError(f"{model.name} has no parameters: there is nothing to spread")
    if model.gradient_bytes == 0:
        raise InputError(
            f"{model.name} has no trainable parameter: there is nothing to train",
            hints=["set requires_grad on the parameters that should learn"],
        )


def _require_numerics(model: ModelProfile, precision: Precision) -> None:
    """Require both 16-bit numerics of an fp32 model: cast by FSDP, and autocast by DDP."""
    if precision.dtype != model.dtype and model.dtype != "float32":
        raise InputError(
            f"precision {precision} needs a model built in {precision.dtype} or float32,"
            f" {model.name} is {model.dtype}",
            where="workload: precision",
            hints=[f"set the precision of the workload to match {model.dtype}"],
        )
    kinds = (DataParallel.REPLICATE, DataParallel.ZERO1)
    wanted = {numerics(Plan(data_parallel=kind, precision=precision), model) for kind in kinds}
    missing = sorted(wanted - set(model.numerics))
    if missing:
        raise InputError(
            f"the profile of {model.name} was not looked at in {' and '.join(missing)};"
            f" it has {', '.join(model.numerics)}",
            where=f"workload: precision = {precision}",
            hints=[
                f"leave the precision out: {model.dtype}, as it was profiled",
                "or profile the model itself with this precision among the numerics; networks on"
                " images are bundled by their layers' shapes in fp32 alone",
            ],
        )
