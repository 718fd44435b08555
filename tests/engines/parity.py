"""Run a plan beside the same model on one process, on every rank, and measure the differences."""

from __future__ import annotations

import copy
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from engines.apply import apply_plan
from engines.data.loader import split_rows_evenly
from engines.parallel import ParallelModel
from engines.parallel.parity import relative as relative
from engines.plan import Plan
from profiles.capture.batch.call import Batch, call_model, loss_of
from profiles.capture.batch.rows import split_rows
from tests.engines.cases import CASES, WIRINGS, Case, cpu_ranks, profile_of


@dataclass(frozen=True)
class Parity:
    """Largest differences between a plan and one process, each relative to the largest value."""

    loss: float
    gradient: float
    parameter_after_steps: float
    worst_gradient: str


KINDS = ("dp_replicate=2", "dp_replicate=2 zero=1", "dp_replicate=2 zero=2", "dp_shard=2")
"""Every kind that two ranks can have."""

HSDP = "dp_replicate=2 dp_shard=2"


def spread(
    case: Case, plan: str, *, rows: int = 2, **options: Any
) -> tuple[torch.nn.Module, ParallelModel]:
    """The case's model under `plan`, and an equal reference that is left alone.

    The profile is taken from a sample of `rows` rows; the optimizer is SGD with momentum.
    """
    torch.manual_seed(1)
    reference = case.build()
    model = copy.deepcopy(reference)
    parsed = Plan.parse(plan)
    options.setdefault("optimizer", sgd)
    parallel = apply_plan(
        model,
        parsed,
        profile=profile_of(case, model, rows),
        cluster=cpu_ranks(parsed.world_size),
        loss_fn=case.loss_fn,
        sample=case.batch(rows),
        **options,
    )
    return reference, parallel


def parallelize(
    name: str, plan: str, *, rows: int = 2, **options: Any
) -> tuple[Case, torch.nn.Module, ParallelModel]:
    """`spread` of one of the CASES or WIRINGS."""
    case = {**CASES, **WIRINGS}[name]
    return case, *spread(case, plan, rows=rows, **options)


def alone(name: str, **options: Any) -> tuple[torch.nn.Module, ParallelModel]:
    """A plan of 1 in this process, without a launcher or a process group."""
    case = CASES[name]
    model = case.build()
    plan = options.pop("plan", Plan())
    options.setdefault("loss_fn", case.loss_fn)
    profile = profile_of(case, model)
    return model, apply_plan(model, plan, profile=profile, cluster=cpu_ranks(1), **options)


def sgd(parameters: list[torch.nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.05, momentum=0.9)


def local_rows(parallel: ParallelModel, batch: Batch, rows: int) -> Batch:
    """The rows of a global batch that this rank trains on."""
    parts = split_rows(batch, split_rows_evenly(rows, parallel.data_world_size))
    return parts[parallel.data_rank]


def measure(
    name: str, plan: str, rows: int = 8, steps: int = 3, more: int = 1, **options: Any
) -> Parity:
    """Loss and gradients of one step, then parameters after `steps` steps of SGD with momentum.

    Every step has `more` rows than the one before. `options` are `apply_plan`'s.
    """
    case, reference, parallel = parallelize(name, plan, **options)
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
        count = rows + step * more
        batch = case.batch(count)
        parallel.train_step(local_rows(parallel, batch, count))
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


def gradient_error(parallel: ParallelModel, reference: torch.nn.Module) -> float:
    """Largest gradient difference; both have run their backward. All ranks call it."""
    got = parallel.full_gradients()
    wanted = {n: p.grad for n, p in reference.named_parameters() if p.grad is not None}
    assert got.keys() == wanted.keys(), sorted(got.keys() ^ wanted.keys())
    return max(relative(got[n], wanted[n]) for n in wanted)


def state_error(parallel: ParallelModel, reference: torch.nn.Module) -> float:
    """Largest difference of parameters and floating-point buffers. All ranks call it."""
    got, wanted = parallel.state_dict(), reference.state_dict()
    assert list(got) == list(wanted)
    return max(relative(got[n], wanted[n]) for n in wanted if wanted[n].is_floating_point())


def reference_loss(model: torch.nn.Module, case: Case, batch: Batch) -> Tensor:
    """The mean loss of a whole global batch on one process."""
    output = call_model(model, batch, has_target=case.loss_fn is not None)
    return loss_of(output, batch, case.loss_fn)
