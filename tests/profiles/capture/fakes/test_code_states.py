"""A look at a model leaves nothing in its code: globals, classes, closures, remembered results."""

from __future__ import annotations

import functools
import itertools
import random
import sys
from collections.abc import Callable, Iterator
from queue import SimpleQueue
from typing import Any, ClassVar

import pytest
import torch
from torch import Tensor, nn

from profiles.capture.capture import capture
from profiles.capture.fakes.tensors import stand_ins
from profiles.errors import ModelError

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


class Meter:
    """Counts its calls."""

    def __init__(self) -> None:
        self.count, self.past = 0, [0]

    def tick(self) -> int:
        self.count += 1
        self.past.append(self.count)
        return self.count + len(self.past)


METER = Meter()
LOSSES = 0


def of_global() -> Callable[[], float]:
    return lambda: METER.tick()


def of_object() -> Callable[[], float]:
    meter = Meter()
    return lambda: meter.tick()


def of_method() -> Callable[[], float]:
    return Meter().tick


def of_partial() -> Callable[[], float]:
    def tick(past: list[int], meter: Meter) -> float:
        past.append(1)
        return len(past) + meter.tick()

    return functools.partial(tick, [], Meter())


def of_draws() -> Callable[[], float]:
    python, torchs = random.Random(3), torch.Generator().manual_seed(3)
    return lambda: python.random() + torch.rand((), generator=torchs).item()


def of_iterators() -> Callable[[], float]:
    counts, cycled = {"all": itertools.count()}, itertools.cycle([1.0, 2.0, 4.0])
    number = itertools.count(7).__next__

    def tick(every: Iterator[float] = map(float, itertools.count(5))) -> float:  # noqa: B008
        return next(counts["all"]) + next(cycled) + next(every) + number()

    return tick


def of_bound_iterator() -> Callable[[], float]:
    return itertools.count(3).__next__


TICKS = [of_global, of_object, of_method, of_partial, of_draws]
if sys.version_info < (3, 14):
    TICKS += [of_iterators, of_bound_iterator]


class Scaled(nn.Module):
    """A layer times a number, of a function that it has as an attribute or that is its hook."""

    def __init__(self, tick: Callable[[], float], *, is_hook: bool) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        if is_hook:
            self.linear.register_forward_hook(lambda _m, _a, output: output * tick())
        else:
            self.tick = tick

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.linear(x)
        return out * self.tick() if hasattr(self, "tick") else out


@pytest.mark.parametrize("make", TICKS)
@pytest.mark.parametrize("is_hook", [False, True])
@pytest.mark.parametrize("copies", [False, True])
def test_objects_generators_and_iterators_that_code_leads_to_are_put_back(
    make: Callable[[], Callable[[], float]], is_hook: bool, copies: bool
) -> None:
    METER.count, METER.past = 0, [0]
    first = 3.0 if make is of_global else make()()
    model, x = Scaled(make(), is_hook=is_hook), torch.ones(2, 4)
    for _ in range(2):
        if copies:
            with stand_ins([model], copies=True):
                model(x)
                model(x)
        else:
            capture(model, x)
    scale = model(x) / nn.functional.linear(x, model.linear.weight, model.linear.bias)
    assert scale.mean().item() == pytest.approx(first, rel=1e-4)


def _loss_of_a_global(output: Tensor, target: Tensor) -> Tensor:
    global LOSSES
    LOSSES += 1
    return (output - target).square().mean() * LOSSES


class Annealed:
    """A loss with a step of its own."""

    def __init__(self) -> None:
        self.step = 0

    def __call__(self, output: Tensor, target: Tensor) -> Tensor:
        self.step += 1
        return (output - target).square().mean() * self.step


def test_what_a_loss_counts_is_put_back() -> None:
    annealed = Annealed()
    for loss_fn in (_loss_of_a_global, annealed, annealed.__call__, functools.partial(annealed)):
        capture(nn.Linear(4, 2), (torch.ones(2, 4), torch.ones(2, 2)), loss_fn=loss_fn)
    assert (LOSSES, annealed.step) == (0, 0)


def test_a_generator_that_a_forward_takes_from_is_refused() -> None:
    scales = (float(number) for number in range(100))
    with pytest.raises(ModelError, match=r"takes from the iterator `.*<genexpr>`"):
        capture(Scaled(lambda: next(scales), is_hook=False), torch.ones(2, 4))


def test_a_generator_that_no_forward_takes_from_may_be_there() -> None:
    model = Scaled(of_object(), is_hook=False)
    model.rows = (number for number in range(3))  # type: ignore[assignment]
    capture(model, torch.ones(2, 4))
    assert next(model.rows) == 0  # type: ignore[call-overload]


def test_code_that_was_run_without_a_module_of_python_is_followed() -> None:
    names: dict[str, Any] = {"calls": []}
    text = "def loss(output, target):\n    calls.append(1)\n    return output.mean()"
    exec(text, names)  # noqa: S102
    assert names["loss"].__module__ is None
    sample = torch.randn(2, 4), torch.randn(2, 4)
    assert capture(nn.Linear(4, 4), sample, loss_fn=names["loss"]).parameters == 20
    assert names["calls"] == []
