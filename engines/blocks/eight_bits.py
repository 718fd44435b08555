"""Products of linear layers in 8 bits, by torchao's `Float8Linear`, in place.

Layers stay the same objects, with the same parameters, names and hooks: their class becomes
torchao's. So they are split, sharded, recomputed and compiled as any other layer.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from importlib.util import find_spec

import torch
from torch import Tensor, nn

from engines.plan import Plan, Precision
from profiles.errors import PlanError
from profiles.model.profile import ModelProfile
from profiles.workload.eight_bits import MULTIPLE, NARROWEST, takes_eight_bits


def require_eight_bits(model: nn.Module, plan: Plan, *, profile: ModelProfile) -> None:
    """Refuse what legality cannot see: no torchao, no layer to multiply in 8 bits.

    Raises:
        PlanError: the plan is of `precision=fp8`, and nothing would be.
    """
    if plan.precision is not Precision.FP8:
        return
    if find_spec("torchao") is None:
        raise PlanError(
            "precision=fp8 multiplies by torchao, which is not installed",
            where=f"plan: {plan}",
            hints=["pip install torchao, or set precision=bf16"],
        )
    if not any(_layers(model, profile, tp=plan.tp)):
        raise PlanError(
            "precision=fp8 is for nn.Linear in blocks, of features that are a multiple of"
            f" {MULTIPLE}, {NARROWEST} at least{' on each tp rank' * (plan.tp > 1)}; this model has"
            " none",
            where=f"plan: {plan}",
            hints=["set precision=bf16"],
        )


def multiply_in_eight_bits(
    model: nn.Module, *, tp: int, profile: ModelProfile, device: torch.device
) -> None:
    """Let linear layers of blocks cast their factors to 8 bits, with one scale a tensor.

    Heads, routers and narrow layers stay in 16 bits. Without units for it (a CPU) the rounding is
    the same, and products are of what was rounded.
    """
    kind, settings = _float8_linear(device.type == "cpu")
    for layer in list(_layers(model, profile, tp=tp)):
        layer.__class__ = kind
        for name, value in settings.items():
            vars(layer).setdefault(name, value)


def _layers(model: nn.Module, profile: ModelProfile, *, tp: int) -> Iterator[nn.Linear]:
    for unit in profile.blocks():
        for layer in model.get_submodule(unit.name).modules():
            # A subclass may read its weight in another way.
            if type(layer) is not nn.Linear or layer.out_features in unit.experts:
                continue
            inputs, outputs = layer.in_features, layer.out_features
            if not (inputs % tp or outputs % tp) and takes_eight_bits(inputs // tp, outputs // tp):
                yield layer


@functools.cache
def _float8_linear(emulated: bool) -> tuple[type[nn.Linear], dict[str, object]]:
    """torchao's class, with the settings that one of its layers has beside a plain one's."""
    from torchao.float8 import Float8LinearConfig, convert_to_float8_training

    with torch.device("meta"):
        plain = nn.Linear(MULTIPLE, MULTIPLE)
    made = convert_to_float8_training(plain, config=Float8LinearConfig(emulate=emulated))
    settings = {name: value for name, value in vars(made).items() if name not in vars(plain)}
    torchaos: type[nn.Linear] = type(made)

    class Float8Linear(torchaos):  # type: ignore[valid-type, misc]
        def forward(self, input: Tensor) -> Tensor:
            kind = input.device.type
            if torch.is_autocast_enabled(kind):  # torchao asks for CUDA's alone
                input = input.to(torch.get_autocast_dtype(kind))
            output: Tensor = super().forward(input)
            return output

    return Float8Linear, settings
