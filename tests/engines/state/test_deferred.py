"""Deferred construction: each parameter alone gets what its constructor would have given it."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from engines.plan import Plan
from engines.state.deferred import deferred, recipes_of
from engines.state.materialise import DeferredWeights
from profiles.errors import ModelError
from tests.engines.cases import CASES
from tests.engines.parallel.test_pretrained import applied, build
from tests.engines.parity import sgd
from tests.engines.state.test_materialise import PIPELINE, PLANS, on_meta
from tests.nightly import nightly
from tests.workers import Pool


def values_of(model: nn.Module, seed: int = 0) -> dict[str, Tensor]:
    recipes = recipes_of(model)
    named = dict(model.named_parameters())
    assert all(parameter.is_meta for parameter in named.values())
    return {name: recipes[parameter].values(seed) for name, parameter in named.items()}


class Odd(nn.Module):
    """Parameters as people make them, none of them at random."""

    def __init__(self) -> None:
        super().__init__()
        own = nn.Parameter(torch.empty(4, 4))
        self.twice, self.again = own, own
        nn.init.ones_(own)
        self.rows = nn.Parameter(torch.arange(12.0).view(3, 4)[1:])
        self.rows.data[0, 0] = 7
        generator = torch.Generator().manual_seed(3)
        self.drawn = nn.Parameter(torch.randn(5, generator=generator))
        self.next = nn.Parameter(torch.randn(5, generator=generator))
        self.listed = nn.Parameter(torch.tensor([1.0, 2.0]))
        self.cast = nn.Parameter((torch.ones(3) * 0.5).bfloat16())
        self.from_numpy = nn.Parameter(torch.from_numpy(torch.arange(4.0).numpy()).mul_(2))
        self.linear = nn.Linear(3, 3).double()
        nn.init.eye_(self.linear.weight)
        self.linear.bias.data = torch.full((3,), 2.0, dtype=torch.float64)
        self.folded = nn.Conv2d(4, 4, 3, bias=False)
        nn.init.dirac_(self.folded.weight)
        self.of_other = nn.Parameter(self.linear.weight.detach() * 3)
        self.register_buffer("mask", torch.tril(torch.ones(3, 3)), persistent=False)


def test_what_is_not_drawn_is_as_it_would_be() -> None:
    with deferred():
        model = Odd()
    wanted = Odd()
    values = values_of(model)
    assert model.twice is model.again
    assert torch.equal(model.get_buffer("mask"), wanted.get_buffer("mask"))
    for name, parameter in wanted.named_parameters():
        assert values[name].dtype is parameter.dtype
        assert torch.equal(values[name], parameter), name


def linear(init: Callable[..., Any], *args: Any, **options: Any) -> Tensor:
    def made() -> nn.Linear:
        layer = nn.Linear(64, 64, bias=False)
        init(layer.weight, *args, **options)
        return layer

    with deferred():
        layer = made()
    return values_of(layer)["weight"]


def test_functions_of_torch_that_skip_the_meta_device_are_repeated() -> None:
    square = linear(nn.init.orthogonal_)
    assert torch.allclose(square @ square.T, torch.eye(64), atol=1e-5)
    truncated = linear(nn.init.trunc_normal_, std=0.5, a=-0.6, b=0.6)
    assert 0.5 < truncated.abs().max() <= 0.6
    assert linear(nn.init.sparse_, 0.5).count_nonzero() == 64 * 32


@pytest.mark.parametrize("name", [*CASES])
def test_draws_have_the_deviation_of_eager_ones(name: str) -> None:
    with deferred():
        model = CASES[name].build()
    wanted = dict(CASES[name].build().named_parameters())
    for key, value in values_of(model).items():
        assert value.shape == wanted[key].shape
        if value.numel() > 1000:
            assert value.std().item() == pytest.approx(wanted[key].std().item(), rel=0.1), key


def test_copies_that_a_constructor_makes_draw_their_own_or_are_equal_as_they_were() -> None:
    def encoder() -> nn.Module:
        layer = nn.TransformerEncoderLayer(16, 2, 32, batch_first=True)
        return nn.TransformerEncoder(layer, 2)  # deep copies of one layer

    with deferred():
        model = encoder()
    values = values_of(model)
    first, second = (values[f"layers.{n}.self_attn.in_proj_weight"] for n in (0, 1))
    assert torch.equal(first, second)
    assert first.std() > 0


def test_a_scaled_projection_of_transformers_keeps_its_scale() -> None:
    pytest.importorskip("transformers")
    with deferred():
        model = build("gpt2")
    values = values_of(model)
    for name, std in (("c_attn", 0.02), ("c_proj", 0.02 / math.sqrt(4))):
        assert values[f"transformer.h.0.attn.{name}.weight"].std() == pytest.approx(std, rel=0.1)
    with torch.device("meta"):  # without a record, by `_init_weights`
        other = build("gpt2")
    weights = DeferredWeights(other)
    weights.allocate(other, [*other.parameters(), *other.buffers()], device=torch.device("cpu"))
    weights.fill(other)
    scaled = other.get_parameter("transformer.h.0.attn.c_proj.weight")
    assert scaled.std().item() == pytest.approx(0.01, rel=0.1)


def test_constructors_that_read_a_parameter_are_refused() -> None:
    def reading() -> None:
        with deferred():
            nn.Linear(2, 2).weight.sum().item()

    with pytest.raises(ModelError, match="reads the value of a parameter"):
        reading()


def test_a_parameter_that_nobody_fills_is_named() -> None:
    with deferred():
        model = nn.Module()
        model.lost = nn.Parameter(torch.empty(3))
    with pytest.raises(ModelError, match="the constructor left `lost` without values"):
        DeferredWeights(model).fill(model)


def test_parameters_on_the_meta_device_that_nothing_can_fill_are_named() -> None:
    with torch.device("meta"):
        model = CASES["gpt"].build()  # `position` is made by the constructor alone
    with pytest.raises(ModelError, match="`position` is on the meta device") as caught:
        DeferredWeights(model).fill(model)
    assert "with advisor.deferred():" in str(caught.value)


def initial(name: str, plan: str) -> dict[str, Tensor]:
    with deferred():
        model = CASES[name].build()
    return on_meta(name, plan, None, seed=3, model=model).state_dict()


@pytest.mark.dist
@pytest.mark.parametrize(
    ("name", "plan"),
    [
        ("gpt", PIPELINE),
        ("gpt", "dp_shard=2"),
        *nightly(("gpt", "tp=2")),
        *nightly(*(("tied-frozen-unused", plan) for plan in PLANS)),
    ],
)
def test_every_plan_starts_from_the_same_weights(pool: Pool, name: str, plan: str) -> None:
    with deferred():
        model = CASES[name].build()
    values = values_of(model, seed=3)
    other = values_of(model, seed=4)
    assert not torch.equal(values["embed.weight"], other["embed.weight"])
    for state in pool.run(initial, name, plan, world_size=Plan.parse(plan).world_size):
        assert all(torch.equal(state[key], value) for key, value in values.items())


def initial_experts(plan: str) -> dict[str, Tensor]:
    with torch.device("meta"):
        model = build("mixtral")
    return applied(model, plan, seed=3).state_dict()


@pytest.mark.dist
def test_shared_out_experts_start_from_the_models_own_init_function(pool: Pool) -> None:
    pytest.importorskip("transformers")
    wanted = initial_experts("")
    name = "model.layers.1.mlp.experts.gate_up_proj"
    assert wanted[name].std().item() == pytest.approx(0.02, rel=0.1)
    for state in pool.run(initial_experts, "dp_shard=2 ep=2", world_size=2):
        assert all(torch.equal(state[key], value) for key, value in wanted.items())


def test_an_optimizer_that_was_built_on_a_deferred_model_is_carried_over() -> None:
    with deferred():
        model = CASES["gpt"].build()
    optimizer = sgd(model.parameters())
    parallel = on_meta("gpt", "", None, model=model, optimizer=optimizer)
    before = parallel.state_dict()["embed.weight"].clone()
    parallel.train_step(CASES["gpt"].batch(2))
    assert not torch.equal(parallel.state_dict()["embed.weight"], before)
