"""A profile as if the model were built in bf16, beside the capture of one that is."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from profiles.capture.capture import capture
from profiles.model.profile import ModelProfile, Numerics
from profiles.workload.pure_bf16 import in_bf16
from tests.engines.cases import TinyGPT, token_loss
from tests.factories import chain

BATCH = torch.arange(32).reshape(2, 16), torch.arange(32).reshape(2, 16)


def captured(model: nn.Module) -> ModelProfile:
    kinds = (Numerics.AS_BUILT, Numerics.BF16)
    return capture(model, BATCH, loss_fn=token_loss, numerics=kinds[: 1 + is_fp32(model)])


def is_fp32(model: nn.Module) -> bool:
    return next(model.parameters()).dtype == torch.float32


@pytest.fixture(scope="module")
def pair() -> tuple[ModelProfile, ModelProfile]:
    """As said of a model in fp32, and as looked at."""
    said = in_bf16(captured(TinyGPT(layers=3)))
    assert said is not None
    return said, captured(TinyGPT(layers=3).bfloat16())


def test_parameters_and_gradients_are_those_of_a_model_in_bf16(
    pair: tuple[ModelProfile, ModelProfile],
) -> None:
    said, seen = pair
    assert said.dtype == seen.dtype == "bfloat16"
    for one, other in zip(said.units, seen.units, strict=True):
        assert one.name == other.name
        for name in ("parameter_bytes", "gradient_bytes", "shapes", "dtypes", "parameters"):
            assert getattr(one, name) == getattr(other, name)
        for layer, own in zip(
            one.cost(Numerics.AS_BUILT).layers, other.cost(Numerics.AS_BUILT).layers, strict=True
        ):
            for name in ("weight_bytes", "bias_bytes", "weight_gradient_bytes", "output_bytes"):
                assert getattr(layer, name) == getattr(own, name)


def test_so_are_its_costs(pair: tuple[ModelProfile, ModelProfile]) -> None:
    said, seen = pair
    for one, other in zip(said.blocks(), seen.blocks(), strict=True):
        cost, own = one.cost(Numerics.AS_BUILT), other.cost(Numerics.AS_BUILT)
        for name in ("forward_flop", "backward_flop", "activation_bytes", "forward_moved_bytes"):
            assert getattr(cost, name) == getattr(own, name)


def test_nothing_is_said_where_costs_in_bf16_are_not_known() -> None:
    assert in_bf16(chain()) is None
    assert in_bf16(captured(TinyGPT().bfloat16())) is None
