"""The batch protocol: what is called with what, and what is refused."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from torch import Tensor, nn

from profiles.capture.batch import batch_size, call_model, find_loss, loss_of, map_batch, split_rows
from profiles.errors import BatchError, ModelError


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
    assert loss_of(X, {"x": X, "y": Y}, lambda output, batch: batch["y"].sum()) == 6


@pytest.mark.parametrize(
    "output",
    [torch.tensor(2.0), {"loss": torch.tensor(2.0)}, SimpleNamespace(loss=torch.tensor(2.0))],
)
def test_a_models_own_loss_is_found(output: object) -> None:
    assert loss_of(output, X, None) == 2


@pytest.mark.parametrize("output", [X, {"logits": X}, SimpleNamespace(loss=None), (X, X), None])
def test_a_model_without_a_loss_is_recognised(output: object) -> None:
    assert find_loss(output) is None
    with pytest.raises(ModelError, match=r"the model returns no loss"):
        loss_of(output, X, None)


def test_rows_are_cut_as_views_and_add_up() -> None:
    first, empty, last = split_rows({"x": X, "y": Y, "flag": True}, [2, 0, 1])  # type: ignore[dict-item]
    assert (batch_size(first), batch_size(empty), batch_size(last)) == (2, 0, 1)
    assert first["x"].data_ptr() == X.data_ptr()
    assert torch.equal(torch.cat([part["y"] for part in (first, empty, last)]), Y)
    assert last["flag"] is True
    with pytest.raises(BatchError, match=r"3 rows cannot be cut into 2 \+ 2"):
        split_rows(X, [2, 2])


def test_a_batch_keeps_its_arrangement() -> None:
    assert isinstance(map_batch(torch.neg, X), Tensor)
    assert isinstance(map_batch(torch.neg, [X, Y]), tuple)
    assert list(map_batch(torch.neg, {"a": X, "b": Y})) == ["a", "b"]


@pytest.mark.parametrize(
    ("batch", "message"),
    [
        ({"x": X, "y": Y[:2]}, r"first dimensions differ: x has 3, y has 2"),
        ((X, torch.tensor(1.0)), r"`element 1` has no dimensions"),
        ((X, [Y]), r"`element 1` is a list"),
        ((), r"the batch holds no tensor"),
        ("text", r"a str is not a batch"),
    ],
)
def test_unusable_batches_are_refused_by_name(batch: object, message: str) -> None:
    with pytest.raises(BatchError, match=message):
        batch_size(batch)  # type: ignore[arg-type]
