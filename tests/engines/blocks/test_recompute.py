"""Recompute in stateful blocks and in copies: as if nothing had run twice."""

from __future__ import annotations

import copy
import random
from collections import deque
from types import MethodType
from typing import NamedTuple

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils.parametrizations import spectral_norm

from engines.plan import Plan
from profiles.errors import ModelError, PlanError
from tests.engines.cases import CASES, Case
from tests.engines.parity import (
    gradient_error,
    local_rows,
    parallelize,
    reference_loss,
    relative,
    sgd,
    spread,
)
from tests.workers import Pool


def _statistics_after_steps(plan: str) -> dict[str, Tensor]:
    """Running statistics of all batch norms, most of which are inside blocks."""
    case, _, parallel = parallelize("resnet-batch-norm", plan)
    for rows in (8, 6):
        parallel.train_step(local_rows(parallel, case.batch(rows), rows))
    return {name: buffer.clone() for name, buffer in parallel.module.named_buffers()}


@pytest.mark.dist
@pytest.mark.parametrize("recompute", ["full", "selective"])
def test_recompute_counts_batch_statistics_once(pool: Pool, recompute: str) -> None:
    plain, *_ = pool.run(_statistics_after_steps, "dp_replicate=2", world_size=2)
    plan = f"dp_replicate=2 recompute={recompute}"
    buffers, *_ = pool.run(_statistics_after_steps, plan, world_size=2)
    assert "layers.0.norm1.running_var" in buffers
    assert plain.keys() == buffers.keys()
    for name, buffer in buffers.items():
        assert torch.equal(buffer, plain[name]), name
        assert not name.endswith("num_batches_tracked") or buffer == 2


class Spectral(nn.Module):
    """A power iteration moves the vectors of the norm in every training forward."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = spectral_norm(nn.Linear(6, 12))
        self.out = nn.Linear(12, 6)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.out(torch.relu(self.inner(x)))


class Scaled(nn.Module):
    """Divides by a running scale that it updates first, and counts its forwards."""

    def __init__(self) -> None:
        super().__init__()
        self.out = nn.Linear(6, 6)
        self.register_buffer("scale", torch.ones(6))
        self.register_buffer("forwards", torch.zeros((), dtype=torch.long))

    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            with torch.no_grad():
                self.scale.lerp_(x.abs().mean((0, 1)), 0.1)
                self.forwards.add_(1)
        return x + self.out(torch.tanh(x / self.scale))


class Replacing(nn.Module):
    """Replaces a buffer and a number, and counts in a vector, before it uses them."""

    def __init__(self) -> None:
        super().__init__()
        self.out, self.heat = nn.Linear(6, 6), 1.0
        self.register_buffer("mean", torch.zeros(6))
        self.register_buffer("seen", torch.zeros(2, dtype=torch.long))

    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            self.mean = 0.9 * self.mean + 0.1 * x.detach().mean((0, 1))
            self.seen += 1
            self.heat *= 0.9
        return x + self.out(torch.tanh((x - self.mean) * self.seen[0] * self.heat))


class Collecting(nn.Module):
    """Computes with what it has put into a list, a dict and a queue so far."""

    def __init__(self) -> None:
        super().__init__()
        self.out = nn.Linear(6, 6)
        self.register_buffer("forwards", torch.zeros((), dtype=torch.long))
        self.means: list[Tensor] = []
        self.counts = {"forwards": 0}
        self.last: deque[float] = deque([1.0], maxlen=2)

    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            self.means.append(x.detach().mean((0, 1)))
            self.counts["forwards"] += 1
            self.last.append(0.5 * self.last[-1])
            self.forwards.fill_(self.counts["forwards"])
        x = x - torch.stack(self.means).mean(0) * self.last[0]
        return x + self.out(torch.tanh(x * (1 + self.counts["forwards"])))


class Cache:
    """A class of the user's own."""

    def __init__(self) -> None:
        self.calls, self.scale = 0, torch.tensor(1.0)
        self.by_kind: dict[str, list[Tensor]] = {"means": [torch.zeros(6)]}

    def add(self, x: Tensor) -> Tensor:
        self.calls += 1
        self.scale = 0.5 * self.scale
        self.by_kind["means"][0].add_(x.detach().mean((0, 1)))
        self.by_kind["means"].append(x.detach().square().mean((0, 1)))
        return self.calls + self.scale + torch.stack(self.by_kind["means"]).sum(0)


class Caching(nn.Module):
    """Computes with what it keeps in an object (numbers, tensors, lists in a dict), with an array
    and with draws from a generator of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.out, self.caches = nn.Linear(6, 6), [Cache()]
        self.counts, self.noise = np.zeros(1), torch.Generator().manual_seed(1)
        self.register_buffer("forwards", torch.zeros((), dtype=torch.long))

    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            self.counts += 1
            x = x * float(self.counts[0]) + torch.rand(6, generator=self.noise)
            x = x + self.caches[0].add(x)
            self.forwards.fill_(self.caches[0].calls)
        return x + self.out(torch.tanh(x))


class Place(NamedTuple):
    calls: list[int]
    scale: Tensor


class Nesting(nn.Module):
    """Computes with what it counts and scales in a tuple."""

    def __init__(self) -> None:
        super().__init__()
        self.out = nn.Linear(6, 6)
        self.places = ({"calls": [0]}, Place([0], torch.ones(6)))
        self.register_buffer("forwards", torch.zeros((), dtype=torch.long))

    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            counts, place = self.places
            counts["calls"].append(len(counts["calls"]))
            place.calls[0] += 1
            place.scale.mul_(0.9)
            x = x * sum(counts["calls"]) + place.calls[0] * place.scale.clone()
            self.forwards.fill_(place.calls[0])
        return x + self.out(torch.tanh(x))


class Stack(nn.Module):
    def __init__(self, kind: type[nn.Module]) -> None:
        super().__init__()
        self.blocks = nn.Sequential(*(kind() for _ in range(3)))
        self.head = nn.Linear(6, 5)

    def forward(self, x: Tensor) -> Tensor:
        logits: Tensor = self.head(self.blocks(x)[:, -1])
        return logits


STATEFUL = {
    "spectral-norm": Spectral,
    "running-scale": Scaled,
    "replacing": Replacing,
    "collecting": Collecting,
    "caching": Caching,
    "nesting": Nesting,
}


def _stateful(kind: str, plan: str) -> tuple[float, list[float], list[str]]:
    """Errors of gradients and of all states after two steps on the same rows on every rank."""
    case = Case(lambda: Stack(STATEFUL[kind]), CASES["lstm"].batch, CASES["lstm"].loss_fn)
    reference, parallel = spread(case, plan)
    optimizer = sgd(list(reference.parameters()))
    errors = []
    for rows in (4, 3):
        batch = case.batch(rows)
        reference_loss(reference, case, batch).backward()
        parallel.forward_backward(batch)  # the same rows everywhere: buffers are one process's
        errors.append(gradient_error(parallel, reference))
        for each in (optimizer, parallel.optimizer):
            each.step()
            each.zero_grad()
    got, wanted = parallel.state_dict(), reference.state_dict()
    assert list(got) == list(wanted)
    counters = [n for n in wanted if not wanted[n].is_floating_point()]
    wrong = [n for n in counters if not torch.equal(got[n], wanted[n])]
    return max(errors), [relative(got[n], wanted[n]) for n in wanted if n not in counters], wrong


@pytest.mark.dist
@pytest.mark.parametrize("recompute", ["none", "full", "selective"])
@pytest.mark.parametrize("kind", ["spectral-norm", "running-scale"])
@pytest.mark.parametrize("plan", ["dp_replicate=1", "dp_replicate=2", "dp_shard=2"])
def test_recompute_restores_buffers_that_a_block_changes(
    pool: Pool, plan: str, kind: str, recompute: str
) -> None:
    size = Plan.parse(plan).world_size
    results = pool.run(_stateful, kind, f"{plan} recompute={recompute}", world_size=size)
    for gradient, states, wrong_counters in results:
        assert gradient < 1e-5
        assert max(states) < 1e-5
        assert wrong_counters == []


@pytest.mark.parametrize("kind", ["replacing", "collecting", "caching", "nesting"])
@pytest.mark.parametrize("recompute", ["none", "full", "selective"])
def test_recompute_restores_what_a_block_replaces_or_counts(recompute: str, kind: str) -> None:
    gradient, states, wrong_counters = _stateful(kind, f"recompute={recompute}")
    assert gradient < 1e-5
    assert max(states) < 1e-5
    assert wrong_counters == []


def _dropout(recompute: str) -> dict[str, Tensor]:
    class Dropping(nn.Sequential):
        def __init__(self) -> None:
            super().__init__(nn.Linear(6, 6), nn.Dropout(0.3), nn.GELU())

    case = Case(lambda: Stack(Dropping), CASES["lstm"].batch, CASES["lstm"].loss_fn)
    _, parallel = spread(case, f"dp_replicate=1 recompute={recompute}")
    torch.manual_seed(5)
    parallel.forward_backward(case.batch(8))
    return parallel.full_gradients()


@pytest.mark.parametrize("recompute", ["full", "selective"])
def test_recompute_repeats_the_dropout_mask(recompute: str) -> None:
    plain, actual = _dropout("none"), _dropout(recompute)
    assert all(torch.equal(actual[n], plain[n]) for n in plain)


class Noisy(nn.Module):
    """Multiplies by numbers that Python and numpy draw."""

    def __init__(self) -> None:
        super().__init__()
        self.out = nn.Linear(6, 6)

    def forward(self, x: Tensor) -> Tensor:
        noise = torch.from_numpy(np.random.rand(6)).float() + torch.tensor(random.random())
        return x + torch.tanh(self.out(x)) * noise


def _noisy(recompute: str) -> tuple[dict[str, Tensor], list[float]]:
    case = Case(lambda: Stack(Noisy), CASES["lstm"].batch, CASES["lstm"].loss_fn)
    _, parallel = spread(case, f"dp_replicate=1 recompute={recompute}")
    random.seed(5)
    np.random.seed(5)
    parallel.forward_backward(case.batch(8))
    return parallel.full_gradients(), [random.random(), np.random.rand()]


@pytest.mark.parametrize("recompute", ["full", "selective"])
def test_recompute_repeats_the_draws_of_python_and_numpy(recompute: str) -> None:
    (plain, following), (actual, after) = _noisy("none"), _noisy(recompute)
    assert all(torch.equal(actual[n], plain[n]) for n in plain)
    assert after == following


SEEN: list[Tensor] = []


class Hoarding(nn.Module):
    """Attends to everything that was ever given, which it keeps where no module is: in time."""

    hoards = False

    def __init__(self) -> None:
        super().__init__()
        self.out = nn.Linear(6, 6)

    def forward(self, x: Tensor) -> Tensor:
        if not self.hoards:
            return x + self.out(x)
        SEEN.append(self.out(x))
        keys = torch.cat(SEEN, 1)
        if len(SEEN) > 1:
            keys = keys[:, -2 * x.shape[1] :]  # one operation more
        return x + torch.softmax(x @ keys.transpose(1, 2), -1) @ keys


@pytest.mark.parametrize("recompute", ["full", "selective"])
def test_a_block_that_recomputes_something_else_is_refused_with_the_reason(
    recompute: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    case = Case(lambda: Stack(Hoarding), CASES["lstm"].batch, CASES["lstm"].loss_fn)
    _, parallel = spread(case, f"dp_replicate=1 recompute={recompute}")
    monkeypatch.setattr(Hoarding, "hoards", True)  # after the looks at the model
    SEEN.clear()
    with pytest.raises(
        ModelError, match="a block computes something else the second time"
    ) as error:
        parallel.forward_backward(case.batch(8))
    assert "use_cache=False" in str(error.value)


class Differentiating(nn.Module):
    """Moves its input against the gradient of its own length, as a step of inner learning does."""

    def __init__(self) -> None:
        super().__init__()
        self.out = nn.Linear(6, 6)

    def forward(self, x: Tensor) -> Tensor:
        return x - torch.func.grad(lambda y: self.out(y).square().sum())(x)


@pytest.mark.parametrize("recompute", ["full", "selective"])
def test_a_block_that_differentiates_by_torch_func_is_refused_by_name(recompute: str) -> None:
    case = Case(lambda: Stack(Differentiating), CASES["lstm"].batch, CASES["lstm"].loss_fn)
    _, parallel = spread(case, f"dp_replicate=1 recompute={recompute}")
    with pytest.raises(ModelError, match=r"differentiates in its forward by torch\.func") as error:
        parallel.forward_backward(case.batch(8))
    assert "plan with recompute=none" in str(error.value)


class Patched(nn.Module):
    """Its forward was replaced on the instance, as wrapping libraries do."""

    def __init__(self) -> None:
        super().__init__()
        self.out = nn.Linear(6, 6)
        self.forward = MethodType(_patched, self)  # type: ignore[method-assign]


def _patched(self: Patched, x: Tensor) -> Tensor:
    return x + torch.tanh(self.out(x))


COPIED = {
    "gpt": CASES["gpt"],
    "patched": Case(lambda: Stack(Patched), CASES["lstm"].batch, CASES["lstm"].loss_fn),
}


@pytest.mark.parametrize("recompute", ["full", "selective"])
@pytest.mark.parametrize("name", COPIED)
def test_a_copy_computes_with_its_own_parameters(name: str, recompute: str) -> None:
    case = COPIED[name]
    _, parallel = spread(case, f"dp_replicate=1 recompute={recompute}")
    model = parallel.module
    twin = copy.deepcopy(model)
    with torch.no_grad():
        for parameter in twin.parameters():
            parameter.mul_(0.5)
    plain = case.build()
    plain.load_state_dict(twin.state_dict())

    batch = case.batch(4)
    reference_loss(plain, case, batch).backward()
    reference_loss(twin, case, batch).backward()
    assert all(parameter.grad is None for parameter in model.parameters())
    for (path, got), wanted in zip(twin.named_parameters(), plain.parameters(), strict=True):
        assert got.grad is not None, path
        assert wanted.grad is not None
        assert relative(got.grad, wanted.grad) < 1e-5


class Scaled(nn.Module):
    """Halves what it takes, in place or in a copy."""

    def __init__(self, *, in_place: bool) -> None:
        super().__init__()
        self.inner, self.out = nn.Linear(6, 12), nn.Linear(12, 6)
        self.in_place = in_place

    def forward(self, x: Tensor) -> Tensor:
        x = x.mul_(0.5) if self.in_place else x.mul(0.5)
        return x + self.out(torch.relu(self.inner(x)))


@pytest.mark.parametrize("recompute", ["full", "selective"])
def test_a_block_that_writes_into_what_it_takes_is_refused_before_work(recompute: str) -> None:
    def case(in_place: bool) -> Case:
        def build() -> nn.Module:
            blocks = (Scaled(in_place=in_place) for _ in range(3))
            return nn.Sequential(nn.Linear(6, 6), *blocks, nn.Linear(6, 3))

        return Case(build, lambda rows: (torch.ones(rows, 6), torch.zeros(rows, dtype=torch.long)))

    with pytest.raises(PlanError, match="`1` writes into a tensor that it takes"):
        spread(case(True), f"recompute={recompute}")
    reference, parallel = spread(case(False), f"recompute={recompute}")
    batch = case(False).batch(4)
    wanted = reference_loss(reference, case(False), batch)
    wanted.backward()
    assert relative(parallel.forward_backward(batch), wanted.detach()) < 1e-6
    assert gradient_error(parallel, reference) < 1e-6
