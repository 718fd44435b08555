"""Run a plan beside the same model on one process, on every rank, and measure the differences."""

from __future__ import annotations

import copy
from dataclasses import dataclass

import torch
from torch import Tensor

from engines.data import shares
from engines.hybrid import apply_plan
from engines.parallel import ParallelModel
from engines.plan import Plan
from profiles.batch import Batch, call_model, loss_of, split_rows
from tests.engines.cases import CASES, Case, cpu_ranks, profile_of


@dataclass(frozen=True)
class Parity:
    """Largest differences between a plan and one process, each relative to the largest value."""

    loss: float
    gradient: float
    parameter_after_steps: float
    worst_gradient: str


def parallelize(
    name: str, plan: str, *, rows: int = 2, **options: object
) -> tuple[Case, torch.nn.Module, ParallelModel]:
    """The case's model under `plan`, and an equal reference that is left alone."""
    case = CASES[name]
    torch.manual_seed(1)
    reference = case.build()
    model = copy.deepcopy(reference)
    parsed = Plan.parse(plan)
    parallel = apply_plan(
        model,
        parsed,
        profile=profile_of(case, model, rows),
        cluster=cpu_ranks(parsed.world_size),
        loss_fn=case.loss_fn,
        optimizer=lambda params: torch.optim.SGD(params, lr=0.05, momentum=0.9),
        **options,  # type: ignore[arg-type]
    )
    return case, reference, parallel


def local_rows(parallel: ParallelModel, batch: Batch, rows: int) -> Batch:
    """The rows of a global batch that this rank trains on."""
    parts = split_rows(batch, shares(rows, parallel.data_world_size))
    return parts[parallel.data_rank]


def measure(name: str, plan: str, rows: int = 8, steps: int = 3) -> Parity:
    """Loss and gradients of one step, then parameters after `steps` steps of SGD with momentum."""
    case, reference, parallel = parallelize(name, plan)
    trainable = [p for p in reference.parameters() if p.requires_grad]
    optimizer = torch.optim.SGD(trainable, lr=0.05, momentum=0.9)

    batch = case.batch(rows)
    expected = reference_loss(reference, case, batch)
    expected.backward()
    loss = parallel.forward_backward(local_rows(parallel, batch, rows))
    got = parallel.full_gradients()
    wanted = {n: p.grad for n, p in reference.named_parameters() if p.grad is not None}
    assert got.keys() == wanted.keys(), sorted(got.keys() ^ wanted.keys())
    errors = {n: relative(got[n], wanted[n]) for n in wanted}
    worst = max(errors, key=lambda n: errors[n])

    parallel.optimizer.zero_grad()
    optimizer.zero_grad()
    for step in range(steps):
        batch = case.batch(rows + step)
        parallel.train_step(local_rows(parallel, batch, rows + step))
        optimizer.zero_grad()
        reference_loss(reference, case, batch).backward()
        optimizer.step()
    after = parallel.state_dict()
    assert list(after) == list(reference.state_dict())
    drift = max(
        relative(after[n], value)
        for n, value in reference.state_dict().items()
        if value.is_floating_point()
    )
    return Parity(
        loss=relative(loss, expected.detach()),
        gradient=errors[worst],
        parameter_after_steps=drift,
        worst_gradient=worst,
    )


def reference_loss(model: torch.nn.Module, case: Case, batch: Batch) -> Tensor:
    """The mean loss of a whole global batch on one process."""
    output = call_model(model, batch, has_target=case.loss_fn is not None)
    return loss_of(output, batch, case.loss_fn)


def relative(got: Tensor, wanted: Tensor) -> float:
    """Largest difference over the largest value wanted."""
    scale = wanted.abs().max().item() or 1.0
    return (got - wanted).abs().max().item() / scale
