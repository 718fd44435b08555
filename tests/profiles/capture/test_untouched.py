"""Looking changes nothing and allocates nothing."""

from __future__ import annotations

import copy
import itertools
import random
import sys

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from profiles.allocator.process_peak import peak_memory_bytes, reset_peak_memory
from profiles.capture.capture import capture
from profiles.capture.fakes.tensors import stand_ins
from profiles.model.profile import Numerics
from profiles.units import MIB
from tests.engines.cases import CASES, TinyGPT, token_loss


class Tally:
    """A class of the user's own, which keeps what it is given."""

    def __init__(self) -> None:
        self.calls, self.seen, self.mean = 0, {"rows": 0}, torch.zeros(4)

    def note(self, x: Tensor) -> Tensor:
        self.calls += 1
        self.seen["rows"] += len(x)
        self.mean = 0.5 * self.mean + x.detach().mean(0)
        self.last = x
        return self.mean


class Past(list[float]):
    """A list of the user's own."""


class Scheduled(nn.Module):
    """Takes from iterators that it holds."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.count = nn.Linear(4, 4), itertools.count(1)
        self.rates = {"up": iter([1.0, 2.0, 3.0, 4.0]), "round": itertools.cycle([1.0, 2.0])}

    def forward(self, x: Tensor) -> Tensor:
        scale = next(self.count) * next(self.rates["up"]) * next(self.rates["round"])
        out: Tensor = self.linear(x) * scale
        return out


@pytest.mark.parametrize("copies", [False, True])
def test_stand_ins_do_not_use_up_what_dynamo_compiles(copies: bool) -> None:
    """It compiles a function for so many kinds of arguments, and no more."""
    compiled: list[torch.fx.GraphModule] = []

    def backend(graph: torch.fx.GraphModule, _: list[Tensor]) -> nn.Module:
        compiled.append(graph)
        return graph

    model, x = torch.compile(nn.Linear(4, 4), backend=backend), torch.randn(3, 4)
    with stand_ins([model], copies=copies) as fakes:
        model(fakes.of(x))
    assert not compiled
    model(x)
    assert len(compiled) == 1


@pytest.mark.skipif(sys.version_info >= (3, 14), reason="iterators are not copied")
def test_iterators_stay_where_they_are() -> None:
    model = Scheduled()
    capture(model, torch.randn(3, 4))
    assert next(model.count) == 1
    assert next(model.rates["up"]) == 1.0
    assert next(model.rates["round"]) == 1.0


class Tick:
    __slots__ = ("count",)

    def __init__(self) -> None:
        self.count = 0


class Careless(nn.Module):
    """A forward that changes everything it can reach, and holds tensors that nobody registered."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.norm = nn.BatchNorm1d(4)
        self.lstm = nn.LSTM(4, 4)
        self.register_buffer("steps", torch.zeros(()))
        self.cache: list[Tensor] = []
        self.table = {"scale": torch.full((4,), 2.0)}
        self.hidden = [nn.Linear(4, 4)]  # not a submodule
        self.tallies = {"of inputs": [Tally()]}
        self.past, self.tick, self.array = Past([1.0]), Tick(), np.zeros(2)
        self.noise = torch.Generator().manual_seed(1)
        self.draws = np.random.default_rng(1), random.Random(1)

    def forward(self, x: Tensor) -> Tensor:
        self.steps += 1
        self.last = x
        self.cache.append(x)
        x = x - self.tallies["of inputs"][0].note(x)
        self.past.append(2.0)
        self.tick.count += 1
        self.array += 1
        torch.rand(3, generator=self.noise), self.draws[0].random(), self.draws[1].random()
        self.register_buffer("late", x.detach())
        random.random(), np.random.rand(), torch.rand(3)
        x = self.norm(self.hidden[0](self.linear(x))) * self.table["scale"]
        return self.lstm(F.dropout(x))[0]


def test_generators_that_modules_keep_draw_where_fakes_stand_in_and_are_put_back() -> None:
    model = Careless()
    before = model.noise.get_state()
    with stand_ins([model]):
        model.noise.manual_seed(2)
        assert type(model.noise.get_state()) is Tensor  # of values, as whoever restores it wants
    assert torch.equal(model.noise.get_state(), before)


def state_of(model: nn.Module) -> list[object]:
    """Everything one can see of a model, with identities."""
    results: list[object] = []
    for name, module in model.named_modules():
        results += [name, id(module), module.training, sorted(module.__dict__), id(module.__dict__)]
        results += [len(module._forward_hooks), len(module._forward_pre_hooks)]
    for name, tensor in [*model.named_parameters(), *model.named_buffers()]:
        gradient = None if tensor.grad is None else (id(tensor.grad), tensor.grad.tolist())
        results += [
            name,
            id(tensor),
            tensor._version,
            tensor.tolist(),
            tensor.requires_grad,
            gradient,
        ]
    return results


def random_state() -> tuple[object, ...]:
    array = np.random.get_state()
    return random.getstate(), array[1].tolist(), array[2], torch.get_rng_state().tolist()


@pytest.mark.parametrize("kind", Numerics)
def test_capture_leaves_model_objects_in_it_and_random_state_unchanged(kind: Numerics) -> None:
    model = Careless()
    model(torch.randn(3, 4)).sum().backward()
    model.cache.clear()
    hidden = [p.grad for p in model.hidden[0].parameters()]
    before, sample = state_of(model), torch.randn(3, 4)
    random_before = random_state()
    table = model.table["scale"]
    [tally] = model.tallies["of inputs"]
    noise_before, draws_before = model.noise.get_state(), copy.deepcopy(model.draws)
    tally_before, rows_before = dict(vars(tally)), dict(tally.seen)
    capture(model, sample, numerics=(kind,))
    assert random_state() == random_before
    assert state_of(model) == before
    assert model.cache == []
    assert model.table["scale"] is table
    assert vars(tally) == tally_before  # the same tensors: two of them would not compare
    assert tally.seen == rows_before
    assert model.past == [1.0, 2.0]
    assert model.tick.count == 1
    assert model.array.tolist() == [1, 1]
    assert torch.equal(model.noise.get_state(), noise_before)
    assert model.draws[0].random() == draws_before[0].random()
    assert model.draws[1].random() == draws_before[1].random()
    assert all(p.grad is g for p, g in zip(model.hidden[0].parameters(), hidden, strict=True))


def test_a_meta_model_of_seven_billion_parameters_takes_no_memory() -> None:
    capture(nn.Linear(2, 2), torch.zeros(1, 2))  # imports are not what is measured
    with torch.device("meta"):
        model = TinyGPT(vocabulary=128_000, width=4096, layers=32)
        model.position = nn.Parameter(torch.empty(2048, 4096))
    ids = torch.zeros(2, 2048, dtype=torch.long)
    cpu = torch.device("cpu")
    reset_peak_memory(cpu)
    before = peak_memory_bytes(cpu)
    profile = capture(model, (ids, ids), loss_fn=token_loss)
    assert profile.parameters > 7e9
    assert peak_memory_bytes(cpu) - before < 100 * MIB


def test_a_model_that_recomputes_by_itself_keeps_only_the_inputs_of_its_blocks() -> None:
    class Recomputed(TinyGPT):
        def forward(self, ids: Tensor) -> Tensor:
            x = self.embed(ids) + self.position[: ids.shape[1]]
            for block in self.blocks:
                x = checkpoint(block, x, use_reentrant=False)
            return self.head(self.norm(x))

    case = CASES["gpt"]
    plain = capture(TinyGPT(), case.batch(2), loss_fn=token_loss)
    recomputed = capture(Recomputed(), case.batch(2), loss_fn=token_loss)
    for before, after in zip(plain.blocks(), recomputed.blocks(), strict=True):
        one, other = before.cost(Numerics.AS_BUILT), after.cost(Numerics.AS_BUILT)
        assert other.activation_bytes == one.activation_bytes.model_copy(update={"per_sample": 0.0})
        # Its backward runs the forward again, up to the last tensor that is needed: the input of
        # the MLP's second matmul (4 widths squared; 2 samples of 12 tokens, width 32).
        again = other.backward_flop.at(2) - one.backward_flop.at(2)
        assert again == one.forward_flop.at(2) - 2 * (2 * 12) * 4 * 32**2


def test_capture_works_under_no_grad() -> None:
    case = CASES["gpt"]
    expected = capture(TinyGPT(), case.batch(2), loss_fn=token_loss)
    with torch.no_grad():
        assert capture(TinyGPT(), case.batch(2), loss_fn=token_loss) == expected
    with torch.inference_mode():
        assert capture(TinyGPT(), case.batch(2), loss_fn=token_loss) == expected


@pytest.mark.filterwarnings("ignore:`torch.jit:DeprecationWarning")  # raised by torch.compile
def test_a_compiled_model_is_followed_as_eager_code() -> None:
    case = CASES["gpt"]
    plain = capture(TinyGPT(), case.batch(2), loss_fn=token_loss)
    compiled = capture(torch.compile(TinyGPT()), case.batch(2), loss_fn=token_loss)
    assert [u.costs for u in compiled.units] == [u.costs for u in plain.units]
    assert [u.name for u in compiled.blocks()] == [f"_orig_mod.blocks.{i}" for i in range(3)]
