"""Tensors that are split over tp and then sharded: put together, taken apart, saved and loaded."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from engines.data.fsdp import shard
from engines.data.gradients import clip_gradients, full_gradients
from engines.data.replicas import local_part, sum_gradients
from engines.plan import Plan
from engines.runtime.mesh import Mesh
from engines.runtime.world import World, join_world
from engines.state.checkpoint.agreement import peers_of
from engines.state.checkpoint.load import fill, open_save
from engines.state.checkpoint.save import SaveOptions, start_saving
from engines.state.checkpoint.training_state import StatesToLoad, states_to_save
from engines.state.full_state import set_whole_state, whole_state
from engines.state.layout import Layout
from engines.state.slices import Slice
from profiles.capture.capture import capture
from tests.workers import Pool

SIZES = "tp=2 dp_replicate=2"
CPU = torch.device("cpu")


@dataclass(frozen=True)
class ByHand:
    """As a split of the layers of `Gated` would be described."""

    slices: Mapping[str, Slice]
    partial: frozenset[str]


SPLIT = ByHand(
    {
        "pair.weight": Slice(0, packs=2),  # two layers in one, say gate and up
        "pair.bias": Slice(0, packs=2),
        "down.weight": Slice(1),
        "odd.weight": Slice(0),  # 7 rows: 4 and 3
    },
    frozenset({"norm.weight"}),
)


class Gated(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.pair, self.down = nn.Linear(6, 20), nn.Linear(10, 6)
        self.norm, self.odd = nn.LayerNorm(6), nn.Linear(6, 7, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        gate, up = self.pair(self.norm(x)).chunk(2, -1)
        out: Tensor = self.odd(self.down(gate * up))
        return out


def build(seed: int) -> Gated:
    torch.manual_seed(seed)
    return Gated()


def adam(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.Adam(model.parameters(), lr=0.01, eps=0.1)


def spread(plan: str, seed: int) -> tuple[Gated, Layout, Mesh]:
    """A model that is split by hand and then sharded, as `apply_plan` does it."""
    model, parsed, world = build(seed), Plan.parse(plan), join_world()
    profile = capture(model, (torch.randn(2, 6), torch.randn(2, 7)), loss_fn=nn.MSELoss())
    mesh = Mesh(parsed, world)
    layout = Layout(model, mesh, device=world.device)
    for name, cut in SPLIT.slices.items():
        parameter = model.get_parameter(name)
        part = cut.part(parameter.detach(), rank=mesh.tp.position, size=mesh.tp.size)
        parameter.data = part.clone()
    layout.lay_out(stages=None, split=SPLIT)
    if mesh.shards is not None:
        shard(model, parsed, profile=profile, mesh=mesh.shards, mixed=None)
    return model, layout, mesh


def save(
    folder: str, model: nn.Module, optimizer: torch.optim.Optimizer, world: World, layout: Layout
) -> None:
    start_saving(
        Path(folder),
        states_to_save(model, optimizer, layout, outer={}, replica=0),
        {},
        peers=peers_of(world, None),
        options=SaveOptions(step=1, plan=""),
        timeout_s=60,
    ).wait()


def restore(
    folder: str, model: nn.Module, optimizer: torch.optim.Optimizer, world: World, layout: Layout
) -> None:
    peers = peers_of(world, None)
    saved = open_save(Path(folder), step="newest", peers=peers, verify=True)
    fill(saved, StatesToLoad(model, optimizer, layout, outer={}), peers=peers, replica=0)


def stepped(seed: int, max_norm: float) -> tuple[Gated, torch.optim.Optimizer, Tensor]:
    """One clipped step on one process; the gradients are the parameters of another model."""
    model, optimizer = build(seed), None
    for parameter, other in zip(model.parameters(), build(seed + 1).parameters(), strict=True):
        parameter.grad = other.detach().clone()
    norm = nn.utils.clip_grad_norm_(model.parameters(), max_norm)
    optimizer = adam(model)
    optimizer.step()
    return model, optimizer, norm


def step(plan: str, folder: str) -> dict[str, Any]:
    """The same step on the parts; what is left of each difference."""
    model, layout, mesh = spread(plan, seed=3)
    gradients = {name: p.detach() for name, p in build(4).named_parameters()}
    for name, parameter in model.named_parameters():
        part = layout.part(name, gradients[name], like=parameter)
        # Parts of a sum over the ranks of tp, one third and two thirds.
        share = (1 + mesh.tp.position) / 3 if name in SPLIT.partial else 1.0
        parameter.grad = part.clone() * share
    sum_gradients(map(model.get_parameter, sorted(SPLIT.partial)), mesh.tp.group)
    whole = full_gradients(model, layout)
    wanted, _, norm = stepped(3, max_norm=0.5)
    actual = clip_gradients(model, layout, mesh, 0.5)
    optimizer = adam(model)
    optimizer.step()
    save(folder, model, optimizer, join_world(), layout)
    state = whole_state(model, layout)
    assert list(state) == list(whole) == list(gradients)
    return {
        "gradients": max((whole[n] - g).abs().max().item() for n, g in gradients.items()),
        "norm": (actual - norm).abs().item(),
        "state": max((state[n] - v).abs().max().item() for n, v in wanted.state_dict().items()),
        "held": sum(local_part(p).numel() for p in model.parameters()),
    }


@pytest.mark.dist
@pytest.mark.parametrize("plan", [SIZES, f"{SIZES} zero=1"])
def test_sharded_states_step_and_save_like_whole_ones(
    pool: Pool, tmp_path: Path, plan: str
) -> None:
    folder = str(tmp_path / "checkpoint")
    results = pool.run(step, plan, folder, world_size=4)
    assert max(rank[key] for rank in results for key in ("gradients", "norm", "state")) < 1e-6
    sliced = 20 * 6 + 20 + 6 * 10 + 7 * 6
    copies = 1 if "zero" in plan else 2
    whole = sum(p.numel() for p in Gated().parameters()) - sliced
    # Slices are on one rank of tp each; what is whole is on both.
    assert sum(rank["held"] for rank in results) == copies * (sliced + 2 * whole)

    model, optimizer = build(9), None
    optimizer = adam(model)
    layout = Layout(model, Mesh(Plan(), World(0, 1, CPU, 60.0)), device=CPU)
    restore(folder, model, optimizer, join_world(), layout)
    wanted, its_optimizer, _ = stepped(3, max_norm=0.5)
    for name, parameter in model.named_parameters():
        other = wanted.get_parameter(name)
        torch.testing.assert_close(parameter, other)
        momentum = its_optimizer.state[other]["exp_avg"]
        torch.testing.assert_close(optimizer.state[parameter]["exp_avg"], momentum)


def load(plan: str, folder: str) -> tuple[float, float]:
    """Differences of what was saved whole, after loading it into parts by file and by hand."""
    wanted, its_optimizer, _ = stepped(3, max_norm=0.5)
    model, layout, _ = spread(plan, seed=7)
    optimizer = adam(model)
    restore(folder, model, optimizer, join_world(), layout)
    actual = whole_state(model, layout)
    error = max((actual[n] - v).abs().max().item() for n, v in wanted.state_dict().items())
    momenta = {n: optimizer.state[p]["exp_avg"] for n, p in model.named_parameters()}
    for name, momentum in layout.wholes(momenta, momenta):
        assert momentum is not None
        other = its_optimizer.state[wanted.get_parameter(name)]["exp_avg"]
        error = max(error, (momentum - other).abs().max().item())
    set_whole_state(model, build(8).state_dict(), layout, strict=True)
    by_hand = whole_state(model, layout)
    others = build(8).state_dict()
    return error, max((by_hand[n] - v).abs().max().item() for n, v in others.items())


@pytest.mark.dist
@pytest.mark.parametrize("plan", [SIZES, f"{SIZES} zero=1"])
def test_whole_states_are_loaded_into_shards(pool: Pool, tmp_path: Path, plan: str) -> None:
    folder = tmp_path / "checkpoint"
    model, optimizer, _ = stepped(3, max_norm=0.5)
    world = World(0, 1, CPU, 60.0)
    layout = Layout(model, Mesh(Plan(), world), device=CPU)
    save(str(folder), model, optimizer, world, layout)
    assert pool.run(load, plan, str(folder), world_size=4) == [(0.0, 0.0)] * 4
