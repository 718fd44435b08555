"""The batch protocol: what is called with what, and what is refused."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from torch import Tensor, nn

from profiles.capture.batch.call import call_model, find_loss, loss_of
from profiles.errors import ModelError


class Echo(nn.Module):
    def forward(self, *args: Tensor, **kwargs: Tensor) -> tuple[object, ...]:
        return (*args, *kwargs.items())


X, Y = torch.arange(6.0).reshape(3, 2), torch.tensor([1, 2, 3])


def test_a_tuple_gives_its_inputs_and_keeps_its_target() -> None:
    assert call_model(Echo(), (X, X, Y), has_target=True) == (X, X)
    assert call_model(Echo(), [X, Y], has_target=True)[0] is X
    assert len(call_model(Echo(), (X, Y), has_target=False)) == 2


def test_a_tensor_is_the_only_input_and_a_mapping_gives_keyword_arguments() -> None:
    assert call_model(Echo(), X, has_target=False)[0] is X
    assert call_model(Echo(), {"x": X}, has_target=True) == (("x", X),)


def test_the_loss_function_gets_the_target_or_the_whole_mapping() -> None:
    assert loss_of(X, (X, Y), lambda output, target: target.sum()) == 6
    assert loss_of(X, (X, X, X, Y), lambda output, target: target.sum()) == 6
    assert loss_of(X, {"x": X, "y": Y}, lambda output, batch: batch["y"].sum()) == 6


@pytest.mark.parametrize(
    "output",
    [
        torch.tensor(2.0),
        {"loss": torch.tensor(2.0)},
        SimpleNamespace(loss=torch.tensor(2.0)),
        (torch.tensor(2.0), X),
    ],
)
def test_a_models_own_loss_is_found(output: object) -> None:
    assert loss_of(output, X, None) == 2


@pytest.mark.parametrize("output", [X, {"logits": X}, SimpleNamespace(loss=None), (X, X), None])
def test_a_model_without_a_loss_is_recognised(output: object) -> None:
    assert find_loss(output) is None
    with pytest.raises(ModelError, match=r"the model returns no loss"):
        loss_of(output, X, None)


class OfOne(nn.Module):
    def forward(self, batch: object) -> object:
        return batch


class OfKeys(nn.Module):
    def forward(self, x: Tensor, mask: Tensor | None = None) -> object:
        return ("x", x, mask)


@pytest.mark.parametrize("has_target", [True, False])
def test_a_forward_of_one_argument_gets_the_mapping_or_the_object_whole(has_target: bool) -> None:
    whole = {"x": X, "y": Y}
    assert call_model(OfOne(), whole, has_target=has_target) is whole
    own = SimpleNamespace(x=X)
    assert call_model(OfOne(), own, has_target=has_target) is own
    assert call_model(OfOne(), ({"x": X}, Y), has_target=True) == {"x": X}


def test_keys_that_the_forward_does_not_take_are_for_the_loss_alone() -> None:
    batch = {"x": X, "y": Y}
    assert call_model(OfKeys(), batch, has_target=True) == ("x", X, None)
    with pytest.raises(TypeError, match="y"):  # without a loss function nobody takes it
        call_model(OfKeys(), batch, has_target=False)


def test_a_loss_function_gets_an_object_whole() -> None:
    own = SimpleNamespace(y=Y)
    assert loss_of(X, own, lambda output, batch: batch.y.sum()) == 6
