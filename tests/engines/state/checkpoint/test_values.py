"""Values of state dicts as JSON: what comes back, and what is refused."""

from __future__ import annotations

import json
import random
from collections import Counter, deque
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

from engines.state.checkpoint.values import decode, encode
from profiles.errors import FileError, InputError

LEAVES = st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text()
LEAVES |= st.binary()
KEYS = st.text() | st.integers() | st.tuples(st.integers(), st.text())
VALUES = st.recursive(
    LEAVES,
    lambda inner: (
        st.lists(inner)
        | st.lists(inner).map(tuple)
        | st.lists(inner).map(deque)
        | st.dictionaries(KEYS, inner)
    ),
)


def through_a_file(value: object) -> Any:
    tensors: dict[str, Tensor] = {}
    text = json.dumps(encode(value, "x", tensors), allow_nan=False)
    return decode(json.loads(text), tensors.__getitem__)


@given(VALUES)
def test_values_come_back_as_they_were(value: object) -> None:
    back = through_a_file(value)
    assert back == value
    assert type(back) is type(value)


@pytest.mark.parametrize(
    "value", [{1, 2}, Counter("abca"), float("inf"), torch.bfloat16, torch.device("cpu"), {"$a": 1}]
)
def test_types_that_json_lacks_come_back(value: object) -> None:
    assert through_a_file(value) == value


def test_random_states_come_back() -> None:
    back = through_a_file((random.getstate(), np.random.get_state(), torch.get_rng_state()))
    assert back[0] == random.getstate()
    random.setstate(back[0])
    np.random.set_state(back[1])
    assert torch.equal(back[2], torch.get_rng_state())


@pytest.mark.parametrize(
    "name", ["StepLR", "MultiStepLR", "CosineAnnealingLR", "OneCycleLR", "ReduceLROnPlateau"]
)
def test_states_of_torchs_schedulers_come_back(name: str) -> None:
    settings = {"step_size": 2} if name == "StepLR" else {}
    settings |= {"milestones": [1, 3]} if name == "MultiStepLR" else {}
    settings |= {"T_max": 9} if name == "CosineAnnealingLR" else {}
    settings |= {"max_lr": 0.1, "total_steps": 9} if name == "OneCycleLR" else {}
    optimizer = torch.optim.SGD(nn.Linear(2, 2).parameters(), lr=0.1, momentum=0.5)
    state = getattr(torch.optim.lr_scheduler, name)(optimizer, **settings).state_dict()
    assert through_a_file(state) == state


def test_a_value_of_another_type_is_refused_with_its_place() -> None:
    with pytest.raises(InputError, match=r"`x\.hook\.1` is a function"):
        encode({"hook": [1, lambda: None]}, "x", {})


@pytest.mark.parametrize("value", [{"$eval": "1"}, {"$dtype": "load"}, {"$bytes": 3}, {"$dict": 1}])
def test_tags_that_nobody_wrote_are_refused(value: object) -> None:
    with pytest.raises(FileError, match="in a checkpoint"):
        decode(value, {}.__getitem__)
