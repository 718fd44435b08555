"""A look at a model leaves nothing in its code: globals, classes, closures, remembered results."""

from __future__ import annotations

import functools
import random
from collections.abc import Callable
from queue import SimpleQueue
from typing import Any, ClassVar

import pytest
import torch
from torch import Tensor, nn

from profiles.capture.capture import capture
from profiles.capture.fakes.tensors import stand_ins

MASKS: dict[int, Tensor] = {}
PAST: list[list[int]] = [[0]]
DRAWS = random.Random(3)
MEAN = torch.ones(4)
CALLS = 0


@functools.lru_cache
def ramp(size: int) -> Tensor:
    return torch.linspace(0.5, 1.5, size)


@functools.lru_cache
def pair(size: int) -> dict[str, list[Tensor]]:
    return {"both": [torch.ones(size), torch.zeros(size)]}


@functools.lru_cache(None)
def said_once(words: str) -> None:
    SAID.put(words)


SAID: SimpleQueue[str] = SimpleQueue()


def noted(x: Tensor, seen: list[int] = []) -> Tensor:  # noqa: B006
    seen.append(len(x))
    noted.calls = getattr(noted, "calls", 0) + 1  # type: ignore[attr-defined]
    return x * noted.calls  # type: ignore[attr-defined]


def counter() -> Callable[[], int]:
    count = 0
    past: list[int] = []

    def tick() -> int:
        nonlocal count
        count += 1
        past.append(count)
        return count + len(past)

    return tick


class Outgoing(nn.Module):
    """A forward whose state lies outside of it."""

    calls = 0
    tables: ClassVar[dict[int, Tensor]] = {}

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.tick = counter()

    @functools.lru_cache  # noqa: B019
    def own_ramp(self, size: int) -> Tensor:
        return torch.linspace(1.0, 2.0, size)

    def forward(self, x: Tensor) -> Tensor:
        global CALLS
        CALLS += 1
        Outgoing.calls += 1
        PAST[0].append(CALLS)
        MEAN.mul_(0.5)
        if 4 not in MASKS:
            MASKS[4] = torch.ones(4)
        if not hasattr(Outgoing, "scale"):
            Outgoing.scale = torch.ones(4)  # type: ignore[attr-defined]
        self.tables.setdefault(4, torch.ones(4))
        of_class = self.tables[4] * Outgoing.scale  # type: ignore[attr-defined]
        said_once("slow")
        x = x + pair(4)["both"][0]
        x = self.linear(noted(x)) * MASKS[4] * of_class * ramp(4) * self.own_ramp(4)
        return x * self.tick() * DRAWS.random() * len(PAST[0]) * Outgoing.calls


def _state(model: Outgoing) -> list[Any]:
    return [
        CALLS,
        Outgoing.calls,
        dict(MASKS),
        dict(Outgoing.tables),
        hasattr(Outgoing, "scale"),
        [list(each) for each in PAST],
        MEAN.tolist(),
        DRAWS.getstate(),
        ramp.cache_info().currsize,
        pair.cache_info().currsize,
        Outgoing.own_ramp.cache_info().currsize,
        list(noted.__defaults__ or ()),
        dict(vars(noted)),
    ]


@pytest.fixture
def model() -> Outgoing:
    for each in (ramp, pair, said_once):
        each.cache_clear()
    return Outgoing()


def test_a_capture_leaves_no_state_and_no_fake_tensor_in_code(model: Outgoing) -> None:
    before = _state(model)
    capture(model, torch.randn(3, 4))
    assert _state(model) == before
    assert model.tick() == 2  # its first call
    assert not isinstance(ramp(4), torch._subclasses.FakeTensor)


def test_what_is_said_once_is_said_once(model: Outgoing) -> None:
    before = SAID.qsize()
    for _ in range(2):
        capture(model, torch.randn(3, 4))
    assert SAID.qsize() == before + 1


def test_copies_that_compute_leave_no_state_in_code(model: Outgoing) -> None:
    before = _state(model)
    with stand_ins([model], copies=True):
        model(torch.randn(3, 4))
        assert _state(model) != before
    assert _state(model) == before


def test_results_that_were_remembered_before_are_remembered_where_none_is_new(
    model: Outgoing,
) -> None:
    known = ramp(4)
    with stand_ins([model], copies=True):
        model(torch.randn(3, 4))
    assert ramp(4) is known
