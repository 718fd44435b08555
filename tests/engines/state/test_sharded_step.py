"""Steps of shards in lists, as torch steps plain tensors on accelerators."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

from engines.state.sharded_step import step_shards_in_lists
from tests.workers import Pool

Factory = Callable[..., torch.optim.Optimizer]
FACTORIES: dict[str, Factory] = {
    "AdamW": partial(torch.optim.AdamW, lr=0.01),
    "Adam": partial(torch.optim.Adam, lr=0.01, weight_decay=0.1, amsgrad=True),
    "SGD": partial(torch.optim.SGD, lr=0.01, momentum=0.9, nesterov=True),
}


def stepped(factory: Factory, *, in_lists: bool, **settings: object) -> tuple[list[Tensor], bool]:
    """Parts of a rank after three steps, and whether `foreach` was on in them; all ranks call it.

    Rows do not divide among ranks evenly.
    """
    torch.manual_seed(1)
    model = nn.Sequential(nn.Linear(5, 7), nn.Linear(7, 3))
    fully_shard(model, mesh=init_device_mesh("cpu", (2,)))
    optimizer = factory(model.parameters(), **settings)
    seen = []
    if in_lists:
        step_shards_in_lists(optimizer, kinds=("cpu",))
        optimizer.register_step_pre_hook(lambda *_: seen.append(_foreach(optimizer)))
    for _ in range(3):
        model(torch.ones(4, 5)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    assert _foreach(optimizer) is settings.get("foreach")
    parts = [p.to_local().detach().clone() for p in model.parameters() if isinstance(p, DTensor)]
    return parts, all(seen) and bool(seen)


def _foreach(optimizer: torch.optim.Optimizer) -> object:
    return optimizer.param_groups[0]["foreach"]


def compared(name: str) -> tuple[float, bool]:
    one_by_one, _ = stepped(FACTORIES[name], in_lists=False)
    in_lists, is_on = stepped(FACTORIES[name], in_lists=True)
    pairs = zip(one_by_one, in_lists, strict=True)
    return max(float((a - b).abs().max()) for a, b in pairs if a.numel()), is_on


@pytest.mark.dist
@pytest.mark.parametrize("name", FACTORIES)
def test_a_step_in_lists_is_that_of_one_shard_after_the_other(pool: Pool, name: str) -> None:
    for difference, is_on in pool.run(compared, name, world_size=2):
        assert difference < 1e-6
        assert is_on


def steps_in_lists(factory: Factory, settings: dict[str, object]) -> bool:
    return stepped(factory, in_lists=True, **settings)[1]


class OwnAdam(torch.optim.Adam):
    """A subclass, whose step may be another one."""


@pytest.mark.dist
@pytest.mark.parametrize(
    ("factory", "settings"),
    [(torch.optim.AdamW, {"foreach": False}), (OwnAdam, {}), (torch.optim.Adagrad, {})],
)
def test_what_the_user_said_and_other_optimizers_stay_as_they_are(
    pool: Pool, factory: Factory, settings: dict[str, object]
) -> None:
    assert pool.run(steps_in_lists, factory, settings, world_size=2) == [False, False]
