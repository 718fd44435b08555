"""Named optimizers against torch's own after a real step, and documented 8-bit formats."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from profiles.capture.capture import capture
from profiles.capture.operators.table import flop_formulas
from profiles.errors import InputError, UnknownNameError
from profiles.model.profile import ModelProfile, ParameterShape, UnitProfile
from profiles.torch_compat import TorchDispatchMode
from profiles.workload.optimizers import OPTIMIZERS, optimizer_profile, upkeep
from tests.contract.watch import LiveBytes
from tests.engines.cases import TinyGPT
from tests.factories import chain

Build = Callable[[list[nn.Parameter]], list[torch.optim.Optimizer]]


def _muon(parameters: list[nn.Parameter]) -> list[torch.optim.Optimizer]:
    """As its documentation says: matrices of hidden layers; here all but the model's own."""
    hidden = [p for p in parameters if p.dim() == 2 and p.shape[0] != 300 and p.shape[0] != 16]
    chosen = set(map(id, hidden))
    rest = [p for p in parameters if id(p) not in chosen]
    return [torch.optim.Muon(hidden), torch.optim.AdamW(rest)]


REAL: dict[str, Build] = {
    "sgd": lambda p: [torch.optim.SGD(p, lr=0.1)],
    "sgd-momentum": lambda p: [torch.optim.SGD(p, lr=0.1, momentum=0.9)],
    "adam": lambda p: [torch.optim.Adam(p)],
    "adamw": lambda p: [torch.optim.AdamW(p)],
    "adafactor": lambda p: [torch.optim.Adafactor(p)],
    "muon": _muon,
}


def _model(dtype: torch.dtype = torch.float32) -> tuple[nn.Module, ModelProfile]:
    model = TinyGPT(vocabulary=300, width=64, layers=2).to(dtype)
    return model, capture(model, torch.zeros(2, 8, dtype=torch.long))


def _stepped(model: nn.Module, build: Build) -> list[torch.optim.Optimizer]:
    optimizers = build(list(model.parameters()))
    for parameter in model.parameters():
        parameter.grad = torch.randn_like(parameter)
    for optimizer in optimizers:
        optimizer.step()
    return optimizers


def _states(optimizers: list[torch.optim.Optimizer]) -> list[torch.Tensor]:
    values = (v for o in optimizers for state in o.state.values() for v in state.values())
    return [value for value in values if isinstance(value, torch.Tensor)]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", REAL)
def test_the_state_is_torchs_own_byte_for_byte(name: str, dtype: torch.dtype) -> None:
    model, profile = _model(dtype)
    states = [s for s in _states(_stepped(model, REAL[name])) if s.dim() > 0]
    assert upkeep(OPTIMIZERS[name], profile.units).state_bytes == sum(s.nbytes for s in states)


def _peak_of_a_step(model: nn.Module, optimizers: list[torch.optim.Optimizer]) -> int:
    """Most bytes beside parameters, gradients and states."""
    given = [p.grad for p in model.parameters() if p.grad is not None]
    watched = LiveBytes([*model.parameters(), *given, *_states(optimizers)])
    before = watched.peak_bytes = watched.now()
    with watched:
        for optimizer in optimizers:
            optimizer.step()
    return watched.peak_bytes - before


@pytest.mark.parametrize("name", REAL)
def test_peak_of_a_step_is_at_most_the_prediction_and_near_it(name: str) -> None:
    model, profile = _model()
    actual = _peak_of_a_step(model, _stepped(model, REAL[name]))
    said = upkeep(OPTIMIZERS[name], profile.units).loop_bytes
    # Scalars (norms, bias corrections) apart; the order of the parameters decides what the loop
    # holds of the tensor before the largest, so the worst order is charged: as much again for
    # Adafactor, half as much for Adam.
    assert actual <= said + 4096
    assert said <= (2 if name == "adafactor" else 1.5) * actual + 4096


@pytest.mark.parametrize("name", ["sgd", "sgd-momentum", "adam", "adamw"])
def test_peak_of_a_foreach_step_is_that_predicted_for_accelerators(name: str) -> None:
    model, profile = _model()
    (optimizer,) = _stepped(model, REAL[name])
    optimizer.param_groups[0]["foreach"] = True
    actual = _peak_of_a_step(model, [optimizer])
    assert actual == pytest.approx(upkeep(OPTIMIZERS[name], profile.units).list_bytes, abs=8192)


def test_two_equal_matrices_one_after_another_are_the_worst_order() -> None:
    model = nn.Sequential(nn.Linear(64, 64, bias=False), nn.Linear(64, 64, bias=False))
    profile = capture(model, torch.zeros(2, 64))
    for name in ("adamw", "adafactor"):
        actual = _peak_of_a_step(model, _stepped(model, REAL[name]))
        said = upkeep(OPTIMIZERS[name], profile.units).loop_bytes
        assert actual == pytest.approx(said, abs=1024)


class _Counted(TorchDispatchMode):
    """FLOP of a step, by torch's own formulas."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.flop = 0
        self._formulas = flop_formulas()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        formula = self._formulas.get(func.overloadpacket)
        self.flop += formula(*args, **(kwargs or {}), out_val=result) if formula else 0
        return result


@pytest.mark.parametrize("shape", [(48, 48), (32, 96), (96, 32)])
def test_muon_flop_and_moved_bytes_equal_the_prediction(shape: tuple[int, int]) -> None:
    from engines.state.optimizer_footprint import optimizer_footprint

    layer = nn.Linear(shape[1], shape[0], bias=False)
    profile = UnitProfile(
        name="layers.0",
        kind="Linear",
        is_block=True,
        parameters=layer.weight.numel(),
        trainable_parameters=layer.weight.numel(),
        gradient_bytes=layer.weight.nbytes,
        shapes=(ParameterShape(sizes=shape, element_bytes=4),),
        costs={},
    )
    (optimizer,) = _stepped(layer, lambda p: [torch.optim.Muon(p)])
    with _Counted() as counted:
        optimizer.step()
    said = upkeep(OPTIMIZERS["muon"], [profile])
    assert said.flop == counted.flop
    measured = optimizer_footprint(torch.optim.Muon, layer, units=[""]).units
    assert measured is not None
    assert said.moved_bytes == pytest.approx(measured[""].moved_bytes, rel=1e-3)
    assert measured[""].flop == counted.flop


@pytest.mark.parametrize("shape", [(64, 64), (512, 128)])
def test_adafactor_moved_bytes_equal_the_prediction(shape: tuple[int, int]) -> None:
    from engines.state.optimizer_footprint import optimizer_footprint

    layer = nn.Linear(shape[1], shape[0], bias=False)
    profile = capture(layer, torch.zeros(2, shape[1]))
    measured = optimizer_footprint(torch.optim.Adafactor, layer, units=[""]).units
    assert measured is not None
    said = upkeep(OPTIMIZERS["adafactor"], profile.units).moved_bytes
    # Rows and columns are left out: 16 passes over (64 + 64) numbers beside 17 over 64 x 64.
    assert said == pytest.approx(measured[""].moved_bytes, rel=0.04)


def _unit(*shapes: tuple[int, ...], element_bytes: int = 4) -> UnitProfile:
    made = [ParameterShape(sizes=sizes, element_bytes=element_bytes) for sizes in shapes]
    elements = sum(shape.elements for shape in made)
    return UnitProfile(
        name="a",
        kind="Linear",
        parameters=elements,
        trainable_parameters=elements,
        gradient_bytes=elements * element_bytes,
        shapes=tuple(made),
        costs={},
    )


@pytest.mark.parametrize(
    ("shape", "shards", "bitsandbytes", "torchao"),
    [
        # Two codes an element and two fp32 scales per 256; torchao's two tables of 256 floats.
        ((4096, 4096), 1, 2 * 2**24 + 8 * 2**16, 2 * 2**24 + 8 * 2**16 + 2048),
        ((64, 64), 1, 2 * 4096 + 8 * 16, 2 * 4096 + 8 * 16 + 2048),
        # Under 4,096 elements: two fp32 moments.
        ((4095,), 1, 8 * 4095, 8 * 4095),
        # 5,000 elements are 20 blocks, the last one short: torchao leaves such a tensor in fp32.
        ((5000,), 1, 2 * 5000 + 8 * 20, 8 * 5000),
        # What counts is the shard: 8,192 elements on four ranks are 2,048 each.
        ((128, 64), 4, 8 * 2048, 8 * 2048),
        ((4096, 4096), 4, 2 * 2**22 + 8 * 2**14, 2 * 2**22 + 8 * 2**14 + 2048),
    ],
)
def test_8_bit_states_follow_the_documented_formats(
    shape: tuple[int, ...], shards: int, bitsandbytes: int, torchao: int
) -> None:
    unit = _unit(shape)
    for name, expected in (("adamw-8bit", bitsandbytes), ("adamw-8bit-torchao", torchao)):
        assert upkeep(OPTIMIZERS[name], [unit], shards=shards).state_bytes == expected


def test_8_bit_adam_keeps_a_quarter_of_adam_for_a_large_model() -> None:
    unit = _unit((8192, 8192), (8192, 28672), (8192,), element_bytes=4)
    whole = upkeep(OPTIMIZERS["adamw"], [unit]).state_bytes
    small = upkeep(OPTIMIZERS["adamw-8bit"], [unit]).state_bytes
    assert small / whole == pytest.approx(1 / 4 * (1 + 8 / 256 / 2), rel=1e-4)


def test_elementwise_states_need_no_shapes_and_divide_by_the_shards() -> None:
    model = chain(units=4, parameters=1_000_000)
    assert upkeep(OPTIMIZERS["adamw"], model.units).state_bytes == 8 * 4_000_000
    assert upkeep(OPTIMIZERS["adamw"], model.units, shards=8).state_bytes == 4_000_000


def test_states_that_follow_shapes_refuse_a_profile_without_them() -> None:
    with pytest.raises(InputError, match="follows the shapes") as caught:
        upkeep(OPTIMIZERS["adafactor"], chain().units)
    assert "advise profile MODEL" in str(caught.value)


def test_shapes_of_a_profile_add_up_to_its_trainable_parameters() -> None:
    model, profile = _model()
    next(model.parameters()).requires_grad_(False)
    frozen = capture(model, torch.zeros(2, 8, dtype=torch.long))
    for unit in itertools.chain(profile.units, frozen.units):
        elements = sum(shape.elements * shape.count for shape in unit.shapes)
        assert elements == unit.trainable_parameters


def test_a_near_miss_is_named() -> None:
    with pytest.raises(UnknownNameError, match="adafactr") as caught:
        optimizer_profile("adafactr")
    assert "`adafactor`" in str(caught.value)


def test_the_largest_tensor_is_stepped_after_another_that_left_most() -> None:
    """Adam: two copies of the tensor that it steps, and one that is not freed yet of the last."""
    units = [
        UnitProfile(
            name=str(nbytes), kind="Unit", trainable_parameters=1, gradient_bytes=nbytes, costs={}
        )
        for nbytes in (4000, 1000, 200)
    ]
    assert upkeep(OPTIMIZERS["adam"], units).loop_bytes == 2 * 4000 + 1000
    assert upkeep(OPTIMIZERS["adam"], units[:1]).loop_bytes == 2 * 4000


def test_muon_steps_many_vectors_at_once_where_that_takes_more_than_a_matrix() -> None:
    """A copy of each (foreach): 200 of 64 elements."""
    shapes = (
        ParameterShape(sizes=(64, 32), element_bytes=4, count=1),
        ParameterShape(sizes=(64,), element_bytes=4, count=200),
    )
    unit = UnitProfile(
        name="block", kind="Unit", is_block=True, trainable_parameters=1, shapes=shapes, costs={}
    )
    assert upkeep(OPTIMIZERS["muon"], [unit]).list_bytes == 200 * 64 * 4
