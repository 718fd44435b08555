"""One cell: a model under a plan beside the same model on one process, on every rank of the plan.

Errors are relative, as `engines.parallel.parity` defines them.

Each rank compares whole gradients, gathered from the ranks that hold them. One process takes the
same microbatches one after another, as gradient accumulation does: a loss over pairs of rows
(CLIP's contrastive one) is another one for the whole batch, and sums over more rows at once are
rounded otherwise by more than 1e-5 where much cancels (the bias of a convolution). Their losses are
averaged; added up, where the loss of the whole batch is their sum.

Experts are chosen by the largest scores of a router. Scores of equal size up to rounding could go
either way under another batch shape; random weights in fp32 leave them far enough apart.
"""

from __future__ import annotations

import copy
import functools
import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from engines.apply import apply_plan
from engines.data.loader import split_rows_evenly
from engines.parallel.parity import largest_difference
from engines.plan import Plan
from profiles.capture.batch.call import call_model, loss_of
from profiles.capture.batch.rows import batch_size, split_rows
from profiles.model.profile import ModelProfile
from tests.engines.cases import cpu_ranks
from tests.matrix.architectures import Architecture, architecture_of

TOLERANCE = 1e-5


@dataclass(frozen=True)
class Difference:
    """Largest relative differences between a plan and one process, on one rank."""

    loss: float
    gradient: float
    worst_gradient: str


Find = Callable[[str], Architecture]
"""Makes a row of its name; equal by value, so that what is kept of one is found again."""


def difference(
    name: str, plan: Plan, profile: ModelProfile, find: Find = architecture_of
) -> Difference:
    """Run one step of architecture `name` under `plan`; all ranks of the plan call it.

    Raises:
        AssertionError: other parameters have gradients than on one process.
    """
    architecture = find(name)
    wanted_loss, wanted = _reference(name, plan.forwards * plan.data_degree, find)
    parallel = apply_plan(
        copy.deepcopy(_built(name, find)),
        plan,
        profile=profile,
        cluster=cpu_ranks(plan.world_size),
        loss_fn=architecture.loss_fn,
        loss_weight=architecture.loss_weight,
        sample=architecture.batch,
    )
    parts = split_rows(
        architecture.batch, split_rows_evenly(_rows(architecture), parallel.data_world_size)
    )
    loss = float(parallel.forward_backward(parts[parallel.data_rank]))
    got = parallel.full_gradients()
    assert got.keys() == wanted.keys(), f"not in both: {sorted(got.keys() ^ wanted.keys())}"
    worst = largest_difference(got, wanted)
    return Difference(abs(loss - wanted_loss) / abs(wanted_loss), worst.value, worst.name)


def _rows(architecture: Architecture) -> int:
    return batch_size(architecture.batch)


@functools.lru_cache(maxsize=1)
def _built(name: str, find: Find) -> nn.Module:
    """Equal on every rank."""
    torch.manual_seed(0)
    return find(name).build()


@functools.lru_cache(maxsize=4)
def _reference(name: str, pieces: int, find: Find) -> tuple[float, dict[str, Tensor]]:
    """Loss and gradients on one process; kept for the plans of one architecture."""
    architecture = find(name)
    model = copy.deepcopy(_built(name, find))
    losses = []
    for piece in split_rows(architecture.batch, split_rows_evenly(_rows(architecture), pieces)):
        output = call_model(model, piece, has_target=architecture.loss_fn is not None)
        loss = loss_of(output, piece, architecture.loss_fn)
        loss.backward()
        losses.append(loss.item())
    with torch.no_grad():
        output = call_model(model, architecture.batch, has_target=architecture.loss_fn is not None)
        whole = loss_of(output, architecture.batch, architecture.loss_fn).item()
    is_sum = math.isclose(whole, sum(losses), rel_tol=1e-4)
    share = 1.0 if is_sum else 1 / pieces
    gradients = {n: p.grad * share for n, p in model.named_parameters() if p.grad is not None}
    return sum(losses) * share, gradients
