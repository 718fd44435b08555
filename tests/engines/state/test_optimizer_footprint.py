"""Optimizer states are counted by letting the optimizer step once."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim.optimizer import register_optimizer_step_post_hook

from engines.state.optimizer_footprint import optimizer_footprint
from engines.state.optimizer_parts import indivisible
from profiles.capture.capture import capture
from profiles.errors import InputError
from profiles.model.profile import GLUE
from profiles.workload.optimizers import OPTIMIZERS, Law
from tests.contract.watch import LiveBytes
from tests.engines.cases import TinyGPT


class Averaged(torch.optim.Optimizer):
    """A user's own: three fp32 copies and a bf16 one per element, 14 bytes."""

    def __init__(self, params: Iterable[nn.Parameter]) -> None:
        super().__init__(params, {})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for parameter in group["params"]:
                state = self.state[parameter]
                for name in ("one", "two", "three"):
                    state[name] = torch.zeros_like(parameter)
                state["half"] = torch.zeros_like(parameter, dtype=torch.bfloat16)
                state["step"] = torch.tensor(0.0)


@pytest.mark.parametrize(
    ("factory", "state_bytes"),
    [
        (lambda p: torch.optim.SGD(p, lr=0.1), 0),
        (lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9), 4),
        (lambda p: torch.optim.AdamW(p), 8),
        (lambda p: torch.optim.AdamW(p, amsgrad=True), 12),
        (lambda p: torch.optim.RMSprop(p), 4),
        (Averaged, 14),
    ],
)
def test_state_bytes_are_those_of_the_textbook(
    factory: Callable[[list[nn.Parameter]], torch.optim.Optimizer], state_bytes: int
) -> None:
    actual = optimizer_footprint(factory)
    assert actual.state_bytes_per_element == state_bytes


@pytest.mark.parametrize("foreach", [False, True])
def test_the_named_optimizers_move_what_torchs_defaults_move(foreach: bool) -> None:
    factories: dict[str, Callable[[list[nn.Parameter]], torch.optim.Optimizer]] = {
        "sgd": lambda p: torch.optim.SGD(p, lr=0.1, foreach=foreach),
        "sgd-momentum": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, foreach=foreach),
        "adam": lambda p: torch.optim.Adam(p, foreach=foreach),
        "adamw": lambda p: torch.optim.AdamW(p, foreach=foreach),
    }
    plain = {name for name, actual in OPTIMIZERS.items() if actual.law is Law.ELEMENTWISE}
    assert factories.keys() == plain - {"adamw-compensated"}  # which is described in bf16
    for name, factory in factories.items():
        actual = optimizer_footprint(factory)
        assert actual.state_bytes_per_element == OPTIMIZERS[name].state_bytes_per_element
        assert actual.moved_bytes_per_element == pytest.approx(
            OPTIMIZERS[name].moved_bytes_per_element, rel=1e-3
        )


def test_plain_sgd_moves_parameter_and_gradient_once() -> None:
    # p <- p - lr g: p and g read, p written, 4 bytes each.
    assert optimizer_footprint(lambda p: torch.optim.SGD(p, lr=0.1)).moved_bytes_per_element == 12


def test_adafactor_keeps_a_row_and_a_column_per_matrix() -> None:
    actual = optimizer_footprint(lambda p: torch.optim.Adafactor(p))
    assert actual.state_bytes_per_element == pytest.approx(4 * (128 + 64) / (128 * 64))


def test_an_optimizer_that_exists_is_measured_without_touching_it() -> None:
    model = nn.Linear(1000, 1000)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    before = model.weight.clone()
    assert optimizer_footprint(optimizer).state_bytes_per_element == 8
    assert torch.equal(model.weight, before)
    assert not optimizer.state
    assert optimizer.param_groups[0]["params"][0] is model.weight


def test_no_optimizer_is_adamw() -> None:
    assert optimizer_footprint(None).state_bytes_per_element == 8


def test_a_factory_that_ignores_its_parameters_is_refused() -> None:
    model = nn.Linear(3, 3)
    with pytest.raises(InputError, match="does not use the parameters"):
        optimizer_footprint(lambda params: torch.optim.SGD(model.parameters(), lr=0.1))


class TwoSteps(torch.optim.SGD):
    """A user's own: it runs forward and backward twice, by a closure."""

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        assert closure is not None


@pytest.mark.parametrize("kind", [TwoSteps, torch.optim.LBFGS])
def test_an_optimizer_that_needs_a_closure_is_refused_by_name(
    kind: type[torch.optim.Optimizer],
) -> None:
    with pytest.raises(InputError, match=f"{kind.__name__} raised .* without a closure"):
        optimizer_footprint(lambda params: kind(params, lr=0.1), nn.Linear(3, 3))


class Normalised(torch.optim.Optimizer):
    """A user's own: every gradient is divided by its largest element."""

    def __init__(self, params: Iterable[nn.Parameter]) -> None:
        super().__init__(params, {})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for parameter in group["params"]:
                assert parameter.grad is not None
                parameter -= parameter.grad / parameter.grad.abs().max().item()


class Centred(torch.optim.SGD):
    """A user's own: the mean of every row of a gradient is taken from it."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.dim() > 1:
                    parameter.grad -= parameter.grad.mean(dim=1, keepdim=True)
        super().step()


class OneNorm(torch.optim.SGD):
    """A user's own: every matrix by itself, and a rate by the largest gradient of all matrices."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        every = [p for group in self.param_groups for p in group["params"]]
        largest = max(p.grad.abs().max() for p in every)
        for parameter in every:
            parameter.grad /= largest
        super().step()


class Counted(torch.optim.SGD):
    """A user's own, with a number of its steps."""

    def __init__(self, params: Iterable[nn.Parameter]) -> None:
        super().__init__(params, lr=0.1)
        self.steps = 0

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        self.steps += 1
        for group in self.param_groups:
            group["lr"] = 0.1 / self.steps
        super().step()


def by_place(parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
    """Rates by the place among the parameters, of which a stage has others."""
    groups = [{"params": [p], "lr": 0.1 / (1 + place)} for place, p in enumerate(parameters)]
    return torch.optim.SGD(groups)


def by_size(parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
    """Rates by the number of elements, of which a half has others."""
    return torch.optim.SGD([{"params": [p], "lr": p.numel() / 1000} for p in parameters])


@pytest.mark.parametrize(
    ("factory", "is_whole"),
    [
        (lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, weight_decay=0.1), False),
        (by_size, False),
        (lambda p: torch.optim.AdamW(p, lr=1e-7), False),
        (lambda p: torch.optim.RMSprop(p), False),
        (Averaged, False),
        (lambda p: torch.optim.Adafactor(p), True),
        (lambda p: torch.optim.Muon(p), True),
        (Normalised, True),
        (lambda p: torch.optim.SparseAdam(p), True),
    ],
)
def test_optimizers_that_cannot_step_half_a_matrix_are_found_by_a_trial(
    factory: Callable[[list[nn.Parameter]], torch.optim.Optimizer], is_whole: bool
) -> None:
    assert bool(indivisible(factory).rows) is is_whole
    assert bool(optimizer_footprint(factory).whole_because) is is_whole


@pytest.mark.parametrize(
    ("factory", "reasons"),
    [
        (lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, weight_decay=0.1), []),
        (lambda p: torch.optim.AdamW(p), []),
        (lambda p: torch.optim.Adafactor(p), ["rows", "columns"]),
        (lambda p: Centred(p, lr=0.1), ["columns"]),
        (lambda p: OneNorm(p, lr=0.1), ["rows", "columns", "parameters"]),
        (Counted, []),
        (by_size, []),
        (by_place, []),
    ],
)
def test_optimizers_that_look_at_whole_rows_or_at_all_parameters_are_found_by_a_trial(
    factory: Callable[[list[nn.Parameter]], torch.optim.Optimizer], reasons: list[str]
) -> None:
    actual = indivisible(factory)
    assert optimizer_footprint(factory).indivisible == actual
    assert [name for name, reason in actual if reason] == reasons


class Kinds(torch.optim.Optimizer):
    """A user's own: groups that say so are divided by their norm, and others are not."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, {"lr": 0.1, "is_normed": False})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for p in group["params"]:
                assert p.grad is not None
                p -= group["lr"] * p.grad / (p.grad.norm() if group["is_normed"] else 1.0)


def by_turns(params: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
    first, *others = params
    return Kinds([{"params": [first]}, {"params": others, "is_normed": True, "lr": 0.2}])


@pytest.mark.parametrize("is_built", [False, True])
def test_every_kind_of_group_is_tried(is_built: bool) -> None:
    model = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 3))
    given = by_turns(model.parameters()) if is_built else by_turns
    assert "Kinds looks at a whole matrix at a time" in indivisible(given, model).rows
    assert optimizer_footprint(given, model).indivisible == indivisible(given, model)


def test_a_schedulers_optimizer_is_tried_and_does_not_step() -> None:
    layer = nn.Linear(4, 4)
    optimizer = torch.optim.SGD(layer.parameters(), lr=0.1, momentum=0.9)
    torch.optim.lr_scheduler.StepLR(optimizer, step_size=1)
    called = []
    optimizer.register_step_pre_hook(lambda *_: called.append(1))
    for parameter in layer.parameters():
        parameter.grad = torch.ones_like(parameter)
    before = [parameter.clone() for parameter in layer.parameters()]
    actual = optimizer_footprint(optimizer, layer)
    assert actual.state_bytes_per_element == 4
    assert actual.units is not None
    assert sum(unit.state_bytes for unit in actual.units.values()) == 4 * 20
    assert called == []
    for parameter, value in zip(layer.parameters(), before, strict=True):
        assert torch.equal(parameter, value)


class Layered(torch.optim.Optimizer):
    """Muon for matrices inside blocks, AdamW for the rest, as one optimizer."""

    def __init__(self, params: list[nn.Parameter], hidden: Callable[[int], bool]) -> None:
        super().__init__(params, {})
        matrices = [p for i, p in enumerate(params) if p.dim() == 2 and hidden(i)]
        chosen = set(map(id, matrices))
        self.parts = (
            torch.optim.Muon(matrices),
            torch.optim.AdamW([p for p in params if id(p) not in chosen]),
        )

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for part in self.parts:
            part.step()
            self.state.update(part.state)


OWN: dict[str, Callable[[list[nn.Parameter]], torch.optim.Optimizer]] = {
    "sgd": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, weight_decay=0.1),
    "adamw": torch.optim.AdamW,
    "amsgrad": lambda p: torch.optim.AdamW(p, amsgrad=True),
    "adagrad": torch.optim.Adagrad,
    "adamax": torch.optim.Adamax,
    "nadam": torch.optim.NAdam,
    "radam": torch.optim.RAdam,
    "rmsprop": lambda p: torch.optim.RMSprop(p, centered=True, momentum=0.9),
    "lists": lambda p: torch.optim.AdamW(
        [{"params": p[::2]}, {"params": p[1::2], "amsgrad": True}], foreach=True
    ),
    "lists of sgd": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, foreach=True),
    "lists of rmsprop": lambda p: torch.optim.RMSprop(p, centered=True, foreach=True),
    "lists of nadam": lambda p: torch.optim.NAdam(p, foreach=True),
    "rprop": torch.optim.Rprop,
    "adafactor": torch.optim.Adafactor,
    "muon": lambda p: Layered(p, hidden=lambda i: i > 0),
    "own": Averaged,
}


@pytest.mark.parametrize("name", OWN)
def test_stand_in_steps_measure_state_and_working_bytes_of_a_real_step(name: str) -> None:
    model = TinyGPT(vocabulary=300, width=64, layers=2)
    profile = capture(model, torch.zeros(2, 8, dtype=torch.long))
    actual = optimizer_footprint(OWN[name], model, units=[u.name for u in profile.units])
    assert actual.units is not None

    optimizer = OWN[name](list(model.parameters()))
    for parameter in model.parameters():
        parameter.grad = torch.randn_like(parameter)
    optimizer.step()
    for unit in profile.units:
        inside = [p for n, p in model.named_parameters() if n.startswith(f"{unit.name}.")]
        inside += [model.position] if unit.name == GLUE else []
        states = [s for p in inside for s in optimizer.state[p].values()]
        tensors = [s for s in states if isinstance(s, torch.Tensor) and s.dim() > 0]
        state_bytes = sum(state.nbytes for state in tensors)
        if inside:
            assert actual.units[unit.name].state_bytes == state_bytes, unit.name
        else:
            assert unit.name not in actual.units

    everything = [s for state in optimizer.state.values() for s in state.values()]
    watched = LiveBytes(
        [
            *model.parameters(),
            *(p.grad for p in model.parameters() if p.grad is not None),
            *(s for s in everything if isinstance(s, torch.Tensor)),
        ]
    )
    before = watched.peak_bytes = watched.now()
    with watched:
        optimizer.step()
    # Scalars apart: step counters, norms, bias corrections.
    assert actual.working_bytes == pytest.approx(watched.peak_bytes - before, abs=4096)


def test_a_deeper_model_takes_no_more_steps_of_the_optimizer() -> None:
    """Equal parameters are stepped alike."""
    steps: list[int] = []

    def stepped(layers: int) -> int:
        before = len(steps)
        optimizer_footprint(torch.optim.AdamW, TinyGPT(layers=layers))
        return len(steps) - before

    handle = register_optimizer_step_post_hook(lambda *_: steps.append(1))
    try:
        assert stepped(2) == stepped(5)
    finally:
        handle.remove()


def test_on_accelerators_all_tensors_are_stepped_at_once() -> None:
    model = TinyGPT()
    total = sum(p.nbytes for p in model.parameters())
    for factory, list_bytes in ((torch.optim.AdamW, total), (torch.optim.Adafactor, None)):
        loop = optimizer_footprint(factory, model).working_bytes
        working = optimizer_footprint(factory, model, device_kind="cuda").working_bytes
        # torch/optim/_adafactor.py takes its foreach step only where it is asked for.
        assert working == (loop if list_bytes is None else pytest.approx(list_bytes, abs=4096))


def test_a_model_on_the_meta_device_is_measured_without_memory() -> None:
    with torch.device("meta"):
        model = nn.Linear(2**20, 2**14)  # 64 GiB, and twice that of moments
    actual = optimizer_footprint(torch.optim.AdamW, model, units=[""])
    assert actual.units is not None
    assert actual.units[""].state_bytes == 8 * (2**34 + 2**14)


class Peeking(Averaged):
    """Looks at its gradients in numpy, which stand-ins do not have."""

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for parameter in self.param_groups[0]["params"]:
            parameter.grad.numpy().sum()
        super().step()


def test_a_tiny_matrix_is_stepped_with_a_note_if_stand_ins_fail(
    caplog: pytest.LogCaptureFixture,
) -> None:
    with caplog.at_level("INFO", logger="engines.state.optimizer_footprint"):
        actual = optimizer_footprint(Peeking, TinyGPT())
    assert actual.units is None
    assert actual.state_bytes_per_element == 14
    assert "measured on one tiny matrix" in caplog.text
