"""One program on a rank: under a plan, and alone.

Alone, the replicas of a plan are as many models in one process. Each takes its rows, in as many
microbatches as the plan; gradients are averaged and every model is stepped. Buffers are then those
of the first one, as the replicas of a plan keep them.

Errors are relative: of a loss to the loss; of a gradient or parameter its largest difference to
its largest element, but for gradients to at least `ZERO` of the model's largest.

Sums of other ranks round otherwise, and at a kink (a ReLU of nearly zero) or where a training
diverges a last bit changes a gradient by more than `TOLERANCE`. A step that differs is compared
with what a last bit of the parameters changes in one process, up to `LARGEST`.
"""

from __future__ import annotations

import warnings
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn

from engines.apply import apply_plan
from engines.data.loader import split_rows_evenly
from engines.plan import Plan
from profiles.capture.batch.call import call_model, loss_of
from profiles.capture.batch.rows import split_rows
from profiles.errors import AdvisorError
from profiles.model.profile import ModelProfile
from tests.engines.cases import cpu_ranks
from tests.fuzz_modules.program import ROWS, Program

TOLERANCE = 1e-4
LOW = 0.2
"""Of layers in bf16 that are split: their partial sums are rounded to 2 or 3 digits, six times over
in a deep program."""
STEPS = 2
LAST_BIT, NUDGES, LARGEST = 1.2e-7, 4, 1e-2
ZERO = 1e-2


@dataclass(frozen=True)
class Measured:
    """On one rank. `refused`: our own error, of applying the plan; `late`: of a step."""

    loss: float = 0.0
    gradient: float = 0.0
    parameter: float = 0.0
    worst: str = ""
    refused: str = ""
    late: str = ""

    tolerance: float = TOLERANCE

    @property
    def is_equal(self) -> bool:
        return all(e < self.tolerance for e in (self.loss, self.gradient, self.parameter))


def measure(program: Program, plan: Plan, profile: ModelProfile) -> Measured:
    """Train `program` for `STEPS` steps of SGD under `plan`; all ranks of the plan call it."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return _measure(program, plan, profile)


def _measure(program: Program, plan: Plan, profile: ModelProfile) -> Measured:
    try:
        parallel = apply_plan(
            program.build(),
            plan,
            profile=profile,
            cluster=cpu_ranks(plan.world_size),
            loss_fn=program.loss_fn,
            optimizer=sgd,
            sample=program.batch(0),
        )
    except AdvisorError as error:
        return Measured(refused=f"{type(error).__name__}: {error.what}")
    alone = Alone(program, replicas=plan.data_degree, microbatches=plan.microbatches)
    is_low = plan.tp > 1 and any(p.dtype == torch.bfloat16 for p in parallel.module.parameters())
    worst = Measured(tolerance=LOW if is_low else TOLERANCE)
    for step in range(STEPS):
        batch = program.batch(step)
        parts = split_rows(batch, split_rows_evenly(ROWS, parallel.data_world_size))
        wanted_loss, wanted = alone.forward_backward(batch)
        try:
            loss = float(parallel.forward_backward(parts[parallel.data_rank]))
        except AdvisorError as error:
            return Measured(late=f"{type(error).__name__}: {error.what}")
        got = {name: _dense(g) for name, g in parallel.full_gradients().items()}
        if got.keys() != wanted.keys():
            return Measured(
                gradient=1.0, worst=f"not in both: {sorted(got.keys() ^ wanted.keys())}"
            )
        worst = _worse(worst, abs(loss - wanted_loss) / abs(wanted_loss), got, wanted)
        parallel.optimizer.step()
        parallel.optimizer.zero_grad()
        alone.step()
        if not worst.is_equal:
            rounded = _rounding(program, plan, step, wanted_loss, wanted)
            # Both sides are rounded.
            return replace(worst, tolerance=max(worst.tolerance, min(2 * rounded, LARGEST)))
    state = {name: _dense(value) for name, value in parallel.state_dict().items()}
    worst = _with_state(worst, state, alone.state())
    if worst.is_equal:
        return worst
    rounded = _rounding_of_state(program, plan, alone.state())
    return replace(worst, tolerance=max(worst.tolerance, min(2 * rounded, LARGEST)))


def _rounding_of_state(program: Program, plan: Plan, wanted: dict[str, Tensor]) -> float:
    """`_rounding` of the state after all steps. A bias that began at zero and has a gradient of
    little more than rounding has no size of its own."""
    largest = 0.0
    for number in range(NUDGES):
        alone = Alone(program, replicas=plan.data_degree, microbatches=plan.microbatches)
        alone.nudge(torch.Generator().manual_seed(number))
        for step in range(STEPS):
            alone.forward_backward(program.batch(step))
            alone.step()
        largest = max(largest, _with_state(Measured(), alone.state(), wanted).parameter)
    return largest


def _rounding(
    program: Program, plan: Plan, step: int, wanted_loss: float, wanted: dict[str, Tensor]
) -> float:
    """The largest error of a step's gradients in one process whose parameters were moved by a last
    bit before it; at random, several times."""
    largest = 0.0
    for number in range(NUDGES):
        alone = Alone(program, replicas=plan.data_degree, microbatches=plan.microbatches)
        for before in range(step):
            alone.forward_backward(program.batch(before))
            alone.step()
        alone.nudge(torch.Generator().manual_seed(number))
        loss, got = alone.forward_backward(program.batch(step))
        if got.keys() == wanted.keys():
            error = abs(loss - wanted_loss) / abs(wanted_loss)
            largest = max(largest, _worse(Measured(), error, got, wanted).gradient)
    return largest


@torch.no_grad()
def nudge(model: nn.Module, generator: torch.Generator) -> None:
    """Move every parameter by its last bit: up, down or not at all."""
    for parameter in model.parameters():
        if parameter.is_floating_point():
            signs = torch.randint(-1, 2, parameter.shape, generator=generator)
            parameter.mul_(1 + LAST_BIT * signs)


def sgd(parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.05)


class Alone:
    """The replicas of a plan, in one process."""

    def __init__(self, program: Program, *, replicas: int, microbatches: int) -> None:
        self._models = [program.build() for _ in range(replicas)]
        self._loss_fn, self._microbatches = program.loss_fn, microbatches
        self._optimizers = [
            sgd([p for p in model.parameters() if p.requires_grad]) for model in self._models
        ]

    def forward_backward(self, batch: object) -> tuple[float, dict[str, Tensor]]:
        """The loss of a global batch, and its gradients."""
        replicas, total = len(self._models), 0.0
        parts = split_rows(batch, split_rows_evenly(ROWS, replicas))
        for model, part in zip(self._models, parts, strict=True):
            rows = ROWS // replicas
            for piece in split_rows(part, split_rows_evenly(rows, self._microbatches)):
                output = call_model(model, piece, has_target=self._loss_fn is not None)
                loss = loss_of(output, piece, self._loss_fn) / replicas / self._microbatches
                loss.backward()
                total += loss.item()
        summed: dict[str, Tensor] = {}
        for model in self._models:
            for name, parameter in model.named_parameters():
                if parameter.grad is not None:
                    gradient = _dense(parameter.grad)
                    summed[name] = summed[name] + gradient if name in summed else gradient.clone()
        return total, summed

    def step(self) -> None:
        """One of SGD, on what the last call summed."""
        first, *others = self._models
        sums: dict[str, Tensor] = {}
        for model in self._models:
            for name, parameter in model.named_parameters():
                if parameter.grad is not None:
                    sums[name] = sums.get(name, 0) + _dense(parameter.grad)  # type: ignore[operator]
        for model, optimizer in zip(self._models, self._optimizers, strict=True):
            for name, parameter in model.named_parameters():
                parameter.grad = sums[name].clone() if name in sums else None
            optimizer.step()
            optimizer.zero_grad()
        with torch.no_grad():
            for model in others:
                for name, buffer in model.named_buffers():
                    buffer.copy_(first.get_buffer(name))

    @torch.no_grad()
    def nudge(self, generator: torch.Generator) -> None:
        """`nudge` all replicas alike."""
        first, *others = self._models
        nudge(first, generator)
        for model in others:
            for name, parameter in model.named_parameters():
                parameter.copy_(first.get_parameter(name))

    def state(self) -> dict[str, Tensor]:
        return dict(self._models[0].state_dict())


def _dense(tensor: Tensor) -> Tensor:
    tensor = tensor.detach()
    return tensor.to_dense() if tensor.is_sparse else tensor


def _worse(
    before: Measured, loss: float, got: dict[str, Tensor], wanted: dict[str, Tensor]
) -> Measured:
    # A gradient that is zero but for rounding, of a bias before a norm, has no size of its own.
    least = ZERO * max(map(_largest, wanted.values()))
    errors = {
        name: _largest(got[name] - each) / max(_largest(each), least)
        for name, each in wanted.items()
    }
    name = max(errors, key=lambda each: _number(errors[each]))
    gradient = max(before.gradient, _number(errors[name]))
    worst = name if gradient > before.gradient else before.worst
    loss = max(before.loss, _number(loss))
    return replace(before, loss=loss, gradient=gradient, worst=worst)


def _with_state(before: Measured, got: dict[str, Tensor], wanted: dict[str, Tensor]) -> Measured:
    if got.keys() != wanted.keys():
        differing = sorted(got.keys() ^ wanted.keys())
        return replace(before, parameter=1.0, worst=f"not in both states: {differing}")
    errors = {
        name: _number(
            (got[name].cpu() - value).abs().max().item() / (value.abs().max().item() or 1.0)
        )
        for name, value in wanted.items()
        if value.numel() and (value.is_floating_point() or value.is_complex())
    }
    errors |= {
        name: float(not torch.equal(got[name].cpu(), value))
        for name, value in wanted.items()
        if name not in errors
    }
    name = max(errors, key=lambda each: errors[each])
    worst = name if errors[name] >= before.tolerance else before.worst
    return replace(before, parameter=errors[name], worst=worst)


def _largest(tensor: Tensor) -> float:
    return tensor.abs().max().item()


def _number(error: float) -> float:
    """A number that is none is no parity."""
    return error if error < float("inf") else 1e9
