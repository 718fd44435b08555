"""Steps of a rank's own tensors: exact, and to be seen by nobody outside of them."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, distribute_tensor

from engines.state import local_step
from engines.state.local_step import ELEMENTWISE, step_local_parts
from profiles.workload.optimizers import STEPS_OWN_PARTS
from tests.workers import Pool

Factory = Callable[..., torch.optim.Optimizer]
FACTORIES: dict[str, Factory] = {
    **{kind.__name__: partial(kind, lr=0.01) for kind in ELEMENTWISE},
    "amsgrad": partial(torch.optim.Adam, lr=0.01, weight_decay=0.1, amsgrad=True),
    "nesterov": partial(torch.optim.SGD, lr=0.01, momentum=0.9, nesterov=True, weight_decay=0.1),
    "centered": partial(torch.optim.RMSprop, lr=0.01, momentum=0.9, centered=True),
    "in-lists": partial(torch.optim.AdamW, lr=0.01, foreach=True),
    "fused": partial(torch.optim.SGD, lr=0.01, momentum=0.9, fused=True),
    "averaging": partial(torch.optim.ASGD, lr=0.01, t0=1),
    "maximize": partial(torch.optim.Adagrad, lr=0.01, maximize=True, initial_accumulator_value=0.1),
}


class Layers(nn.Module):
    """The last layer is not used."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(5, 3), nn.Linear(3, 1))
        self.never = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.layers(x)
        return out


class Pair:
    """A model on one rank and its shards on two, each with an optimizer.

    Three rows are two and one; a row is one and none.
    """

    def __init__(self, factory: Factory, *, rates: tuple[float, ...] = ()) -> None:
        torch.manual_seed(1)
        whole = Layers().double()
        self.models = whole, copy.deepcopy(whole)
        self.mesh = init_device_mesh("cpu", (2,))
        fully_shard(self.models[1], mesh=self.mesh)
        groups = [self._groups(model, rates) for model in self.models]
        self.optimizers = tuple(factory(each) for each in groups)
        step_local_parts(self.sharded)
        self.drawn = torch.Generator().manual_seed(2)

    @staticmethod
    def _groups(model: nn.Module, rates: tuple[float, ...]) -> list[Any]:
        parameters = list(model.parameters())
        if not rates:
            return parameters
        return [{"params": parameters[n :: len(rates)], "lr": rate} for n, rate in enumerate(rates)]

    @property
    def sharded(self) -> torch.optim.Optimizer:
        return self.optimizers[1]

    def backward(self) -> None:
        x = torch.randn(4, 5, generator=self.drawn, dtype=torch.float64)
        for model in self.models:
            model(x).square().mean().backward()

    def step(self) -> None:
        for optimizer in self.optimizers:
            optimizer.step()
            optimizer.zero_grad()

    def train(self, steps: int = 3) -> None:
        for _ in range(steps):
            self.backward()
            self.step()

    def difference(self) -> float:
        """The largest of parameters and states, which are shards on one side."""
        worst = 0.0
        for ours, own in zip(*(model.parameters() for model in self.models), strict=True):
            assert isinstance(own, DTensor)
            assert own._local_tensor.grad is None
            worst = max(worst, _far(ours, own))
            expected, state = (
                optimizer.state.get(p, {})
                for optimizer, p in zip(self.optimizers, (ours, own), strict=True)
            )
            assert list(expected) == list(state)
            for key, value in expected.items():
                assert isinstance(state[key], DTensor) == bool(value.dim()), key
                if value.dim():
                    assert state[key].placements == own.placements
                    assert state[key].stride() == value.stride()
                worst = max(worst, _far(value, state[key]))
        keys = [len(optimizer.state) for optimizer in self.optimizers]
        assert keys[0] == keys[1]
        params = [p for group in self.sharded.param_groups for p in group["params"]]
        assert all(isinstance(p, DTensor) for p in params)
        return worst


def _far(expected: Tensor, tensor: Tensor) -> float:
    whole = tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
    assert whole.shape == expected.shape
    assert whole.dtype == expected.dtype
    return float((whole - expected).detach().abs().max())


@contextmanager
def counted() -> Iterator[list[int]]:
    """Steps of a rank's own tensors inside."""
    steps: list[int] = []
    step = local_step._Parts.step

    def counting(self: Any, own: Callable[..., Any]) -> Any:
        steps.append(1)
        return step(self, own)

    with patch.object(local_step._Parts, "step", counting):
        yield steps


def trained(name: str) -> tuple[float, int]:
    with counted() as steps:
        pair = Pair(FACTORIES[name])
        pair.train()
        return pair.difference(), len(steps)


@pytest.mark.dist
@pytest.mark.parametrize("name", FACTORIES)
def test_three_steps_are_those_of_one_process(pool: Pool, name: str) -> None:
    for difference, steps in pool.run(trained, name, world_size=2):
        assert difference < 1e-14
        assert steps == 3


def test_what_is_priced_so_is_stepped_so() -> None:
    named = {kind.__name__.lower() for kind in ELEMENTWISE}
    assert named | {"sgd-momentum", "adamw-compensated"} == STEPS_OWN_PARTS


ADAMW = FACTORIES["AdamW"]


class OwnAdam(torch.optim.Adam):
    """A subclass, whose step may be another one."""


def as_before(kind: str) -> int:
    """Steps of own tensors where shards are stepped one by one."""
    with counted() as steps:
        pair = Pair(partial(OwnAdam if kind == "subclass" else torch.optim.SGD, lr=0.01))
        if kind == "differentiable":
            pair.sharded.param_groups[0][kind] = True
        if kind == "replaced":
            own = pair.sharded
            vars(own)["step"] = lambda: type(own).step(own)
            step_local_parts(own)
        if kind == "other layout":
            for p in (p for model in pair.models for p in model.never.parameters()):
                ones = torch.ones(p.shape, dtype=p.dtype)
                is_shard = isinstance(p, DTensor)
                p.grad = distribute_tensor(ones, pair.mesh) if is_shard else ones
            pair.step()
            assert pair.difference() < 1e-14
        elif kind == "closure":
            pair.backward()
            losses = [optimizer.step(lambda: 2.0) for optimizer in pair.optimizers]
            assert losses == [2.0, 2.0]
            assert pair.difference() < 1e-14
        else:
            pair.train(2)
            assert pair.difference() < 1e-14
        return len(steps)


@pytest.mark.dist
@pytest.mark.parametrize("kind", ["subclass", "differentiable", "replaced", "closure"])
def test_others_step_shards_one_by_one(pool: Pool, kind: str) -> None:
    assert pool.run(as_before, kind, world_size=2) == [0, 0]


@pytest.mark.dist
def test_so_do_gradients_that_are_laid_out_otherwise(pool: Pool) -> None:
    assert pool.run(as_before, "other layout", world_size=2) == [0, 0]


def interrupted() -> tuple[float, list[int]]:
    """An error in the first step, and one in the third; both steps are then taken again."""
    pair = Pair(FACTORIES["nesterov"])
    states = []
    for number in range(4):
        pair.backward()
        if number in (0, 2):
            _fail(pair)
            states.append(len(pair.sharded.state))
        pair.step()
    return pair.difference(), states


def _fail(pair: Pair) -> None:
    """A step that fails before it changes anything."""
    (group,) = pair.sharded.param_groups
    decay, group["weight_decay"] = group["weight_decay"], "much"
    with pytest.raises(TypeError):
        pair.sharded.step()
    group["weight_decay"] = decay
    own = list(pair.models[1].parameters())
    assert all(a is b for a, b in zip(group["params"], own, strict=True))
    assert all(p._local_tensor.grad is None for p in own if isinstance(p, DTensor))


@pytest.mark.dist
def test_an_error_leaves_the_optimizer_usable(pool: Pool) -> None:
    for difference, states in pool.run(interrupted, world_size=2):
        assert difference < 1e-14
        assert states == [0, 4]


def reloaded() -> tuple[float, int]:
    """A state dict of two steps in a fresh optimizer, and the next step of both."""
    pair = Pair(FACTORIES["amsgrad"])
    pair.train(2)
    saved = copy.deepcopy(pair.sharded.state_dict())
    fresh = FACTORIES["amsgrad"](pair.models[1].parameters())
    step_local_parts(fresh)
    fresh.load_state_dict(saved)
    pair.optimizers = pair.optimizers[0], fresh
    with counted() as steps:
        pair.train(1)
    return pair.difference(), len(steps)


@pytest.mark.dist
def test_states_are_saved_and_loaded_as_shards(pool: Pool) -> None:
    for difference, steps in pool.run(reloaded, world_size=2):
        assert difference < 1e-14
        assert steps == 1


def followed(*, before: bool) -> tuple[float, int]:
    """Two groups under schedulers made before or after the step is replaced."""
    schedulers: list[torch.optim.lr_scheduler.LRScheduler] = []

    def schedule(optimizer: torch.optim.Optimizer) -> torch.optim.Optimizer:
        schedulers.append(torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.5))
        return optimizer

    def factory(groups: list[Any]) -> torch.optim.Optimizer:
        optimizer = torch.optim.SGD(groups, momentum=0.9)
        return schedule(optimizer) if before else optimizer

    pair = Pair(factory, rates=(0.1, 0.01))
    if not before:
        for optimizer in pair.optimizers:
            schedule(optimizer)
    with counted() as steps:
        for _ in range(3):
            pair.train(1)
            for scheduler in schedulers:
                scheduler.step()
    rates = [[group["lr"] for group in optimizer.param_groups] for optimizer in pair.optimizers]
    assert rates[0] == rates[1] == [0.0125, 0.00125]
    return pair.difference(), len(steps)


@pytest.mark.dist
@pytest.mark.parametrize("before", [False, True])
def test_groups_and_schedulers_are_followed(pool: Pool, before: bool) -> None:
    for difference, steps in pool.run(partial(followed, before=before), world_size=2):
        assert difference < 1e-14
        assert steps == 3


def hooked() -> tuple[list[str], list[bool]]:
    """Calls of hooks, and whether versions of parameters with gradients went up in each step."""
    pair = Pair(ADAMW)
    seen: list[str] = []

    def see(when: str, optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        first = optimizer.param_groups[0]["params"][0]
        shards = isinstance(first, DTensor) and isinstance(first.grad, DTensor)
        states = all(isinstance(s["exp_avg"], DTensor) for s in optimizer.state.values())
        seen.append(f"{when} {shards} {states} {len(optimizer.state)}")

    pair.sharded.register_step_pre_hook(partial(see, "before"))
    pair.sharded.register_step_post_hook(partial(see, "after"))
    grew = []
    for _ in range(2):
        pair.backward()
        versions = [p._version for p in pair.models[1].parameters()]
        pair.step()
        now = [p._version for p in pair.models[1].parameters()]
        grew.append([a < b for a, b in zip(versions, now, strict=True)] == [True] * 4 + [False] * 2)
    return seen, grew


@pytest.mark.dist
def test_hooks_see_shards_and_versions_of_parameters_grow(pool: Pool) -> None:
    calls = ["before True True 0", "after True True 4", "before True True 4", "after True True 4"]
    for seen, grew in pool.run(hooked, world_size=2):
        assert seen == calls
        assert grew == [True, True]


def mixed() -> tuple[float, int]:
    """A group of shards, of a plain parameter, and of one that is replicated over the mesh."""
    pair = Pair(ADAMW)
    extra = [nn.Parameter(torch.ones(2, dtype=torch.float64)) for _ in pair.optimizers]
    spread = nn.Parameter(distribute_tensor(torch.ones(3, dtype=torch.float64), pair.mesh))
    alone = nn.Parameter(torch.ones(3, dtype=torch.float64))
    for optimizer, plain, other in zip(pair.optimizers, extra, (alone, spread), strict=True):
        optimizer.add_param_group({"params": [plain, other]})
    with counted() as steps:
        for _ in range(2):
            pair.backward()
            for plain in extra:
                plain.grad = torch.full_like(plain, 0.5)
            alone.grad, spread.grad = torch.ones_like(alone), torch.ones_like(spread)
            pair.step()
    states = [o.state[p]["exp_avg"] for o, p in zip(pair.optimizers, extra, strict=True)]
    assert not isinstance(states[1], DTensor)
    far = max(_far(*extra), _far(*states), _far(alone, spread))
    return far, len(steps)


@pytest.mark.dist
def test_groups_may_mix_shards_and_plain_tensors(pool: Pool) -> None:
    for difference, steps in pool.run(mixed, world_size=2):
        assert difference < 1e-14
        assert steps == 2
