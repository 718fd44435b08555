"""Values of a batch have names in any nesting, and copies of it keep its containers."""

from __future__ import annotations

from collections import OrderedDict, UserDict, namedtuple
from dataclasses import dataclass
from types import MappingProxyType

import pytest
import torch
from torch import Tensor, nn

from profiles.capture.batch.tree import batch_items, batch_tensors, describe, map_batch
from profiles.errors import BatchError

X = torch.ones(3, 2)
Pair = namedtuple("Pair", ["left", "right"])


@dataclass(frozen=True)
class Record:
    ids: Tensor
    note: str = "same"


class Own:
    def __init__(self) -> None:
        self.ids, self.note = X, "same"


@pytest.mark.parametrize(
    ("batch", "names"),
    [
        (X, ["input"]),
        ((X, 3), ["element 0", "element 1"]),
        ({"a": X, "b": None}, ["a", "b"]),
        ({"a": {"b": [X, X]}}, ["a.b[0]", "a.b[1]"]),
        (Pair(X, {"c": X}), ["left", "right.c"]),
        ((Record(X), X), ["element 0.ids", "element 0.note", "element 1"]),
        (Own(), ["ids", "note"]),
        (UserDict(a=(X,)), ["a[0]"]),
    ],
)
def test_leaves_have_the_names_under_which_a_model_gets_them(
    batch: object, names: list[str]
) -> None:
    assert [name for name, _ in batch_items(batch)] == names


@pytest.mark.parametrize(
    "batch",
    [
        X,
        (X, "text", 3),
        [X, None],
        {"a": X},
        OrderedDict(a=X),
        UserDict(a=X),
        Pair(X, X),
        Record(X),
        Own(),
        {"deep": [{"list": (X, [Pair(X, 1.5)])}]},
    ],
)
def test_a_copy_has_the_same_containers_and_leaves_the_batch_alone(batch: object) -> None:
    before = [id(value) for _, value in batch_items(batch)]
    made = map_batch(torch.neg, batch)
    assert type(made) is type(batch)
    assert [id(value) for _, value in batch_items(batch)] == before
    assert all(torch.equal(tensor, -X) for tensor in batch_tensors(made))
    others = [[v for _, v in batch_items(b) if not isinstance(v, Tensor)] for b in (batch, made)]
    assert others[0] == others[1]


def test_a_mapping_that_cannot_be_changed_becomes_a_dict() -> None:
    assert type(map_batch(torch.neg, MappingProxyType({"a": X}))) is dict


def test_containers_of_transformers_stay_what_they_are() -> None:
    transformers = pytest.importorskip("transformers")
    from transformers.modeling_outputs import BaseModelOutput

    encoding = map_batch(torch.neg, transformers.BatchEncoding({"input_ids": X}))
    assert isinstance(encoding, transformers.BatchEncoding)
    assert torch.equal(encoding.input_ids, -X)
    output = map_batch(torch.neg, BaseModelOutput(last_hidden_state=X))
    assert isinstance(output, BaseModelOutput)
    assert torch.equal(output.last_hidden_state, -X)
    assert output.hidden_states is None


def test_modules_are_not_gone_into() -> None:
    layer = nn.Linear(2, 2)
    assert map_batch(torch.neg, (layer, X))[0] is layer


@pytest.mark.parametrize(
    ("batch", "kind"), [(None, "a NoneType"), ("text", "a str"), (3, "an int")]
)
def test_what_no_model_can_be_given_is_refused(batch: object, kind: str) -> None:
    with pytest.raises(BatchError, match=f"{kind} is not a batch"):
        batch_items(batch)


def test_nested_tensors_are_described_by_their_rows() -> None:
    nested = torch.nested.nested_tensor([torch.ones(2, 4), torch.ones(3, 4)], layout=torch.jagged)
    assert describe((nested, X)) == "element 0: float32 nested, 2 rows, element 1: float32 (3, 2)"
