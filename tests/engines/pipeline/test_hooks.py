"""Hooks of the user's in a pipeline: they see and change what they do in one process."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from engines.apply import apply_plan
from engines.plan import Plan
from profiles.capture.capture import capture
from profiles.errors import ModelError, PlanError, RankError
from tests.engines.cases import cpu_ranks
from tests.engines.parity import gradient_error
from tests.workers import Pool

PLAN = "pp=2 schedule=gpipe microbatches=2 stages=third"


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.inner(x)
        return out


class Chain(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.blocks = nn.Linear(4, 4), nn.ModuleList([Block(), Block()])
        self.third, self.fourth = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.fourth(self.third(self.blocks[1](self.blocks[0](self.first(x))).relu()))
        return out


def hooked(model: Chain, kind: str) -> Callable[[Tensor, Tensor], Tensor]:
    """Hook a unit of the first stage or of the second; returns the loss, which may use `hidden`."""
    hidden: dict[str, Tensor] = {}

    def keep(module: nn.Module, args: Any, output: Tensor) -> None:
        hidden["output"] = output

    def keep_more(module: nn.Module, args: Any, output: Tensor) -> None:
        hidden["output"] = output * 2

    match kind:
        case "kept output":
            model.blocks[1].register_forward_hook(keep)
        case "kept inside":
            model.blocks[1].get_submodule("inner").register_forward_hook(keep)
        case "kept product":
            model.first.register_forward_hook(keep_more)
        case "changed in place":
            model.blocks[1].register_forward_hook(lambda module, args, output: output.mul_(3))
        case "changed output":
            model.blocks[1].register_forward_hook(lambda module, args, output: output * 3)
        case "changed input":
            model.third.register_forward_pre_hook(lambda module, args: (args[0] * 3,))
        case "changed result":
            model.register_forward_hook(lambda module, args, output: output * 3)
        case "changed gradient":
            model.third.register_full_backward_hook(lambda module, given, taken: (given[0] * 3,))

    def loss(output: Tensor, target: Tensor) -> Tensor:
        more = hidden["output"].square().mean() if kind.startswith("kept") else 0.0
        return (output - target).square().mean() + more

    return loss


def trained(kind: str) -> float | str:
    """Error of the gradients of a second step, or the refusal."""
    # What torch says, and would go on, where a tensor without memory meets real ones.
    warnings.filterwarnings("ignore", message="The .grad attribute of a Tensor that is not a leaf")
    torch.manual_seed(0)
    reference = Chain()
    model = copy.deepcopy(reference)
    loss_fn, reference_loss = hooked(model, kind), hooked(reference, kind)
    batch = torch.randn(4, 4), torch.randn(4, 4)
    profile = capture(model, batch, loss_fn=loss_fn)
    try:
        parallel = apply_plan(
            model, Plan.parse(PLAN), profile=profile, cluster=cpu_ranks(2), loss_fn=loss_fn
        )
        for _ in range(2):
            parallel.optimizer.zero_grad()
            parallel.forward_backward(batch)
    except (PlanError, ModelError, RankError) as error:
        return error.what
    reference_loss(reference(batch[0]), batch[1]).backward()
    return gradient_error(parallel, reference)


@pytest.mark.dist
@pytest.mark.parametrize(
    "kind",
    [
        "kept output",
        "changed in place",
        "changed output",
        "changed input",
        "changed result",
        "changed gradient",
    ],
)
def test_hooks_act_as_in_one_process(pool: Pool, kind: str) -> None:
    for error in pool.run(trained, kind, world_size=2):
        assert error < 1e-5


@pytest.mark.dist
def test_a_hidden_value_that_a_later_stage_needs_is_refused(pool: Pool) -> None:
    for text in pool.run(trained, "kept product", world_size=2):
        assert text == (
            "`(loss)` takes something that `first` made and does not return (a hook, a cache, a"
            " change in place): it cannot be sent over the border at `third`"
        )


@pytest.mark.dist
def test_a_hook_inside_a_unit_of_another_stage_is_reported_out_of_reach(pool: Pool) -> None:
    other, last = pool.run(trained, "kept inside", world_size=2)
    assert last.startswith(
        "the loss uses a tensor of another stage, which is not here: a hook inside"
    )
    assert f"rank 1 failed: ModelError: {last}" in other
