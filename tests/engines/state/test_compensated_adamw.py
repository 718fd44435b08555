"""AdamW in bf16 with compensated sums: beside torch's AdamW, which computes in fp32 or fp64."""

from __future__ import annotations

import copy
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from advisor.auto.arguments import optimizer_of
from engines.state.compensated_adamw import CompensatedAdamW
from engines.state.optimizer_footprint import optimizer_footprint
from profiles.errors import InputError
from profiles.model.profile import ParameterShape, UnitProfile
from profiles.workload.optimizers import OPTIMIZERS, upkeep
from tests.engines.cases import CASES, Case
from tests.engines.parity import local_rows, spread
from tests.workers import Pool

Optimizer = Callable[[list[nn.Parameter]], torch.optim.Optimizer]
STEPS = 300


def gradients(seed: int = 0) -> list[Tensor]:
    generator = torch.Generator().manual_seed(seed)
    mean = torch.randn(1000, generator=generator)
    return [mean + torch.randn(1000, generator=generator) for _ in range(STEPS)]


def stepped(kind: Optimizer, dtype: torch.dtype) -> Tensor:
    """Parameters near 1 after small steps with the same gradients."""
    parameter = nn.Parameter(torch.linspace(0.5, 1.5, 1000).bfloat16().to(dtype))
    optimizer = kind([parameter])
    for gradient in gradients():
        parameter.grad = gradient.to(dtype)
        optimizer.step()
    return parameter.detach().double()


def test_in_fp64_it_is_adamw() -> None:
    ours = stepped(lambda p: CompensatedAdamW(p, lr=1e-2, weight_decay=0.1), torch.float64)
    torchs = stepped(lambda p: torch.optim.AdamW(p, lr=1e-2, weight_decay=0.1), torch.float64)
    assert torch.allclose(ours, torchs, rtol=1e-12, atol=0)


def test_updates_below_half_the_distance_of_neighbours_add_up() -> None:
    """Steps of 1e-4, where neighbours of 1 are 2^-8 and 2^-7 apart: plain AdamW stays."""
    exact = stepped(lambda p: torch.optim.AdamW(p, lr=1e-4), torch.float64)
    plain = stepped(lambda p: torch.optim.AdamW(p, lr=1e-4), torch.bfloat16)
    ours = stepped(lambda p: CompensatedAdamW(p, lr=1e-4), torch.bfloat16)
    moved = (exact - torch.linspace(0.5, 1.5, 1000).bfloat16().double()).abs()
    assert moved.max() > 0.02
    half_a_neighbour = exact.abs() * 2**-8
    assert ((ours - exact).abs() <= half_a_neighbour + 2e-4).all()
    assert (plain - exact).abs().max() > 0.01


def test_second_moments_fall_when_gradients_do() -> None:
    parameter = nn.Parameter(torch.ones(10, dtype=torch.bfloat16))
    optimizer = CompensatedAdamW([parameter], lr=0.0)
    for step in range(1010):
        parameter.grad = torch.full_like(parameter, 1.0 if step < 10 else 0.01)
        optimizer.step()
    state = optimizer.state[parameter]
    early = (1 - 0.999**10) * 0.999**1000
    expected = early + (1 - 0.999**1000) * torch.tensor(0.01).bfloat16().item() ** 2
    seconds = state["exp_avg_sq"].double() + state["lost_sq"].double()
    assert seconds.tolist() == pytest.approx([expected] * 10, rel=0.01)


def test_states_survive_being_saved() -> None:
    """torch's `load_state_dict` casts states to the dtype of their parameter."""
    parameter = nn.Parameter(torch.linspace(0.5, 1.5, 64).bfloat16())
    optimizer = CompensatedAdamW([parameter])
    for gradient in gradients()[:3]:
        parameter.grad = gradient[:64].bfloat16()
        optimizer.step()
    other = nn.Parameter(parameter.detach().clone())
    loaded = CompensatedAdamW([other])
    loaded.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    for name, value in optimizer.state[parameter].items():
        assert torch.equal(loaded.state[other][name], value)


def test_what_it_takes_is_what_is_described() -> None:
    """Of a matrix in bf16: four states, and its passes with their temporaries in fp32."""
    size = 1000 * 1000
    model = nn.Linear(1000, 1000, bias=False).bfloat16()
    measured = optimizer_footprint(CompensatedAdamW, model, units=["model"])
    shape = ParameterShape(sizes=(1000, 1000), element_bytes=2)
    unit = UnitProfile(
        name="model", kind="Linear", parameters=size, trainable_parameters=size,
        parameter_bytes=2 * size, gradient_bytes=2 * size, shapes=(shape,), costs={},
    )  # fmt: skip
    described = upkeep(OPTIMIZERS["adamw-compensated"], [unit])
    assert measured.state_bytes_per_element * size == described.state_bytes == 8 * size
    assert measured.moved_bytes_per_element * size == pytest.approx(described.moved_bytes, rel=0.01)
    assert measured.working_bytes == pytest.approx(described.loop_bytes, rel=0.01)


def test_it_is_known_by_name_and_refuses_fp16() -> None:
    assert optimizer_of("adamw-compensated") is CompensatedAdamW
    with pytest.raises(InputError, match="float16 those below 6e-8 are 0"):
        CompensatedAdamW([nn.Parameter(torch.ones(3, dtype=torch.float16))])


def _trained(plan: str) -> tuple[list[float], Tensor]:
    """Losses of a GPT in bf16, and its parameters at the end."""
    case = CASES["gpt"]
    built = Case(lambda: case.build().bfloat16(), case.batch, loss_fn=case.loss_fn)
    _, parallel = spread(
        built, f"{plan} precision=bf16", optimizer=lambda p: CompensatedAdamW(p, lr=1e-3)
    )
    losses = [parallel.train_step(local_rows(parallel, case.batch(8), 8)).item() for _ in range(10)]
    return losses, torch.cat([p.flatten().float() for p in parallel.state_dict().values()])


@pytest.mark.dist
@pytest.mark.parametrize("plan", ["dp_replicate=2", "dp_replicate=2 zero=1", "dp_shard=2"])
def test_replicas_stay_equal_and_train_as_one_process(pool: Pool, plan: str) -> None:
    alone, _ = _trained("dp_replicate=1")
    (losses, first), (_, second) = pool.run(_trained, plan, world_size=2)
    assert torch.equal(first, second)
    assert losses == pytest.approx(alone, rel=0.01)
    assert losses[-1] < 0.99 * losses[0]
