"""Averages of parameters in registered objects: under any plan that loads them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

from profiles.errors import FileError, InputError
from tests.engines.parity import alone, local_rows, parallelize, reference_loss, relative
from tests.workers import Pool

SPLIT = "tp=2 tensor_styles=embed:vocab,blocks.*.mlp.0:column,blocks.*.mlp.2:row,head:vocab"
STAGES = "pp=2 schedule=1f1b microbatches=2 stages=blocks.1"
OTHER_STAGES = "pp=2 schedule=1f1b microbatches=2 stages=blocks.2"


class Average:
    """Follows the parameters of a model, and counts."""

    def __init__(self, model: nn.Module) -> None:
        self.model, self.count = model, torch.zeros(2)
        self.shadow = {name: p.detach().clone() for name, p in model.named_parameters()}

    @torch.no_grad()
    def update(self) -> None:
        self.count += 1
        for name, parameter in self.model.named_parameters():
            self.shadow[name].lerp_(parameter.detach(), 0.3)

    def state_dict(self) -> dict[str, Any]:
        return {"shadow": dict(self.shadow), "count": self.count}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.shadow, self.count = dict(state["shadow"]), state["count"]


def followed(plan: str, saved: str = "", loaded: str = "") -> dict[str, Tensor]:
    """An average after two steps, this rank's part; saved after the first, or loaded in its place.

    The parameters are in its place at the end, so that they are gathered as those are.
    """
    case, _, parallel = parallelize("tied-frozen-unused", plan)
    average = Average(parallel)
    parallel.register(average=average)
    for rows in (4, 6):
        if rows == 4 and loaded:
            parallel.load(loaded)
        else:
            parallel.train_step(local_rows(parallel, case.batch(rows), rows))
            average.update()
        if rows == 4 and saved:
            parallel.save(saved)
    assert average.count.tolist() == [2, 2]
    with torch.no_grad():
        for name, parameter in parallel.named_parameters():
            parameter.copy_(average.shadow[name])
    return {name: value.clone() for name, value in parallel.state_dict().items()}


def expected() -> dict[str, Tensor]:
    torch.manual_seed(1)
    case, reference, _ = parallelize("tied-frozen-unused", "")
    optimizer = torch.optim.SGD(
        [p for p in reference.parameters() if p.requires_grad], lr=0.05, momentum=0.9
    )
    average = Average(reference)
    for rows in (4, 6):
        reference_loss(reference, case, case.batch(rows)).backward()
        optimizer.step()
        optimizer.zero_grad()
        average.update()
    return average.shadow


@pytest.mark.dist
@pytest.mark.parametrize(
    ("first", "then"),
    [("dp_shard=2", STAGES), (STAGES, OTHER_STAGES), (SPLIT, "dp_shard=2"), ("", SPLIT)],
)
def test_an_average_goes_on_under_another_plan(
    pool: Pool, tmp_path: Path, first: str, then: str
) -> None:
    wanted = expected()
    pool.run(followed, first, str(tmp_path), world_size=2 if first else 1)
    for got in pool.run(followed, then, "", str(tmp_path), world_size=2):
        assert max(relative(got[name], value) for name, value in wanted.items()) < 1e-5


def test_torchs_averaged_model_of_one_process_is_loaded(tmp_path: Path) -> None:
    averages = []
    for steps in ((4, 6, 3), (3,)):
        case, _, parallel = parallelize("tied-frozen-unused", "")
        average = AveragedModel(parallel, multi_avg_fn=get_ema_multi_avg_fn(0.7))
        parallel.register(average=average)
        if len(steps) == 1:
            parallel.load(tmp_path)
        for rows in steps:
            parallel.train_step(local_rows(parallel, case.batch(rows), rows))
            average.update_parameters(parallel)
            if rows == 6:
                parallel.save(tmp_path)
        averages.append({name: p.detach().clone() for name, p in average.named_parameters()})
    undisturbed, resumed = averages
    assert all(torch.equal(resumed[name], value) for name, value in undisturbed.items())


def _copied(plan: str) -> str:
    _, _, parallel = parallelize("tied-frozen-unused", plan)
    with pytest.raises(InputError, match="neither copied nor pickled") as refusal:
        AveragedModel(parallel)
    return str(refusal.value)


@pytest.mark.dist
@pytest.mark.parametrize("plan", ["dp_replicate=2", "dp_shard=2"])
def test_a_copy_of_a_spread_model_is_refused_with_what_to_keep(pool: Pool, plan: str) -> None:
    for said in pool.run(_copied, plan, world_size=2):
        assert "a clone of each of `parallel.named_parameters()`" in said


class Noted:
    """Has a tensor under a parameter's name that is each rank's own."""

    def __init__(self) -> None:
        self.values = {"embed.weight": torch.full((61, 32), 7.0 + dist.get_rank())}

    def state_dict(self) -> dict[str, Any]:
        return self.values

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.values = state


def own_back(folder: str) -> list[float]:
    _, _, parallel = parallelize("gpt", "dp_replicate=2")
    noted = Noted()
    parallel.register(noted=noted)
    parallel.save(folder)
    noted.values = {}
    parallel.load(folder)
    return noted.values["embed.weight"].unique().tolist()


@pytest.mark.dist
def test_what_is_each_ranks_own_stays_so(pool: Pool, tmp_path: Path) -> None:
    assert pool.run(own_back, str(tmp_path), world_size=2) == [[7.0], [8.0]]


class Shards(Noted):
    """Shards of parameters in a list, where no name says whose they are."""

    def __init__(self, model: nn.Module) -> None:
        self.values = {"shadow": [p.detach().clone() for p in model.parameters()]}


def refused(folder: str) -> str:
    _, _, parallel = parallelize("gpt", "dp_shard=2")
    parallel.register(noted=Shards(parallel))
    try:
        parallel.save(folder)
    except (InputError, FileError) as error:
        return str(error)
    return ""


@pytest.mark.dist
def test_shards_without_a_name_are_not_saved(pool: Pool, tmp_path: Path) -> None:
    for text in pool.run(refused, str(tmp_path), world_size=2):
        assert "objects.noted.shadow.0` is a shard of a tensor of" in text
    assert not list(tmp_path.glob("step-*"))


class Odd(torch.optim.SGD):
    """Keeps something where no checkpoint looks."""

    def __init__(self, parameters: Any, kind: str) -> None:
        super().__init__(parameters, lr=0.1)
        self.kind = kind

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        super().step()
        parameter = self.param_groups[0]["params"][0]
        if self.kind == "list":
            self.state[parameter]["history"] = [parameter.detach().clone()]
        if self.kind == "name":
            self.state["all"] = {"count": 1}  # type: ignore[index]

    def state_dict(self) -> dict[str, Any]:
        return {**super().state_dict(), **({"count": 1} if self.kind == "key" else {})}


@pytest.mark.parametrize(
    ("kind", "said"),
    [
        ("list", "the state `history` of `Odd` is a list of tensors"),
        ("name", "`Odd` has states under 'all', which is none of its parameters"),
        ("key", "`Odd.state_dict()` has `count` beside the states of parameters"),
    ],
)
def test_optimizer_states_that_no_load_brings_back_are_not_saved(
    tmp_path: Path, kind: str, said: str
) -> None:
    def factory(parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
        return Odd(parameters, kind)

    _, parallel = alone("gpt", optimizer=factory)
    case, _, _ = parallelize("gpt", "")
    parallel.train_step(case.batch(2))
    with pytest.raises(InputError) as info:
        parallel.save(tmp_path)
    assert said in str(info.value)
